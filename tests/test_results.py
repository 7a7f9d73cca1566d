"""What a model returns is what eager returns: the same classes and the same objects."""

import pytest
from worlds import assert_as_eager

MODEL = """
SHARED = {"list": [1, 2]}

class Held: pass
class Slotted:
    __slots__ = ("value",)
    def __init__(self, value): self.value = value

def captured(value): return lambda: value
def of_objects(value):
    found = np.empty(1, dtype=object)
    found[0] = value
    return found
def holder(value): return types.SimpleNamespace(value=value)
def twice(y):
    both = [y]
    return both, both
def inputs(): return example(), [[torch.ones(2)]]
def forward(self, x, given):
    y = self.linear(x)
    return y, RESULT

model = made(block(forward)(table={"a": 1}, nested={"a": [1]}), "v.eval()")
"""

# What is returned beside a tensor y, and how the tensors in a result r are read.
LEADING: dict[str, tuple[str, str]] = {
    "generator": ("(y * i for i in range(2))", "list(r)"),
    "map": ("map(torch.relu, [y, y])", "list(r)"),
    "zip": ("zip([y], [y])", "[t for pair in r for t in pair]"),
    "enumerate": ("enumerate([y])", "[t for _, t in r]"),
    "reversed": ("reversed([y, y + 1])", "list(r)"),
    "iterator": ("iter([y])", "list(r)"),
    "iterator of numbers": ("iter([1.0, 2.0])", "list(r)"),
    "count": ("itertools.count()", "[next(r), next(r)]"),
    "chain": ("itertools.chain([y])", "list(r)"),
    "view of a dict": ("{'a': y}.values()", "list(r)"),
    "proxy of a dict": ("types.MappingProxyType({'a': y})", "[r['a']]"),
    "set": ("{y}", "list(r)"),
    "array of objects": ("of_objects(y)", "[r[0]]"),
    "function": ("captured(y)", "[r()]"),
    "default": ("lambda found=y: found", "[r()]"),
    "partial": ("functools.partial(torch.relu, y)", "[r()]"),
    "method": ("y.sum", "[r()]"),
    "method of a module": ("self.linear.forward", "[r(torch.ones(4, dtype=y.dtype))]"),
    "object": ("holder(y)", "[r.value]"),
    "slots": ("Slotted([y])", "r.value"),
    "cell": ("types.CellType(y)", "[r.cell_contents]"),
    "exception": ("ValueError(y)", "[r.args[0]]"),
    "module": ("self.linear", "[r.weight]"),
    "parameter in an object": ("holder(self.linear.weight)", "[r.value]"),
}


READ_ONCE = ("generator", "map", "zip", "enumerate", "reversed", "iterator", "chain", "count")
SWEPT = ("zip", "enumerate", "reversed", "iterator of numbers", "count", "chain", "proxy of a dict",
    "array of objects", "method of a module", "parameter in an object")  # fmt: skip


@pytest.mark.parametrize("name", LEADING)
@pytest.mark.sweep(keep=[f"[{name}]" for name in LEADING if name not in SWEPT])
def test_a_result_that_leads_to_tensors_leads_to_eagers(name: str) -> None:
    result, read = LEADING[name]
    reading = f"def read(r, y): return [type(r).__name__, *({read})]"
    look = "[r[0], *read(r[1], r[0]), *(type(t).__name__ for t in read(r[1], r[0]))]"
    if name in READ_ONCE:
        look = "[r[0], *read(r[1], r[0])]"
    assert_as_eager(MODEL.replace("RESULT", result), reading, look=look, scene=[""] * 3)


# The very object that the user has.
SAME: dict[str, tuple[str, str]] = {
    "argument": ("given", "r[1] is given[1]"),
    "in an argument": ("given[0]", "r[1] is given[1][0]"),
    "attribute": ("self.table", "r[1] is model.table"),
    "in an attribute": ("[self.nested['a']]", "r[1][0] is model.nested['a']"),
    "global": ("SHARED", "r[1] is SHARED"),
    "in a global": ("{'n': SHARED['list']}", "r[1]['n'] is SHARED['list']"),
    "twice": ("twice(y)", "r[1][0] is r[1][1]"),
}


@pytest.mark.parametrize("name", SAME)
def test_a_returned_list_is_the_one_that_eager_returns(name: str) -> None:
    result, is_same = SAME[name]
    outcome = assert_as_eager(MODEL.replace("RESULT", result), look=is_same)
    assert [seen["outputs"] for seen in outcome.seen] == [True, True]


CLASSES = """
def inputs():
    x = torch.ones(2 + next(lengths), 2)
    return x, x.shape
lengths = itertools.count(1)
model = block(lambda self, x, size: (RESULT))()
def classes(value):
    if isinstance(value, dict):
        return [type(value), *(part for k, v in value.items() for part in (k, classes(v)))]
    if isinstance(value, (list, tuple)):
        return [type(value), *map(classes, value)]
    return type(value)
"""


@pytest.mark.parametrize(
    "result",
    [
        *("(x, x.shape)", "x.shape", "[x, {'size': x.size()}]", "(x, x.stride())"),
        *("[[x], [x], {'a': [x]}]", "collections.OrderedDict(b=x, a=x.shape)"),
        *("collections.defaultdict(list, a=[x])", "(x, size.numel(), size)"),
    ],
)
def test_a_result_has_the_classes_that_eager_gives_it(result: str) -> None:
    """The last two lengths are run by one program, whose sizes are symbols."""
    look = "[r, str(classes(r))]"
    outcome = assert_as_eager(
        CLASSES.replace("RESULT", result), look=look, scene=[""] * 3, fallback="error"
    )
    assert not outcome.eagerly
