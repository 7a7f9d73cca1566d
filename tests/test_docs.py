"""What README and docs/ show runs as it stands, and what they name is there.

The Python blocks of a page run in order in one namespace, in a folder of their own. A block of the
language `output` is what the Python blocks since the last one print, numbers and paths aside;
`pytest --update-golden` writes it anew. Blocks of other languages (`console`, `text`) are not run.
The first block of docs/quickstart.md is the `decoder.py` that other pages import.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from link_tree import package_folders
from ranks import run_ranks
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser
from test_architecture import nodes_of, sources, tree_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lazyinline
from lazyinline.frontend.commands import COMMANDS

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LANGUAGES = {"python", "output", "console", "text", "{eval-rst}", "{include}", "{toctree}"}

FENCE = re.compile(r"^```([^\n`]*)$\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r'\]\(([^)\s]+)\)|(?:src|srcset|href)="([^"]+)"')
FOLDERS = "|".join((*(folder.name for folder in package_folders()), "tests", "benchmarks", "docs"))
FILE = re.compile(rf"`((?:{FOLDERS}|examples)/[\w./-]*)`")


class Runner:
    """Runs the blocks of one page and compares what they print, or notes it."""

    def __init__(self, cache: Path) -> None:
        self.cache = str(cache)
        self.printed = io.StringIO()
        self.shown: list[str] = []
        self._run = PythonEvaluator()

    def python(self, example: Example) -> None:
        with contextlib.redirect_stdout(self.printed):
            self._run(example)

    def note(self, example: Example) -> None:
        printed, self.printed = self.printed.getvalue(), io.StringIO()
        self.shown.append(printed.replace(self.cache, "~/.cache/lazyinline"))

    def compare(self, example: Example) -> None:
        self.note(example)
        printed = self.shown[-1]
        assert skeleton(printed) == skeleton(example.parsed), (
            f"{example.path}:{example.line} prints something else now; --update-golden writes it\n"
            f"{printed}"
        )

    def document(self, page: Path, shown: Callable[[Example], None]) -> Document:
        parsers = (CodeBlockParser("python", self.python), CodeBlockParser("output", shown))
        return Document.parse(str(page), *parsers)


def skeleton(text: str) -> list[list[str]]:
    """Returns what of a printed text is the same on every machine: its words, line by line."""
    text = re.sub(r"~?(?:/[\w.\-]+){2,}", "PATH", text)
    text = text.replace("; next time from cache", "")  # pages share one
    text = re.sub(r"\b1 thread\b", "1 threads", text)  # as many as the machine and its caller give
    text = re.sub(r"\d[\d.,]*(?:e[+-]?\d+)?", "0", text)
    return [line.split() for line in text.strip().splitlines()]


def rewritten(text: str, shown: list[str]) -> str:
    """Returns a page with other texts in its `output` blocks."""
    texts = iter(shown)

    def block(found: re.Match[str]) -> str:
        if found[1] != "output":
            return found[0]
        lines = (line.rstrip() for line in next(texts).strip("\n").splitlines())
        return "```output\n" + "\n".join(lines) + "\n```"

    return FENCE.sub(block, text)


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [found[2] for found in FENCE.finditer(text) if found[1] == language]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all pages: they compile the same blocks."""
    return tmp_path_factory.mktemp("pages")


