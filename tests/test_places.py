"""Every way in which Python reaches a value, asked: does another block share, is a change noticed?

A way is text: what puts a value V where it is found (``h`` is the block), and the expression that
finds it. Ways inside lead from a block to what belongs to it; ways outside to what all share.
"""

from collections.abc import Sequence

import pytest
from values import HELPERS
from worlds import Outcome, assert_as_eager

from lazyinline import CaptureError
from lazyinline.backend.launches.torch_native import native_library
from lazyinline.backend.run.runtime import ClosureRuntime


@pytest.fixture(autouse=True)
def natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager kernels need no native library; guards compare by it all the same, as with others."""
    monkeypatch.setattr(ClosureRuntime, "hold", native_library().hold)


# ---- from a block to what belongs to it ----------------------------------------------------------

AROUND = '''
BY, BY_REFERENCE, WEAKLY = {}, {}, weakref.WeakKeyDictionary()
WEAK_SET, LARGE = weakref.WeakSet(), set()
ADDRESS_OF = id
class Weakly:
    """A descriptor that keeps its values beside the objects."""
    def __get__(self, owner, kind): return self if owner is None else WEAKLY[owner]
    def __set__(self, owner, value): WEAKLY[owner] = value
class ByAddress:
    def __get__(self, owner, kind): return self if owner is None else BY[id(owner)]
    def __set__(self, owner, value): BY[id(owner)] = value
class Alike(type):
    """The metaclass of classes that say they are one and the same."""
    def __eq__(cls, other): return isinstance(other, Alike)
    def __hash__(cls): return 1
class One(metaclass=Alike):
    def value(self): return 1.0
class Two(metaclass=Alike):
    def value(self): return 2.0
class Told:
    def __init__(self, value): self.value = value
    def __str__(self): return "x" * int(self.value)
@functools.cache
def remembered(block): return float(block.v)
@functools.cache
def remembered_by_address(address): return BY[address]
def annotated(value): return made(plain(), f"v.__annotations__ = {{'a': {value}}}")
def put(h, name, value): setattr(h, name, value)
'''
# fmt: off
SHARED_INSIDE = {
    "attribute": ("h.v = V", "self.v"),
    "vars": ("h.v = V", "vars(self)['v']"),
    "getattr": ("h.v = V", "getattr(self, 'vv'[:1])"),
    "property": ("h._v = V; type(h).v = property(lambda self: self._v)", "self.v"),
    "list": ("h.v = [V]", "self.v[0]"),
    "table in a namespace": ("h.v = NS(a={'k': (V,)})", "self.v.a['k'][0]"),
    "object": ("h.v = Value(V)", "self.v.value"),
    "method": ("h.v = Value(V).get", "self.v()"),
    "slot": ("h.v = Slotted(V)", "self.v.value"),
    "data": ("h.v = Data(V)", "self.v.value"),
    "closure": ("h.v = captured(V)", "self.v()"),
    "default": ("h.v = default(V)", "self.v()"),
    "default by name": ("h.v = keyword(V)", "self.v()"),
    "partial": ("h.v = functools.partial(lambda found: found, V)", "self.v()"),
    "attribute of a function": ("h.v = with_value(plain(), V)", "self.v.value"),
    "module inside": ("h.linear.v = V", "self.linear.v"),
    "class of its own": ("h.v = Value(V)", "self.v.__class__.of_class() * self.v.value"),
}
INSIDE = SHARED_INSIDE | {
    "dictionary by module": ("BY[h] = V", "BY[self]"),
    "dictionary by child": ("BY[h.linear] = V", "BY[self.linear]"),
    "id": ("BY[id(h)] = V", "BY[id(self)]"),
    "id by another name": ("BY[id(h)] = V", "BY[ADDRESS_OF(self)]"),
    "hash": ("BY[hash(h)] = V", "BY[hash(self)]"),
    "__hash__": ("BY[hash(h)] = V", "BY[self.__hash__()]"),
    "dir": ("put(h, 'more' + 'x' * int(V), 1)", "sum('more' in name for name in dir(self)) + V0"),
    "classes that say they are equal": ("h.v = Two() if V > 1 else One()", "self.v.value()"),
    "weak dictionary": ("WEAKLY[h] = V", "WEAKLY[self]"),
    "weak set": ("WEAK_SET.add(h) if V > 1 else 0", "1.0 + (self in WEAK_SET)"),
    "weak reference as a key": ("BY_REFERENCE[weakref.ref(h)] = V",
        "BY_REFERENCE[weakref.ref(self)]"),
    "set": ("LARGE.add(h) if V > 1 else 0", "1.0 + (self in LARGE)"),
    "cache": ("h.v = V", "remembered(self)"),
    "cache by address": ("BY[id(h)] = V", "remembered_by_address(id(self))"),
    "weak descriptor": ("type(h).w = Weakly(); h.w = V", "self.w"),
    "descriptor by address": ("type(h).w = ByAddress(); h.w = V", "self.w"),
    "object.__getattribute__": ("h.v = V", "object.__getattribute__(self, 'v')"),
    "__reduce_ex__": ("h.v = V", "self.__reduce_ex__(2)[2]['v']"),
    "copy": ("h.v = V", "copy.copy(self).v"),
    "pickle": ("h.v = V", "float(len(pickle.dumps(self.v)) + self.v)"),
    "attrgetter": ("h.v = V; h.get = operator.attrgetter('v')", "self.get(self)"),
    "frame": ("h.v = V", "sys._getframe(0).f_locals['self'].v"),
    "str": ("h.v = Told(V)", "len(str(self.v))"),
    "repr": ("h.extra_repr = lambda: 'x' * int(V)", "len(repr(self))"),
    "derived class": ("h.v = derived(Value, kind=V)()", "self.v.__class__.kind"),
    "name": ('h.v = made(plain(), f\'v.__name__ = {"x" * int(V)!r}\')', "len(self.v.__name__)"),
    "docs": ('h.v = made(plain(), f\'v.__doc__ = {"x" * int(V)!r}\')', "len(self.v.__doc__)"),
    "annotation": ("h.v = annotated(V)", "self.v.__annotations__['a']"),
    "attribute of a weight": ("h.linear.weight.v = V", "self.linear.weight.v"),
    "attribute of a weight, or none": ("h.linear.weight.v = V",
        "getattr(self.linear.weight, 'v', 1.0)"),
    "weak reference": ("h.v = weakref.ref(put(h, 'kept', Value(V)) or h.kept)", "self.v().value"),
}
# fmt: on
@pytest.mark.parametrize(
    ("model", "scene"),
    [
        ("block(lambda self, x: self.linear(x) * len(dir(self)))()", ["", "model.more = 1"]),
        (
            "Beside(*(put(B(v=Value(id)), v) for v in (1.0, 1.0, 2.0)))",
            [""],
        ),
        (
            "block(lambda self, x: x * object.__getattribute__(self, 'v'))(v=1.0)",
            ["", "model.v = 2.0"],
        ),
        ("block(lambda self, x: x * copy.copy(self).v)(v=1.0)", ["", "model.v = 2.0"]),
    ],
    ids=[
        "a name more in dir()",
        "id() by an attribute of an object",
        "object.__getattribute__()",
        "copy()",
    ],
)
def test_what_shows_all_of_an_object_is_compared_and_an_address_shares_nothing(
    model: str, scene: list[str]
) -> None:
    by_address = """
