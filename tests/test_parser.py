"""The printer and the parser are inverses; the files of ``filetests`` give what they say."""

import ast
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from apart import in_threads
from filetests import FOLDER, FileTest
from models import Around, block
from programs import random_program
from torch import nn

import lazyinline
from lazyinline import LazyInlineError
from lazyinline.frontend.compiler import PASSES, Compiler, run
from lazyinline.frontend.options import Options
from lazyinline.frontend.passes.context import Context
from lazyinline.frontend.passes.state import Compilation, Goal, Pass, Subject, between
from lazyinline.reuse.errors import ParseError
from lazyinline.reuse.ir.leaf import leaf_key
from lazyinline.reuse.ir.parser import parse_program
from lazyinline.reuse.ir.printer import diff_texts, node_type, text_to_compare
from lazyinline.reuse.ir.program import (
    Closure,
    Composite,
    Leaf,
    ModelTensor,
    Program,
    Source,
    UserInput,
    Value,
    walk_closures,
)
from lazyinline.reuse.ir.verify import verify


def numbered(program: Program) -> Iterator[object]:
    """Yields all of a program that its text must hold; names, and the model's numbers, are left."""
    number: dict[Closure, int] = {}
    for closure in walk_closures(program):
        number[closure] = len(number)
        if isinstance(closure, Leaf):
            yield leaf_key(closure), closure.level, closure.kernels
            yield [node_type(node) for node in closure.nodes]
        elif isinstance(closure, Composite):
            yield "composite", list(rows(closure.program, number))
        else:
            yield type(closure), closure.type
    yield "main", list(rows(program, number))


def rows(program: Program, number: Mapping[Closure, int]) -> Iterator[object]:
    values: dict[Value, int] = {}
    for value, source in zip_longest(program.inputs, program.sources):
        values[value] = len(values)
        yield value.type, bound_to(source)
    for call in program.calls:
        yield number[call.closure], [values[v] for v in call.args], call.path, call.recompute
        for value in call.results:
            values[value] = len(values)
            yield value.type
    yield [values[v] for v in program.outputs], program.writes


def bound_to(source: Source | None) -> object:
    if isinstance(source, ModelTensor):
        return source.name, source.kind, source.tensor.requires_grad
    return source


def counted(closure: Closure) -> object:
    """Returns what a text tells of a leaf whose operators are not read."""
    own = (closure.first_target, closure.is_sum) if isinstance(closure, Leaf) else ()
    return closure.name, closure.num_nodes, own


def assert_inverse(program: Program) -> None:
    """Asserts that a program comes back from its text, in either form, and the text from that."""
    for text in (text_to_compare(program), str(program)):
        parsed, late = verify(parse_program(text)), parse_program(text, "later")
        assert list(map(counted, walk_closures(late))) == list(map(counted, walk_closures(parsed)))
        for one in (parsed, late):
            assert list(numbered(one)) == list(numbered(program))
        assert text_to_compare(parsed) == text_to_compare(program)
        assert str(parsed) == str(program)


def test_random_programs_come_back() -> None:
    for seed in range(15):
        assert_inverse(random_program(seed))


