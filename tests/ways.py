"""Ways in which a forward reaches a value, as text: what puts a value V there, and what finds it.

Ways inside lead from a block (``h`` to what puts, ``self`` to what finds) to what belongs to it;
ways outside to what all blocks share.
"""

from typing import NamedTuple


class Way(NamedTuple):
    """How a value is reached.

    Attributes:
        put: a statement that puts V there.
        get: an expression that finds it.
        said: how a report names it, where it can.
    """

    put: str
    get: str
    said: str = ""


AROUND = '''
from inspect import signature
BY, BY_REFERENCE, WEAKLY = {}, {}, weakref.WeakKeyDictionary()
WEAK_SET, LARGE = weakref.WeakSet(), set()
class Weakly:
    """A descriptor that keeps its values beside the objects."""
    def __get__(self, owner, kind): return self if owner is None else WEAKLY[owner]
    def __set__(self, owner, value): WEAKLY[owner] = value
class Alike(type):
    """The metaclass of classes that say they are one and the same."""
    def __eq__(cls, other): return isinstance(other, Alike)
    def __hash__(cls): return 1
class Single(metaclass=Alike):
    def value(self): return 1.0
class Double(metaclass=Alike):
    def value(self): return 2.0
class Told:
    def __init__(self, value): self.value = value
    def __str__(self): return "x" * int(self.value)
@functools.cache
def remembered(block): return float(block.v)
@functools.cache
def remembered_by_address(address): return BY[address]
def annotated(value): return made(plain(), f"v.__annotations__ = {{'a': {value}}}")
def put_new(h, name, value): setattr(h, name, value)
G, TABLE, SPACE, OBJECT, PRIVATE = 1.0, {"a": [1.0]}, NS(v=1.0), Value(1.0), Private(1.0)
DEEP, LOCAL, SLOTS, HELD = Value(Value(Value(1.0))), local(), Slotted(1.0), [Value(1.0)]
VARIABLE = variable(1.0)
SETTINGS = sys.modules["world_settings"] = with_value(types.ModuleType("settings"))
FOLDERS, SHARED = (os.getcwd(), os.path.dirname(os.__file__)), multiprocessing.Value("i", 0)
class Shared(metaclass=Meta):
    v = 1.0
    def get(self): return 1.0
    def __mul__(self, other): return 1.0
class SubClass(Shared): pass
class Holder:
    def __init__(self): self.values = [1.0]
    def __getitem__(self, index): return self.values[index]
    def __call__(self): return self.values[0]
HOLDER, MADE, BELOW = Holder(), Shared(), SubClass()
MANY = [MADE]
def product_of(value):
    def __mul__(self, other): return value
    return __mul__
def wrapped(function):
    def wrapper(*args, **options): return function(*args, **options)
    return wrapper
FROM_C, MONEY = decimal.Context(prec=1), Money("1")
class Other: pass
OTHER = Other()
class Abstract(abc.ABC): pass
def helper(): return 1.0
def reader(): return DEEP.value.value
def function(): return 1.0
def with_default(x=1.0): return x
def unbound(value): return staticmethod(value) if isinstance(value, types.FunctionType) else value
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
'''
# fmt: off
# Blocks that reach equal values in one of these share a closure.
HOLDING = {
    "attribute": Way("h.v = V", "self.v"),
    "getattr": Way("h.v = V", "getattr(self, 'vv'[:1])"),
    "property": Way("h._v = V; type(h).v = property(lambda self: self._v)", "self.v"),
    "list": Way("h.v = [V]", "self.v[0]"),
    "table in a namespace": Way("h.v = NS(a={'k': (V,)})", "self.v.a['k'][0]"),
    "object": Way("h.v = Value(V)", "self.v.value"),
    "method": Way("h.v = Value(V).get", "self.v()"),
    "slot": Way("h.v = Slotted(V)", "self.v.value"),
    "data": Way("h.v = Data(V)", "self.v.value"),
    "closure": Way("h.v = captured(V)", "self.v()"),
    "default": Way("h.v = default(V)", "self.v()"),
    "default by name": Way("h.v = keyword(V)", "self.v()"),
    "partial": Way("h.v = functools.partial(lambda found: found, V)", "self.v()"),
    "attribute of a function": Way("h.v = with_value(plain(), V)", "self.v.value"),
    "module inside": Way("h.linear.v = V", "self.linear.v"),
}
# As these hold a number.
INSIDE = HOLDING | {
    "vars": Way("h.v = V", "vars(self)['v']"),
    "class of its own": Way("h.v = Value(V)", "self.v.__class__.of_class() * self.v.value"),
    "dictionary by module": Way("BY[h] = V", "BY[self]"),
    "dictionary by child": Way("BY[h.linear] = V", "BY[self.linear]"),
    "id": Way("BY[id(h)] = V", "BY[id(self)]"),
    "id by an attribute": Way("h.held = Value(id); BY[id(h)] = V", "BY[self.held.value(self)]"),
    "hash": Way("BY[hash(h)] = V", "BY[hash(self)]"),
    "dir by an attribute": Way("h.held = Value(dir); put_new(h, 'more' + 'x' * int(V), 1)",
        "float(len(self.held.value(self)))"),
    "__dir__": Way("put_new(h, 'more' + 'x' * int(V), 1)", "float(len(self.__dir__()))"),
    "classes that say they are equal": Way("h.v = Double() if V > 1 else Single()",
        "self.v.value()"),
    "weak dictionary": Way("WEAKLY[h] = V", "WEAKLY[self]"),
    "weak set": Way("WEAK_SET.add(h) if V > 1 else 0", "1.0 + (self in WEAK_SET)"),
    "weak reference as a key": Way("BY_REFERENCE[weakref.ref(h)] = V",
        "BY_REFERENCE[weakref.ref(self)]"),
    "set": Way("LARGE.add(h) if V > 1 else 0", "1.0 + (self in LARGE)"),
    "cache": Way("h.v = V", "remembered(self)"),
    "cache by address": Way("BY[id(h)] = V", "remembered_by_address(id(self))"),
    "weak descriptor": Way("type(h).w = Weakly(); h.w = V", "self.w"),
    "object.__getattribute__": Way("h.v = V", "object.__getattribute__(self, 'v')"),
    "__reduce_ex__": Way("h.v = V", "self.__reduce_ex__(2)[2]['v']"),
    "copy": Way("h.v = V", "copy.copy(self).v"),
    "pickle": Way("h.v = V", "float(len(pickle.dumps(self.v)) + self.v)"),
    "attrgetter": Way("h.v = V; h.get = operator.attrgetter('v')", "self.get(self)"),
    "frame": Way("h.v = V", "sys._getframe(0).f_locals['self'].v"),
    "str": Way("h.v = Told(V)", "len(str(self.v))"),
    "repr": Way("h.extra_repr = lambda: 'x' * int(V)", "len(repr(self))"),
    "derived class": Way("h.v = derived(Value, kind=V)()", "self.v.__class__.kind"),
    "annotation": Way("h.v = annotated(V)", "self.v.__annotations__['a']"),
    "attribute of a weight": Way("h.linear.weight.v = V", "self.linear.weight.v"),
    "weak reference": Way("h.v = weakref.ref(put_new(h, 'kept', Value(V)) or h.kept)",
        "self.v().value"),
}
OF_TENSORS = {
    "buffer": Way("h.register_buffer('v', V)", "self.v"),
    "parameter": Way("h.v = nn.Parameter(V); vars(h.v).update(vars(V))", "self.v"),
}
# A change here is one of the whole model: no object that the forward reads holds it.
ANYWHERE = {
    "global": Way("set_global('G', V)", "G", "the global G"),
    "entry of a global": Way("TABLE['a'][0] = V", "TABLE['a'][0]", "the global TABLE"),
    "attribute of a namespace": Way("SPACE.v = V", "SPACE.v", "the global SPACE"),
    "attribute of an object": Way("OBJECT.value = V", "OBJECT.get()", "the global OBJECT"),
    "attribute by text": Way("OBJECT.value = V", "getattr(OBJECT, 'val' + 'ue')",
        "the global OBJECT"),
    "attributes replaced": Way("OBJECT.__dict__ = {'value': V}", "OBJECT.value",
        "the global OBJECT"),
    "private slot": Way("PRIVATE.put(V)", "PRIVATE.get()", "the global PRIVATE"),
    "slot": Way("SLOTS.value = V", "SLOTS.value", "the global SLOTS"),
    "item": Way("HOLDER.values[0] = V", "HOLDER[0]", "the global HOLDER"),
    "call": Way("HOLDER.values[0] = V", "HOLDER()", "the global HOLDER"),
    "deep below, by a helper": Way("DEEP.value.value.value = V", "reader().value",
        "the global DEEP"),
    "object in a list": Way("HELD[0].value = V", "HELD[0].value", "the global HELD"),
    "context variable": Way("VARIABLE.set(V)", "VARIABLE.get()", "the global VARIABLE"),
    "variable of a thread": Way("LOCAL.value = V", "LOCAL.value", "the global LOCAL"),
    "attribute of a class": Way("Shared.v = V", "Shared.v"),
    "class of an object": Way("Shared.v = unbound(V)", "MADE.v"),
    "base class": Way("Shared.v = unbound(V)", "BELOW.v"),
    "class of a class": Way("Meta.value = unbound(V)", "Shared.value"),
    "method": Way("Shared.get = lambda self: V", "MADE.get()"),
    "Python module": Way("SETTINGS.value = V", "SETTINGS.value"),
    "import": Way("SETTINGS.value = V", "importing()"),
    "attribute of a function": Way("function.v = V", "function.v"),
    "function": Way("set_global('helper', lambda: V)", "helper()", "the global helper"),
    "default": Way("with_default.__defaults__ = (V,)", "with_default()"),
    "default by its signature": Way("with_default.__defaults__ = (V,)",
        "signature(with_default).parameters['x'].default"),
    "captured": Way("put_captured(V)", "get_captured()"),
    "captured class": Way("Local.v = V", "get_local()"),
    "globals()": Way("set_global('G', V)", "globals()['G']"),
}
# Of numbers: the forwards that are played may change these themselves.
OUTSIDE = ANYWHERE | {
    "class replaced": Way("OBJECT.__class__ = derived(Value, kind=V)", "OBJECT.kind",
        "the global OBJECT"),
    "operator": Way("Shared.__mul__ = lambda self, other: V", "MADE * 1"),
    "operator in a wrapper": Way("Shared.__mul__ = wrapped(product_of(V))", "MANY[0] * 1"),
    "number of a class": Way("Money.scale = V", "number(MONEY) * MONEY.scale"),
    "code": Way("function.__code__ = code_of(V)", "function()"),
    "environment in bytes": Way("os.environb[b'LAZYINLINE_TEST'] = str(V).encode()",
        "float(os.environb.get(b'LAZYINLINE_TEST'))"),
    "cache that is cleared": Way("set_global('G', V); cached.cache_clear()", "cached()"),
    "object of C": Way("FROM_C.prec = int(V)", "FROM_C.prec"),
}
# Of numbers; these are changed between calls alone.
ASKED = {
    "registered": Way("dispatched.register(Other, lambda value: V)", "dispatched(OTHER)"),
    "registered with an abstract class": Way("Abstract.register(Other) if V > 2 else 0",
        "2.0 if isinstance(OTHER, Abstract) else 1.0"),
    "working folder": Way("os.chdir(FOLDERS[int(V) % 2])", "float(len(os.getcwd()))"),
    "decimal context": Way("decimal.getcontext().prec = 26 + int(V)", "decimal.getcontext().prec"),
    "numpy's errors": Way("np.seterr(over='raise' if V > 2 else 'warn')",
        "len(np.geterr()['over'])"),
    "shared number": Way("SHARED.value = int(V)", "SHARED.value"),
    "arguments": Way("sys.argv[1:] = ['x'] * int(V)", "len(sys.argv)"),
    "recursion limit": Way("sys.setrecursionlimit(2000 + int(V))",
        "sys.getrecursionlimit() - 1999.0"),
}
# fmt: on