B = block(lambda self, x: self.linear(x) * BY[self.v.value(self)])
def put(h, V):
    BY[id(h)] = V
    return h
"""
    assert_as_eager(HELPERS, AROUND, by_address, f"model = {model}", scene=scene)


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_block_finds_inside_tells_it_apart_and_is_noticed(name: str) -> None:
    """Of three blocks the last finds another value; then the first finds one, too."""
    put, get = INSIDE[name]
    model = f"""
V0 = 0.0
B = block(lambda self, x: torch.tanh(self.linear(x)) * ({get}))
def put_it(h, V):
    {put}
    return h
model = Beside(*(put_it(B(), value) for value in (1.0, 1.0, 2.0)))
"""
    scene = ["", "put_it(model.layers[0], 3.0)"]
    outcome = assert_as_eager(HELPERS, AROUND, model, scene=scene)
    decisions = {d.path: d for d in outcome.reports[0].decisions}
    assert not ("layers.2" in decisions and decisions["layers.2"].shared)
    assert name not in SHARED_INSIDE or decisions["layers.1"].shared


# ---- to what all share ---------------------------------------------------------------------------

SURROUNDINGS = """
G, TABLE, SPACE, OBJECT, PRIVATE = 1.0, {"a": [1.0]}, NS(v=1.0), Value(1.0), Private(1.0)
DEEP, LOCAL, SLOTS, HELD = Value(Value(Value(1.0))), local(), Slotted(1.0), [Value(1.0)]
VARIABLE = variable(1.0)
SETTINGS = sys.modules["world_settings"] = with_value(types.ModuleType("settings"))
os.environ["LAZYINLINE_TEST"] = "1.0"
class Shared(metaclass=Meta):
    v = 1.0
    def get(self): return 1.0
    def __mul__(self, other): return 1.0