KEPT = "README command-line concepts extending install large-models sharing"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
@pytest.mark.sweep(keep=KEPT.split())
def test_a_page_runs_and_prints_what_it_says(
    page: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    (tmp_path / "decoder.py").write_text(blocks(DOCS / "quickstart.md", "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(cache))
    for name in ("decoder", *(path.stem for path in tmp_path.glob("*.py"))):
        monkeypatch.delitem(sys.modules, name, raising=False)
    runner = Runner(cache)
    update = request.config.getoption("--update-golden")
    for example in runner.document(page, runner.note if update else runner.compare):
        example.evaluate()
    if update:
        page.write_text(rewritten(page.read_text(encoding="utf-8"), runner.shown))


@lazyinline.lazy_inline
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Net(nn.Module):
    """A model whose result is its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def parallel_blocks() -> list[str]:
    """The blocks on several devices, each alternative on its own."""
    found = [
        block for name in ("devices.md", "pipeline.md") for block in blocks(DOCS / name, "text")
    ]
    # What follows a step (how replicas share an optimizer) stands in a block without one.
    return [one for block in found for one in block.strip().split("\n\n") if "lazyinline." in one]


def runs_parallel_blocks(rank: int, folder: Path) -> list[tuple[str, float, float]]:
    """Runs each on one rank: returns it with the loss, its own and eager's, where it has one."""
    options = {"backend": "eager"}  # where there are no kernels to build, these take a second
    names = ("compile", "compile_step", "pipeline")
    here = {name: functools.partial(getattr(lazyinline, name), **options) for name in names}
    x = torch.arange(32.0).reshape(8, 4) / 32
    expected = Net()(x).item()
    found = []
    for code in parallel_blocks():
        scope: dict[str, Any] = {"lazyinline": types.SimpleNamespace(**here), "torch": torch}
        scope |= {
            "DDP": DistributedDataParallel,
            "fully_shard": fully_shard,
            "args": (x,),
            "batch": (x,),
        }
        scope["model"] = Net()
        exec(code, scope)
        loss = scope["loss"] if "loss" in scope else scope.get("step", scope["model"])(x)
        if loss is not None:
            if loss.requires_grad:
                loss.backward()
            found.append((code, loss.item(), expected))
    return found


@pytest.mark.sweep
def test_blocks_for_several_processes_run_and_give_eagers_loss(tmp_path: Path, cache: Path) -> None:
    first, last = run_ranks(tmp_path, "test_docs.runs_parallel_blocks", cache=cache)
    assert len(last) == len(parallel_blocks()) == 5
    assert len(first) == len(last) - 2  # the loss of a pipeline is on its last rank
    for code, loss, expected in (*first, *last):
        assert loss == pytest.approx(expected, rel=1e-5), code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert {found[1].partition(" ")[0] for found in FENCE.finditer(text)} <= LANGUAGES
    prose = FENCE.sub("", text)
    links = {a or b for a, b in LINK.findall(prose)}
    files = {link.partition("#")[0] for link in links if ":" not in link}
    missing = {link for link in files if link and not (page.parent / link).exists()}
    missing |= {file for file in FILE.findall(prose) if not (ROOT / file).exists()}
    assert not missing


def test_the_page_on_the_command_line_has_each_command() -> None:
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert {f"## {name}" for name in (*COMMANDS, "completion")} <= set(page.splitlines())


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and the site make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_the_readme_links_to_inside_of_pages_is_there() -> None:
    prose = FENCE.sub("", README.read_text(encoding="utf-8"))
    links = [a or b for a, b in LINK.findall(prose)]
    pairs = [link.split("#") for link in links if "#" in link]
    assert pairs
    assert not [(page, name) for page, name in pairs if name not in anchors(ROOT / page)]


def said(node: ast.AST) -> str:
    """Returns a text of the code with `…` for each value that is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def stands_in(text: str, parts: list[str]) -> bool:
    """Says whether a text has all parts, in order."""
    place = 0
    for part in parts:
        place = text.find(part, place) + len(part)
        if place < len(part):
            return False
    return True


def test_each_message_of_the_troubleshooting_page_is_one_that_the_code_gives() -> None:
    texts = {
        said(node)
        for path in sources()
        for node in nodes_of(tree_of(path))
        if isinstance(node, (ast.JoinedStr, ast.Constant))
    }
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert messages
    missing = [
        message
        for message in messages
        if not any(stands_in(text, message.split("…")) for text in texts)
    ]
    assert not missing


PAGE = ROOT / "docs" / "integrations.md"
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)")


@functools.cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_row_names_tests_that_are_there() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "| yes |" in line]
    assert rows
    for row in rows:
        named = TEST.findall(row)
        assert named, row
        for path, name in named:
            assert name in functions_of(path), f"{path} has no {name}"