def varied(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has views, a random mask, statistics that it changes, and modes."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.linear(x).t().relu()
    with torch.no_grad():
        scale = x.square().mean()
    return self.norm(nn.functional.dropout(y.t().float(), 0.5)) * scale + x


def net() -> nn.Module:
    def forward(layers: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in layers[0].values():
            x = layer(x)
        return {"loss": x[::2].sum(), "rows": x.unbind(0)[1]}

    kind = block(varied)
    names = ("first", "its name, with a blank")
    return Around(forward, nn.ModuleDict({n: kind(norm=nn.BatchNorm1d(4)) for n in names})).float()


def test_the_programs_of_every_pass_come_back() -> None:
    compiler = Compiler(Options(backend="eager", recompute="full"))
    state = compiler.started(Subject(net(), (torch.randn(6, 4),), {}), Goal(train=True))
    seen = set()

    def look(one: Pass, before: Compilation, after: Compilation) -> None:
        for program in after.programs.values():
            seen.add(one.name)
            if all(program is not known for known in before.programs.values()):
                assert_inverse(program)

    run(between(PASSES, last="decompose"), state, look)
    assert {"capture", "autodiff", "decompose"} <= seen


def test_a_program_whose_sizes_vary_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes that are computed from symbols, in types and in operands."""
    seen = []
    decomposed = Context.decomposed

    def noted(self: Context, program: Program) -> Program:
        seen.extend([program, after := decomposed(self, program)])
        return after

    monkeypatch.setattr(Context, "decomposed", noted)

    class Varying(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.pad(super().forward(x), (0, 0, 1, 0)).view(-1, 2, 2).transpose(0, 1)
            return y.reshape(x.shape[0] + 1, 4)[: x.shape[0] // 2 * 2] * x.shape[0]

    compiled = lazyinline.compile(Varying(4, 4), backend="eager", dynamic=True)
    compiled(torch.randn(6, 4)).sum().backward()
    assert any("size(" in str(program) for program in seen)
    for program in {id(program): program for program in seen}.values():
        assert_inverse(program)


EVERYTHING = """\
$struct0 = struct()
$struct1 = struct(f32[], $struct0, i64[2])
$struct2 = struct(f32[], f32[3,4])

aten eager closure @leaf(%a0: f32[3:1,4:3], %s1: $struct1) -> ($struct2, f32[12]) {
  %3: f32[3:1,4:3] = clone(%a0)
  %4: f32[3:1,4:3] = mul.Tensor(%3, -2)
  %5: f32[3:1,4:3] = no_grad(mul.Tensor(%4, -2.5e-07))
  %6: c64[3:1,4:3] = autocast_cpu_bf16(no_grad(mul.Tensor(%5, complex(0.0, 2.0))))
  %7: f64[2,2] = full([2, 2], inf, dtype=f64, layout=torch.strided, device=device('cpu'))
  %8: f32[12] = flatten.using_ints(%a0)
  %9: f32[2,4] = index.Tensor(%a0, [%s1.1])
  %10: [f32[3:1,2:3], f32[3:1,2:3]] = split.Tensor(%a0, 2, 1)
  %11: f32[3:1,2:3] = getitem(%10, -1)
  %12: f32[3,4] = clone(%a0, memory_format=torch.contiguous_format)
  %13: f32[3,4] = div.Tensor_mode(%a0, %s1.0, rounding_mode='floor')
  %14: f32[3:1,4:3] = div.Tensor_mode(%a0, %s1.0, rounding_mode=None)
  return %s1.0, %12, %8
}

program @main(%x: f32[3:1,4:3] = input(0, grad, switched), %i: i64[2] = buffer(),
      %w: f32[] = buffer('a b')) -> (f32[], $struct2) {
  %v = pack()
  %v_1 = pack(%w, %v, %i)
  %y, %z = call @leaf(%x, %v_1, at='a,\\x20b', recompute='full')
  %f, %g = unpack(%y)
  return %f, %y
  write(%w, output=0)
}
"""


def test_every_kind_of_operand_and_type_comes_back() -> None:
    program = parse_program(EVERYTHING)
    text = re.sub(r"\s+// .*", "", str(program))
    assert text == EVERYTHING
    assert_inverse(program)


# What stands in a leaf or in a program: the place that is refused, and what is said of it.
LEAF = "closure @f(%x: f32[3]) -> (f32[3]) {\n  <>\n  return %y\n}"
MAIN = (
    "closure @f(%x: f32[3]) {\n  %y = sin(%x)\n  return %y\n}\nprogram @main(%x: f32[3]) {\n  <>\n}"
)
REFUSED = {
    (LEAF, "%y = «sinn»(%x)"): "there is no operator 'sinn'",
    (LEAF, "%y = «from_file»('/etc/passwd')"): "there is no operator 'from_file'",
    (LEAF, "%y = sin(«os»)"): "expected int or float or str",
    (LEAF, "%y = sin(«open('a')»)"): "expected int",
    (LEAF, "%y = sin(«%x.real»)"): "%x.real is not defined",
    (LEAF, "%y = sin(«[1 for a in b]»)"): "expected int",
    (LEAF, "%y = sin(«%z»)"): "%z is not defined",
    (LEAF, "«%x = sin(%x)»"): "%x is defined twice",
    (LEAF, "«y = sin(%x)»"): "expected a name %...",
    (LEAF, "%y = «mm(%x)»"): "aten.mm.default cannot be given this",
    (LEAF, "%y = «sin(%x, dim=1)»"): "aten.sin.default cannot be given this",
    (LEAF, "%y: «f32[4]» = sin(%x)"): "the operator gives f32[3]",
    (LEAF, "%y: «f32[3:2]» = sin(%x)"): "the operator gives f32[3]",
    (LEAF, "%y = sin(%x)«;»"): "unexpected ';'",
    (LEAF, "%y = sin(%x)  «#» a"): "unexpected '#'",
    (LEAF, "%y = sin«(»"): "'(' was never closed",
    (LEAF, "«import os»"): "expected %name: type = operator(...)",
    (LEAF, "«%y: f32[3]»"): "expected %name: type = operator(...)",
    (LEAF, "«%y = %z = sin(%x)»"): "expected %name: type = operator(...)",
    (LEAF, "%y = sin(" + "-" * 5000 + "1)"): "within one another",
    (LEAF, "%x.1 = full([99999, 2], 1)\n  %y = «unbind.int(%x.1)»"): "more than 65536 results",
    ("program @main(%x: f32[«1.5»]) {\n  return %x\n}", ""): "a size is from 0",
    ("program @main(%x: f32[«s0.real»]) {\n  return %x\n}", ""): "expected a size",
    ("program @main(%x: f32[«9**99»]) {\n  return %x\n}", ""): "expected a size",
    ("program @main(%x: f32[«9999999999999»]) {\n  return %x\n}", ""): "a size is from 0",
    (LEAF, "%y: «f33[3]» = sin(%x)"): "the operator gives f32[3]",
    (LEAF, "%y = autocast_cpu_f33(«sin(%x)»)"): "autocast_cpu_f33 names no dtype",
    (MAIN, "%y = call «@g»(%x)"): "@g is not defined",
    (MAIN, "%y = «eval»(%x)"): "@val is not defined",
    (MAIN, "«%y, %z = call @f(%x)»"): "2 names for 1 results",
    (MAIN, "%y = call «@f(%x, inline='yes')»"): "expected at='path'",
    (MAIN, "%y = «unpack»(%x)"): "unpack takes one struct",
    (MAIN, "return %x\n  write(«%y», output=0)"): "%y is not defined",
    (MAIN, "%y = call @f(%x)\n  return %y\n  «write(%y, output=0)»"): "expected write(%input",
    (MAIN, "return %x\n}\n«closure @g(%x: f32[3]) {»\n  return %x"): "nothing after the program",
    ("closure @f(%x: f32[3]) {\n  return %x\n«}»", ""): "expected a program at the end",
    ("program @main(%x: «f33[3]») {\n  return %x\n}", ""): "expected a type",
    ("program @main(%x: «f32[3:1,4]») {\n  return %x\n}", ""): "expected a type",
    ("program @main(%x: f32[3], %y: f32[03]) {\n  return %x\n}", ""): "leading zeros",
    ("program @main(%x: f32[3]@«f32[3]») {\n  return %x\n}", ""): "there is no device 'f32[3]'",
    ("program @main(%x: f32«\u0294»3\u0295) {\n  return %x\n}", ""): "unexpected",
    ("program @main(%x: f32[3] = «input()») {\n  return\n}", ""): "what a tensor is bound to",
    (
        "program @main(%x: f32[3] = input(0), «%y: f32[3]») {\n  return\n}",
        "",
    ): " follows ",  # a default, in the words of Python's version
    ("«program @main(%x: f32[3]) -> () {»\n  return %x\n}", ""): "other result types",
}


@pytest.mark.parametrize("case", REFUSED, ids="".join)
def test_what_is_no_program_is_refused_where_it_stands(case: tuple[str, str]) -> None:
    whole, part = case
    marked = whole.replace("<>", part)
    before, _, _ = marked.partition("«")
    with pytest.raises(ParseError) as refused:
        parse_program(marked.replace("«", "").replace("»", ""))
    said, _, caret = str(refused.value).split("\n")
    assert REFUSED[case] in said
    if "«" in marked:
        assert said.startswith(f"line {before.count(chr(10)) + 1}: ")
        assert caret == " " * len(before.rpartition("\n")[2]) + "^"


def test_a_mistake_is_shown_with_its_line_and_place() -> None:
    with pytest.raises(ParseError) as refused:
        parse_program("\n" + LEAF.replace("<>", "%layers.0.y: f32[] = sum(%undefined)"))
    assert str(refused.value) == (
        "line 3: %undefined is not defined\n"
        "  %layers.0.y: f32[] = sum(%undefined)\n"
        "                           ^"
    )


@pytest.mark.parametrize(("size", "offset"), [(1000, 0), (4, 100)])
def test_a_view_of_more_memory_than_there_is_is_refused(size: int, offset: int) -> None:
    # PyTorch's fake tensors do not ask, and a kernel would read what is not the program's.
    text = f"""
closure @view(%x: f32[3,4]) -> (f32[{size}]) {{
  %1: f32[{size}] = as_strided(%x, [{size}], [1], {offset})
  %2: f32[{size}] = add.Tensor(%1, 1)
  return %2
}}

program @main(%x: f32[3,4] = input(0)) -> (f32[{size}]) {{
  %r = call @view(%x)
  return %r
}}
"""
    with pytest.raises(ParseError, match="reaches beyond the memory"):
        parse_program(text)


def test_a_line_of_a_leaf_that_is_read_later_is_refused_where_it_stands() -> None:
    program = random_program(0)
    lines = text_to_compare(program).split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("  return")) - 1
    lines[at] = lines[at].replace("= ", "= no_such_", 1)
    late = parse_program("\n".join(lines), "later")
    leaf = next(c for c in walk_closures(late) if isinstance(c, Leaf))
    assert leaf.num_nodes > 1
    with pytest.raises(ParseError, match=rf"(?s)^line {at + 1}: there is no operator 'no_such_"):
        _ = leaf.module


def test_threads_parse_programs_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own parser fails where a finalizer lets another thread begin half way."""
    text, parse, parsing = str(random_program(0)), ast.parse, []

    def watched(*args: Any, **options: Any) -> ast.AST:
        parsing.append(len(parsing))
        time.sleep(0.001)
        tree = parse(*args, **options)
        assert parsing.pop() == 0
        return tree

    monkeypatch.setattr(ast, "parse", watched)
    assert in_threads(lambda _: str(parse_program(text))) == [text] * 3


CASES = [
    pytest.param(path, index, id=f"{path.stem}: {test.title}")
    for path in sorted(FOLDER.glob("*.txt"))
    for index, test in enumerate(FileTest.read(path))
]


@pytest.mark.parametrize(("path", "index"), CASES)
def test_passes_give_what_files_say(path: Path, index: int, request: pytest.FixtureRequest) -> None:
    test = FileTest.read(path)[index]
    assert test.error or test.check or test.executes, "a file test expects something"
    if test.error:
        with pytest.raises(LazyInlineError) as refused:
            test.text()
        assert test.error in str(refused.value).partition("\n")[0]
        return
    text = test.text()
    if not test.check:
        return
    if request.config.getoption("--update-golden"):
        test.write(path, index, text)
    elif text != test.expected:
        pytest.fail(diff_texts(test.expected, text), pytrace=False)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("recompute", ["recompute", "recompute=full", "recompute=selective"])
@pytest.mark.sweep(keep=["full-0", "full-3", "full-5", "selective-7"])
def test_random_programs_give_what_pytorch_gives_after_each_pass(recompute: str, seed: int) -> None:
    passes = [(name, option) for name, _, option in [recompute.partition("=")]]
    passes = [("autodiff", ""), *passes, ("decompose", ""), ("lower", ""), ("link", "")]
    program = random_program(seed, structs=False)
    sources = [UserInput(i, v.hint, True) for i, v in enumerate(program.inputs)]
    text = str(replace(program, sources=tuple(sources)))
    FileTest(text, passes, executes=True, error="", check="", expected="").text()