class Below(Shared): pass
class Holder:
    def __init__(self): self.values = [1.0]
    def __getitem__(self, index): return self.values[index]
    def __call__(self): return self.values[0]
HOLDER, MADE, BELOW = Holder(), Shared(), Below()
FROM_C, MONEY = decimal.Context(prec=1), Money("1")
class Other: pass
OTHER = Other()
class Abstract(abc.ABC): pass
def helper(): return 1.0
def reader(): return DEEP.value.value
def function(): return 1.0
def with_default(x=1.0): return x
def code_of(value): return eval(f"lambda: {value}").__code__
function.v = 1.0
def dispatched(value): return 1.0
dispatched = functools.singledispatch(dispatched)
@functools.lru_cache
def cached(): return G
def number(value): return float(value)
def importing():
    from world_settings import value
    return value
def outer(value):
    def get(): return value
    def put(new):
        nonlocal value
        value = new
    return get, put
get_captured, put_captured = outer(1.0)
class Local: v = 1.0
def of_local(kind): return lambda: kind.v
get_local = of_local(Local)
def set_global(name, value): globals()[name] = value
"""
# A change here is one of the whole model: no object that the forward reads holds it.
# fmt: off
OUTSIDE = {
    "global": ("set_global('G', V)", "G", "the global G"),
    "entry of a global": ("TABLE['a'][0] = V", "TABLE['a'][0]", "the global TABLE"),
    "attribute of a namespace": ("SPACE.v = V", "SPACE.v", "the global SPACE"),
    "attribute of an object": ("OBJECT.value = V", "OBJECT.get()", "the global OBJECT"),
    "attribute by text": ("OBJECT.value = V", "getattr(OBJECT, 'val' + 'ue')", "the global OBJECT"),
    "attributes replaced": ("OBJECT.__dict__ = {'value': V}", "OBJECT.value", "the global OBJECT"),
    "class replaced": ("OBJECT.__class__ = derived(Value, kind=V)", "OBJECT.kind",
        "the global OBJECT"),
    "private slot": ("PRIVATE.put(V)", "PRIVATE.get()", "the global PRIVATE"),
    "slot": ("SLOTS.value = V", "SLOTS.value", "the global SLOTS"),
    "item": ("HOLDER.values[0] = V", "HOLDER[0]", "the global HOLDER"),
    "call": ("HOLDER.values[0] = V", "HOLDER()", "the global HOLDER"),
    "deep below, by a helper": ("DEEP.value.value.value = V", "reader().value", "the global DEEP"),
    "object in a list": ("HELD[0].value = V", "HELD[0].value", "the global HELD"),
    "context variable": ("VARIABLE.set(V)", "VARIABLE.get()", "the global VARIABLE"),
    "variable of a thread": ("LOCAL.value = V", "LOCAL.value", "the global LOCAL"),
    "attribute of a class": ("Shared.v = V", "Shared.v", ""),
    "class of an object": ("Shared.v = V", "MADE.v", ""),
    "base class": ("Shared.v = V", "BELOW.v", ""),
    "class of a class": ("Meta.value = V", "Shared.value", ""),
    "method": ("Shared.get = lambda self: V", "MADE.get()", ""),
    "operator": ("Shared.__mul__ = lambda self, other: V", "MADE * 1", ""),
    "number of a class": ("Money.scale = V", "number(MONEY) * MONEY.scale", ""),
    "Python module": ("SETTINGS.value = V", "SETTINGS.value", ""),
    "import": ("SETTINGS.value = V", "importing()", ""),
    "attribute of a function": ("function.v = V", "function.v", ""),
    "code": ("function.__code__ = code_of(V)", "function()", ""),
    "function": ("set_global('helper', lambda: V)", "helper()", "the global helper"),
    "default": ("with_default.__defaults__ = (V,)", "with_default()", ""),
    "captured": ("put_captured(V)", "get_captured()", ""),
    "captured class": ("Local.v = V", "get_local()", ""),
    "globals()": ("set_global('G', V)", "globals()['G']", ""),
    "environment": ("os.environ['LAZYINLINE_TEST'] = str(V)",
        "float(os.environ.get('LAZYINLINE_TEST'))", ""),
    "registered": ("dispatched.register(Other, lambda value: V)", "dispatched(OTHER)", ""),
    "registered with an abstract class": ("Abstract.register(Other) if V > 2 else 0",
        "2.0 if isinstance(OTHER, Abstract) else 1.0", ""),
    "cache that is cleared": ("set_global('G', V); cached.cache_clear()", "cached()", ""),
    "object of C": ("FROM_C.prec = int(V)", "FROM_C.prec", ""),
}
# fmt: on
WITH_REASON = [name for name, row in OUTSIDE.items() if row[2]]
LASTING = ("registered", "registered with an abstract class")  # cannot be taken back


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_blocks_find_outside_is_shared_and_a_change_is_noticed(name: str) -> None:
    """Two blocks, which share; the value is changed between calls."""
    put, get, _ = OUTSIDE[name]
    model = f"""
V0 = 2.0
B = block(lambda self, x: torch.tanh(self.linear(x)) * ({get}))
def put_it(V):
    {put}
model = Beside(B(), B())
"""
    scene = ["", "", "put_it(3.0)", "put_it(2.0)"]
    outcome = assert_as_eager(HELPERS, SURROUNDINGS, model, scene=scene)
    if not outcome.eagerly:
        reasons = [d.reason for d in outcome.reports[0].decisions]
        # What `singledispatch` has found it keeps in a weak dictionary.
        assert not [reason for reason in reasons if reason and "weak references" not in reason]


BETWEEN = """
def body(layers, x):
    for index, layer in enumerate(layers):
        put(index + 1.0)
        x = layer(x)
    return x
"""
BY_FORWARD = """
def body(layers, x):
    put(0.0)
    for layer in layers:
        x = layer(x)
    return x
"""


def written(name: str, forward: str, body: str, **scene: Sequence[str]) -> Outcome:
    put, get, _ = OUTSIDE[name]
    model = [
        f"V0 = 2.0\ndef put(V):\n    {put}",
        f"def get(): return {get}",
        f"B = block({forward})",
        f"{body}\nmodel = Around(body, B(), B())",
    ]
    return assert_as_eager(HELPERS, SURROUNDINGS, "\n".join(model), state="get()", **scene)


@pytest.mark.parametrize("name", [n for n in OUTSIDE if n not in LASTING])
@pytest.mark.smoke
@pytest.mark.sweep(
    keep=[
        *("[global]", "[call]", "[context variable]", "[attribute of a class]"),
        *("[class of a class]", "[number of a class]"),
        *("[default]", "[object of C]"),
    ]
)
def test_a_value_outside_that_changes_between_blocks_keeps_them_apart(name: str) -> None:
    """What is left there is eager's, whoever writes between the calls."""
    read = "lambda self, x: torch.tanh(self.linear(x)) * get()"
    outcome = written(name, read, BETWEEN, scene=["", "", "put(7.0)", "put(7.0)"])
    if not outcome.eagerly:
        assert outcome.shared == 0
    if name in WITH_REASON and outcome.reasons:
        assert outcome.reasons == (f"{OUTSIDE[name][2]} changed between the calls",)


@pytest.mark.parametrize("name", [n for n in OUTSIDE if n not in ("registered", "object of C")])
@pytest.mark.sweep(keep=["[global]", "[call]", "[context variable]", "[attribute of a class]"])
def test_a_value_outside_that_a_forward_changes_keeps_blocks_apart(name: str) -> None:
    forward = "lambda self, x: (put(get() + 1.0), torch.tanh(self.linear(x)) * get())[1]"
    outcome = written(name, forward, BY_FORWARD, scene=["", "", "put(7.0)", "put(7.0)"])
    if not outcome.eagerly and name not in LASTING:
        assert outcome.shared == 0
    if name in WITH_REASON and outcome.reasons:
        assert all("its forward changes" in reason for reason in outcome.reasons)


def test_a_registry_that_a_forward_writes_to_is_an_error_that_names_it() -> None:
    """What is registered cannot be taken out again, so the forward may not be run a second time."""
    with pytest.raises(CaptureError, match="changes a mappingproxy"):
        written("registered", "lambda self, x: self.linear(x) * get()", BETWEEN)


# ---- to a block's own place ----------------------------------------------------------------------

LOOKING = """
OWNERS, LIST, VARIABLE, HERE = {}, [None], contextvars.ContextVar("V"), None
class Registry: owner = None
def at(modules, own): return [found is own for found in modules].index(True)
def method(found): return lambda own: found(own)
"""
# How a block reaches what it stands in (``o``), and how it looks for itself there.
# fmt: off
REACHED = {
    "list": ("h.held = [o]", "self.held[0]"),
    "table": ("h.held = {'o': (o,)}", "self.held['o'][0]"),
    "namespace": ("h.held = types.SimpleNamespace(o=o)", "self.held.o"),
    "attribute": ("object.__setattr__(h, 'held', o)", "self.held"),
    "reference": ("h.held = weakref.ref(o)", "self.held()"),
    "proxy": ("h.held = [weakref.proxy(o)]", "self.held[0]"),
    "method": ("h.held = o.register_buffer", "self.held.__self__"),
    "partial": ("h.held = functools.partial(lambda found: found, o)", "self.held()"),
    "cell": ("h.held = lambda: o", "self.held()"),
    "list in a cell": ("held = [o]; h.held = lambda: held[0]", "self.held()"),
    "default": ("h.held = lambda found=o: found", "self.held()"),
    "function": ("h.held = lambda: 0; h.held.o = o", "self.held.o"),
    "global": ("globals()['HERE'] = o", "HERE"),
    "global list": ("LIST[0] = o", "LIST[0]"),
    "global table": ("OWNERS['o'] = o", "OWNERS['o']"),
    "class": ("Registry.owner = o", "Registry.owner"),
    "context variable": ("VARIABLE.set(o)", "VARIABLE.get()"),
}
LOOKS = {
    "named_modules": "at([m for _, m in o.named_modules()], self)",
    "modules": "at(o.modules(), self)",
    "named_children": "at([m for _, m in o.named_children()], self)",
    "children": "at(o.children(), self)",
    "_modules": "at(o._modules.values(), self)",
    "items": "at(o, self)",
    "index": "list(o).index(self)",
    "get_submodule": "int(o.get_submodule('1') is self)",
    "named_parameters": "at([p for _, p in o.named_parameters()], self.linear.weight)",
    "parameters": "at(o.parameters(), self.linear.weight)",
    "state_dict": "at(o.state_dict(keep_vars=True).values(), self.linear.weight)",
    "names": "int(next(name for name, m in o.named_modules() if m is self))",
    "generator": "next(i for i, m in enumerate(m for m in o.modules()) if m is self)",
    "paths": "{m: len(n) * int(n[:1] or 0) for n, m in o.named_modules()}[self]",
}
# fmt: on
PAIRS = [
    pytest.param(
        reached,
        look,
        id=f"{reached}-{look}",
        marks=() if look == "named_modules" or reached == "list" else pytest.mark.sweep,
    )
    for reached in REACHED
    for look in LOOKS
]


def looking(reached: str, look: str) -> str:
    put, get = REACHED[reached]
    return f"""
def look(self, o): return {LOOKS[look]}
B = block(lambda self, x: self.linear(x) * (1 + look(self, {get})))
model = Stack(B(), B(), B())
def put(h, o):
    {put}
for layer in model.layers: put(layer, model.layers)
"""


@pytest.mark.parametrize(("reached", "look"), PAIRS)
def test_a_block_that_finds_its_own_place_is_as_eager(reached: str, look: str) -> None:
    assert_as_eager(LOOKING, looking(reached, look), scene=[""])


def test_blocks_that_reach_a_module_beside_them_share() -> None:
    beside = "for layer in model.layers: put(layer, BESIDE)"
    text = looking("list", "modules").replace("at(o.modules(), self)", "len(list(o.modules()))")
    outcome = assert_as_eager(LOOKING, "BESIDE = nn.ModuleList([linear()])", text, beside)
    assert outcome.shared == 2
