"""The table of values that Python can hold: how each is made, read and changed, as text.

A row is the value, another one of its kind, an expression that reads a value ``v`` as a number, and
a statement that changes it in place. A row without a second value has nothing that would replace
it; a row without a statement cannot be changed.
"""

from typing import NamedTuple

# Classes of users, and what makes values.
HELPERS = '''
D, NS = decimal.Decimal, types.SimpleNamespace

class Value:
    kind = 1.0
    def __init__(self, value=1.0): self.value = value
    def __call__(self): return self.value
    def get(self): return self.value
    def put(self, value): self.value = value
    @classmethod
    def of_class(cls): return cls.kind
class Always(Value):
    def __eq__(self, other): return True
    __hash__ = object.__hash__
class Never(Value):
    __hash__ = None
    def __eq__(self, other): raise AssertionError("compared by the user's own ==")
class Slotted:
    __slots__ = ("value", "more", "__weakref__")
    def __init__(self, value=1.0): self.value = value
    def get(self): return self.value
class Inherits(Slotted): pass
class Below(Slotted): __slots__ = ("own",)
class Private:
    __slots__ = ("__value",)
    def __init__(self, value=1.0): self.__value = value
    def get(self): return self.__value
    def put(self, value): self.__value = value
class Hidden(Private):
    __slots__ = ("_Private__value",)
class Iterated: __slots__ = iter(("value",))
class Queue(collections.deque): __slots__ = ("value",)
class Array(np.ndarray): __slots__ = ("value",)
class Entries(dict): pass
class Items(list): pass
class Number(float): pass
class Text(str): pass
class Money(D): scale = 1.0
class Colour(enum.Enum): RED, BLUE = 1, 2
class Level(enum.IntFlag): LOW, HIGH = 1, 2
class One(enum.IntEnum): ONE = 1
class Named(collections.namedtuple("Named", "value")): __slots__ = ()
class Meta(type): value = 1.0
class WithMeta(metaclass=Meta): pass
class Key: value = 1.0
class Operand:
    def __mul__(self, other): return 1.0
    def __len__(self): return 1
@dataclasses.dataclass
class Data:
    value: float = 1.0
    names: list = dataclasses.field(default_factory=list)
@dataclasses.dataclass(frozen=True)
class Frozen: value: float = 1.0
KEY, KEYS = Key(), [made(Key(), "v.value = 1.0"), made(Key(), "v.value = 3.0")]

def derived(base, /, **names): return type("Local", (base,), names)
def local(value=1.0): return made(threading.local(), f"v.value = {value}")
def captured(value):
    def function(x=1.0): return value
    return function
def default(value): return lambda x=value: x
def keyword(value): return lambda *, x=value: x
def plain():
    def function(x=1.0):
        """Docs."""
    return function
def with_value(held, value=1.0):
    held.value = value
    return held
def dispatching(result=1.0): return functools.singledispatch(lambda of: result)
def variable(value):
    found = contextvars.ContextVar("found")
    found.set(value)
    return found
def nested(depth, value): return [nested(depth - 1, value)] if depth else [value]
def innermost(held):
    while isinstance(held, list): last, held = held, held[0]
    return last
def mapped(text): return made(mmap.mmap(-1, 8), f"v[:{len(text)}] = {text!r}")
def hidden(below, value):
    found = Hidden()
    Private.__dict__["_Private__value"].__set__(found, below)
    Hidden.__dict__["_Private__value"].__set__(found, value)
    return found
def scaled(value): return made(torch.ones(3), f"v.scale = {value}")
def proxy(value): return types.MappingProxyType({"a": value})
def large(changed):
    found = np.zeros(5000)
    found[2500] = changed
    return found
'''


class Row(NamedTuple):
    """A kind of value, as text."""

    value: str
    other: str
    read: str
    change: str = ""


# What a snapshot sees in the object itself: freezing tells a change of it.
# fmt: off
SHOWN = {
    # ---- numbers, texts and what says all of its value
    "number": Row("1.0", "2.0", "v"),
    "number and truth": Row("1", "True", "2.0 if v is True else 3.0"),
    "whole number and fraction": Row("1", "1.0", "2.0 if type(v) is int else 3.0"),
    "zero and minus zero": Row("0.0", "-0.0", "math.copysign(1, v)"),
    "complex minus zero": Row("complex(0, 0.0)", "complex(0, -0.0)", "math.copysign(1, v.imag)"),
    "number of a class": Row("[Number(1)]", "[Number(2)]", "float(v[0])", "v[0] = Number(3)"),
    "zero of a class": Row("Number(0.0)", "Number(-0.0)", "math.copysign(1, v)"),
    "text": Row("'a'", "'ab'", "len(v)"),
    "text and bytes": Row("'a'", "b'a'", "2.0 if type(v) is str else 3.0"),
    "text of a class": Row("[Text('1')]", "[Text('2')]", "float(str(v[0]))", "v[0] = Text('3')"),
    "None and False": Row("None", "False", "2.0 if v is None else 3.0"),
    "decimal": Row("D('1.5')", "D('2.5')", "float(v)"),
    "digits of a decimal": Row("D('1.0')", "D('1.00')", "len(str(v))"),
    "fraction": Row("fractions.Fraction(1, 2)", "fractions.Fraction(3, 2)", "float(v)"),
    "date": Row("datetime.date(2020, 1, 1)", "datetime.date(2021, 1, 1)", "v.year"),
    "moment": Row("datetime.datetime(1, 1, 1)", "datetime.datetime(1, 1, 1, fold=1)", "v.fold"),
    "time": Row("datetime.time(1)", "datetime.time(2)", "v.hour"),
    "zone of a time": Row("datetime.time(1)", "datetime.time(1, tzinfo=datetime.timezone.utc)",
        "len(str(v))"),
    "name of a zone": Row("datetime.timezone.utc",
        "datetime.timezone(datetime.timedelta(0), 'name')", "len(v.tzname(None))"),
    "pattern": Row("re.compile('a+')", "re.compile('b+')", "ord(v.pattern[0])"),
    "flags of a pattern": Row("re.compile('a')", "re.compile('a', re.I)", "float(v.flags)"),
    "address": Row("ipaddress.ip_address('0.0.0.1')", "ipaddress.ip_address('0.0.0.2')", "int(v)"),
    "path": Row("pathlib.PurePosixPath('a/b')", "pathlib.PurePosixPath('ab')", "len(v.parts)"),
    "enumeration": Row("Colour.RED", "Colour.BLUE", "v.value"),
    "flags": Row("Level.LOW", "Level.LOW | Level.HIGH", "v.value"),
    "enumeration and number": Row("One.ONE", "1", "2.0 if type(v) is int else 3.0"),
    "scalar of numpy": Row("np.float64(1.5)", "np.float64(2.5)", "float(v)"),
    "numpy's number and Python's": Row("np.float64(1)", "1.0", "2.0 if type(v) is float else 3.0"),
    "zero of numpy": Row("np.float32(0.0)", "np.float32(-0.0)", "math.copysign(1, v)"),
    "dtype": Row("torch.float16", "torch.float32", "v.itemsize"),
    "device": Row("torch.device('cpu')", "torch.device('cpu', 0)", "len(str(v))"),
    "size": Row("torch.Size([1])", "torch.Size([2])", "v[0]"),
    "range": Row("range(2)", "range(3)", "len(v)"),
    "slice": Row("slice(1)", "slice(2)", "v.stop"),
    # ---- containers
    "list": Row("[1.0]", "[2.0]", "v[0]", "v[0] = 5.0"),
    "length of a list": Row("[1.0, 2]", "[1.0]", "len(v)", "v.append(3)"),
    "truth in a list": Row("[1]", "[True]", "2.0 if v[0] is True else 3.0", "v[0] = True"),
    "list and tuple": Row("[1]", "(1,)", "2.0 if type(v) is list else 3.0"),
    "attribute of a list": Row("with_value(Items())", "with_value(Items(), 2)", "v.value",
        "v.value = 5"),
    "long list": Row("[1.0] * 3000", "", "v[2500]", "v[2500] = 3.0"),
    "deep list": Row("nested(7, 1.0)", "nested(7, 2.0)", "innermost(v)[0]",
        "innermost(v)[0] = 3.0"),
    "tuple in a list": Row("{'a': ([1.0],)}", "{'a': ([2.0],)}", "v['a'][0][0]",
        "v['a'][0][0] = 5"),
    "dictionary": Row("{'a': 1.0}", "{'a': 2.0}", "v['a']", "v['a'] = 5.0"),
    "order of a dictionary": Row("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}", "next(iter(v.values()))",
        "v['a'] = v.pop('a')"),
    "key of a dictionary": Row("{'a': 1}", "{'b': 1}", "ord(next(iter(v)))",
        "v.clear(), v.update(c=1)"),
    "kind of a key": Row("{1: 'a'}", "{True: 'a'}", "2.0 if next(iter(v)) is True else 3.0"),
    "object as a key": Row("{Value(): 1}", "{Value(2): 1}", "next(iter(v)).value",
        "next(iter(v)).value = 5"),
    "enumeration as a key": Row("{Colour.RED: [1]}", "", "v[Colour.RED][0]",
        "v[Colour.RED][0] = 5"),
    "counter": Row("collections.Counter(a=1)", "collections.Counter(a=2)", "v['a']",
        "v.update('a')"),
    "ordered": Row("collections.OrderedDict(a=1, b=2)", "collections.OrderedDict(b=2, a=1)",
        "next(iter(v.values()))", "v.move_to_end('a')"),
    "kind of a dictionary": Row("{'a': 1}", "collections.OrderedDict(a=1)",
        "float(type(v) is dict)"),
    "default dictionary": Row("collections.defaultdict(int, a=1)",
        "collections.defaultdict(int, a=2)", "v['a']", "v['a'] = 5"),
    "factory": Row("collections.defaultdict(int)", "collections.defaultdict(float)",
        "1.0 + (v.default_factory is int)", "v.default_factory = list"),
    "attribute of a dictionary": Row("with_value(Entries())", "with_value(Entries(), 2)", "v.value",
        "v.value = 5"),
    "chain": Row("collections.ChainMap({'a': 1})", "collections.ChainMap({'a': 2})", "v['a']",
        "v['a'] = 5"),
    "set": Row("{1}", "{1, 2}", "len(v)", "v.add(5)"),
    "kind in a set": Row("{1}", "{True}", "2.0 if next(iter(v)) is True else 3.0",
        "v.clear(), v.add(True)"),
    "order of a set": Row("{8, 0}", "{0, 8}", "next(iter(v))", "v.clear(), v.add(0), v.add(8)"),
    "frozen set": Row("frozenset([1])", "frozenset([1, 2])", "len(v)"),
    "object in a set": Row("{Value()}", "{Value(2)}", "next(iter(v)).value",
        "next(iter(v)).value = 5"),
    "object in a frozen set": Row("frozenset([Value()])", "frozenset([Value(2)])",
        "next(iter(v)).value", "next(iter(v)).value = 5"),
    "deque": Row("collections.deque([1])", "collections.deque([2])", "v[0]", "v[0] = 5"),
    "length of a deque": Row("collections.deque([1], 2)", "collections.deque([1], 3)", "v.maxlen"),
    "slot of a deque": Row("with_value(Queue())", "with_value(Queue(), 2)", "v.value",
        "v.value = 5"),
    "bytearray": Row("bytearray([1])", "bytearray([2])", "v[0]", "v[0] = 5"),
    "array": Row("array.array('d', [1])", "array.array('d', [2])", "v[0]", "v[0] = 5"),
    "type of an array": Row("array.array('i', [0])", "array.array('f', [0])", "ord(v.typecode)"),
    "memory": Row("memoryview(bytearray([1]))", "memoryview(bytearray([2]))", "v[0]", "v[0] = 5"),
    "array of numpy": Row("np.array([1.0])", "np.array([2.0])", "float(v[0])", "v[0] = 5"),
    "middle of an array": Row("large(1)", "large(2)", "float(v.max())", "v[2500] = 5"),
    "dtype of an array": Row("np.zeros(2, 'i4')", "np.zeros(2, 'f4')", "ord(v.dtype.kind)"),
    "shape of an array": Row("np.zeros((2, 3))", "np.zeros((3, 2))", "v.shape[0]"),
    "strides of an array": Row("np.ones((2, 3))", "np.ones((3, 2)).T", "v.strides[0]"),
    "array of objects": Row("np.array([1.0, 'a'], object)", "np.array([2.0, 'a'], object)", "v[0]",
        "v[0] = 5.0"),
    "mask": Row("np.ma.array([1.0, 2.0], mask=[True, False])", "", "float(v.mask[0])",
        "v.mask = False"),
    "slot of an array": Row("with_value(np.ones(2).view(Array))", "", "v.value", "v.value = 5"),
    # ---- objects
    "object": Row("Value()", "Value(2.0)", "v.value", "v.value = 5.0"),
    "attribute that is new": Row("Value()", "", "getattr(v, 'new', 1.0)", "v.new = 2.0"),
    "object in an object": Row("Value(Value(1))", "Value(Value(2))", "v.value.value",
        "v.value.value = 5"),
    "class of an object": Row("derived(Value)()", "", "v.kind",
        "v.__class__ = derived(Value, kind=3.0)"),
    "attributes replaced": Row("Value()", "Value(2)", "v.value", "v.__dict__ = {'value': 5.0}"),
    "equal to everything": Row("Always()", "Always(2)", "v.value", "v.value = 5.0"),
    "comparable to nothing": Row("Never()", "Never(2)", "v.value", "v.value = 5.0"),
    "namespace": Row("NS(value=1)", "NS(value=2)", "v.value", "v.value = 5"),
    "slot": Row("Slotted()", "Slotted(2.0)", "v.value", "v.value = 5.0"),
    "slot that is unset": Row("Slotted()", "made(Slotted(), 'v.more = 2.0')",
        "getattr(v, 'more', 1.0)", "v.more = 5.0"),
    "inherited slot": Row("Inherits()", "Inherits(2)", "v.value", "v.value = 5"),
    "slot of a class below": Row("with_value(Below())", "with_value(Below(), 2)", "v.value",
        "v.value = 5"),
    "private slot": Row("Private()", "Private(2)", "v.get()", "v.put(5.0)"),
    "slot that hides another": Row("hidden(1, 0)", "hidden(2, 0)",
        "Private.__dict__['_Private__value'].__get__(v)"),
    "slots of an iterator": Row("with_value(Iterated())", "with_value(Iterated(), 2)", "v.value",
        "v.value = 5"),
    "data": Row("Data()", "Data(2)", "v.value", "v.value = 5"),
    "in data": Row("Data()", "Data(names=[1])", "len(v.names)", "v.names.append(1)"),
    "frozen data": Row("Frozen()", "Frozen(2)", "v.value"),
    "named tuple": Row("Named(1.0)", "Named(2.0)", "v.value"),
    "variable of a thread": Row("local()", "local(2)", "v.value", "v.value = 5"),
    # ---- functions
    "code": Row("lambda: 1.0", "lambda: 2.0", "v()", "v.__code__ = (lambda: 5.0).__code__"),
    "captured": Row("captured(1.0)", "captured(2.0)", "v()",
        "v.__closure__[0].cell_contents = 5.0"),
    "kind of what is captured": Row("captured(1)", "captured(True)", "2.0 if v() is True else 3.0"),
    "in what is captured": Row("captured([1.0])", "captured([2.0])", "v()[0]",
        "v.__closure__[0].cell_contents[0] = 5.0"),
    "default": Row("default(1.0)", "default(2.0)", "v()", "v.__defaults__ = (5.0,)"),
    "in a default": Row("default([1.0])", "default([2.0])", "v()[0]", "v.__defaults__[0][0] = 5.0"),
    "default by name": Row("keyword(1.0)", "keyword(2.0)", "v()", "v.__kwdefaults__.update(x=5.0)"),
    "attribute of a function": Row("with_value(plain())", "with_value(plain(), 2)", "v.value",
        "v.value = 5"),
    "partial": Row("functools.partial(float, 1)", "functools.partial(float, 2)", "v()",
        "v.__setstate__((float, (5,), {}, {}))"),
    "in a partial": Row("functools.partial(max, [1.0])", "functools.partial(max, [2.0])", "v()",
        "v.args[0][0] = 5"),
    "keyword of a partial": Row("functools.partial(int, base=8)", "functools.partial(int, base=9)",
        "v('10')", "v.keywords.update(base=7)"),
    "attribute of a partial": Row("with_value(functools.partial(max))", "", "v.value",
        "v.value = 5"),
    "method": Row("Value().get", "Value(2).get", "v()", "v.__self__.value = 5"),
    "object that is called": Row("Value()", "Value(2)", "v()", "v.value = 5"),
}
# fmt: on
# Common ones: two that are equal share a closure, and a change is undone rather than refused.
USUAL = [
    *("number", "text", "dtype", "device", "size", "range", "list", "dictionary", "set", "deque"),
    *("array of numpy", "tuple in a list", "object", "object in an object", "namespace", "slot"),
    *("comparable to nothing",),
    *("data", "in data", "captured", "default", "keyword of a partial", "method", "counter"),
    *("private slot", "in what is captured", "ordered", "default dictionary", "frozen set"),
]

# What few models hold: noticed in the object itself, or by an eager run.
# fmt: off
RARE = {
    "view of a dictionary": Row("{'a': 1.0}.values()", "{'a': 2.0}.values()", "next(iter(v))"),
    "proxy of a dictionary": Row("proxy(1.0)", "proxy(2.0)", "v['a']"),
    "method in C": Row("{'a': 1.0}.get", "{'a': 2.0}.get", "v('a')", "v.__self__.update(a=5.0)"),
    "cached function": Row("with_value(functools.lru_cache(plain))", "", "v.value", "v.value = 5"),
    "property": Row("property(captured(1.0))", "property(captured(2.0))", "v.fget(None)"),
    "cell": Row("types.CellType(1.0)", "types.CellType(2.0)", "v.cell_contents",
        "v.cell_contents = 5.0"),
    "exception": Row("ValueError(1.0)", "ValueError(2.0)", "v.args[0]", "v.args = (5.0,)"),
    "context variable": Row("variable(1.0)", "variable(2.0)", "v.get()", "v.set(5.0)"),
    "weak keys": Row("weakref.WeakKeyDictionary({KEY: 1.0})",
        "weakref.WeakKeyDictionary({KEY: 2.0})", "v[KEY]", "v[KEY] = 5.0"),
    "weak values": Row("weakref.WeakValueDictionary({'a': KEY})", "", "float('a' in v)",
        "v.pop('a', None)"),
    "weak reference": Row("weakref.ref(KEYS[0])", "weakref.ref(KEYS[1])", "v().value",
        "v().value += 4"),
    "weak proxy": Row("weakref.proxy(KEYS[0])", "weakref.proxy(KEYS[1])", "v.value",
        "v.value += 4"),
    "level of a logger": Row("logging.Logger('a', 10)", "logging.Logger('a', 30)",
        "v.getEffectiveLevel()", "v.setLevel(40)"),
    "logger that is disabled": Row("logging.Logger('a', 10)", "", "float(v.isEnabledFor(20))",
        "v.disabled = True"),
    "adapter of a logger": Row("logging.LoggerAdapter(logging.Logger('a', 10), {})", "",
        "v.getEffectiveLevel()", "v.setLevel(40)"),
    "random": Row("random.Random(1)", "random.Random(2)", "v.getstate()[1][5] % 1000", "v.seed(7)"),
}
# fmt: on
# What shows nothing of its state, or is read by name in a class: equal to itself alone.
# fmt: off
HIDDEN = {
    "class": Row("derived(Value)", "derived(Value, kind=2.0)", "v.kind", "v.kind = 5.0"),
    "class below an object": Row("derived(Value)()", "derived(Value, kind=2.0)()", "v.kind",
        "type(v).kind = 5.0"),
    "method of a class": Row("derived(Value)()", "", "v.of_class()", "type(v).kind = 5.0"),
    "base class": Row("derived(Value)", "", "v.kind", "Value.kind += 4.0"),
    "class of a class": Row("WithMeta", "", "v.value", "Meta.value = 5.0"),
    "method replaced": Row("derived(Value)()", "", "v.get()", "type(v).get = lambda self: 5.0"),
    "operator of a class": Row("derived(Operand)()", "", "v * 1.0",
        "type(v).__mul__ = lambda self, other: 5.0"),
    "length of a class": Row("derived(Operand)()", "", "float(len(v))",
        "type(v).__len__ = lambda self: 5"),
    "scale of a decimal's class": Row("Money('1.5')", "", "float(v) * v.scale",
        "Money.scale = 5.0"),
    "Python module": Row("with_value(types.ModuleType('m'))",
        "with_value(types.ModuleType('m'), 2)", "v.value", "v.value = 5"),
    "name of a function": Row("plain()", "", "len(v.__name__)", "v.__name__ = 'a_longer_name'"),
    "defaults of a function": Row("default(1.0)", "", "v.__defaults__[0]",
        "v.__defaults__ = (5.0,)"),
    "signature": Row("default(1.0)", "", "inspect.signature(v).parameters['x'].default",
        "v.__defaults__ = (5.0,)"),
    "captured and not run": Row("captured(1.0)", "", "v.__closure__[0].cell_contents",
        "v.__closure__[0].cell_contents = 5.0"),
    "function by type": Row("dispatching()", "", "v(1.0)", "v.register(float, lambda of: 5.0)"),
    "decimal context": Row("decimal.Context(prec=3)", "decimal.Context(prec=5)", "v.prec",
        "v.prec = 9"),
    "match": Row("re.match('a+', 'aab')", "re.match('a+', 'aaab')", "v.end()"),
    "mapped memory": Row("mapped(b'1')", "mapped(b'2')", "v[0]", "v[0:1] = b'3'"),
    "event": Row("threading.Event()", "made(threading.Event(), 'v.set()')", "1.0 + v.is_set()",
        "v.set() if not v.is_set() else v.clear()"),
    # Without waiting: a second call would wait for ever, in eager too.
    "lock": Row("threading.Lock()", "", "1.0 + v.locked()", "v.acquire(False)"),
    "lock that is asked": Row("threading.RLock()", "", "1.0 + v._is_owned()", "v.acquire()"),
    "semaphore": Row("threading.Semaphore(1)", "threading.Semaphore(2)", "v._value", "v.release()"),
    "thread": Row("threading.Thread(name='a')", "threading.Thread(name='ab')", "len(v.name)",
        "v.name = 'abc'"),
    "queue in C": Row("queue.SimpleQueue()", "made(queue.SimpleQueue(), 'v.put(1)')", "v.qsize()",
        "v.put(3)"),
    "hash": Row("hashlib.sha256(b'a')", "hashlib.sha256(b'b')", "v.digest()[0]", "v.update(b'c')"),
    "bytes in memory": Row("io.BytesIO(b'a')", "io.BytesIO(b'ab')", "len(v.getvalue())",
        "v.seek(0, 2), v.write(b'cdef')"),
    "item getter": Row("operator.itemgetter(0)", "operator.itemgetter(1)", "v((1.0, 2.0))"),
    "method caller": Row("operator.methodcaller('count', 1)", "operator.methodcaller('count', 2)",
        "v([1, 2, 2])"),
    "structured dtype": Row("np.dtype([('a', 'f4')])", "np.dtype([('a', 'f8')])", "v.itemsize"),
    "limits of numpy": Row("np.finfo(np.float32)", "np.finfo(np.float64)", "v.bits"),
    "optimizer": Row("torch.optim.SGD([torch.zeros(1)], lr=1.0)", "", "v.param_groups[0]['lr']",
        "v.param_groups[0]['lr'] = 5.0"),
    "number of a distribution": Row("torch.distributions.Normal(torch.tensor(1.0), 1.0)",
        "torch.distributions.Normal(torch.tensor(2.0), 1.0)", "v.loc.item()", "v.loc.fill_(0)"),
    "distribution": Row("torch.distributions.Bernoulli(0.5)", "torch.distributions.Bernoulli(0.25)",
        "v.probs.reshape(1)"),
}
# fmt: on
ROWS = SHOWN | RARE | HIDDEN

# What Python asks of a tensor that no operator takes. A number in it is never a constant.
# fmt: off
TENSORS = {
    "shape": Row("torch.ones(3)", "torch.ones(5)", "v.shape[0]", "v.data = torch.ones(7)"),
    "size": Row("torch.ones(3)", "torch.ones(5)", "v.numel()", "v.data = torch.ones(7)"),
    "stride": Row("torch.ones(3)", "torch.ones(6)[::2]", "v.stride(0)",
        "v.data = torch.ones(9)[::3]"),
    "contiguous": Row("torch.ones(3)", "torch.ones(6)[::2]", "1.0 + v.is_contiguous()",
        "v.data = torch.ones(9)[::3]"),
    "bytes": Row("torch.ones(3)", "torch.ones(3).double()", "v.element_size()",
        "v.data = v.data.half()"),
    "requires_grad": Row("torch.ones(3)", "torch.ones(3).requires_grad_()",
        "1.0 + v.requires_grad", "v.requires_grad_(not v.requires_grad)"),
    "attribute": Row("scaled(1.0)", "scaled(2.0)", "v.scale", "v.scale = 3.0"),
    "attribute or none": Row("scaled(1.0)", "torch.ones(3)", "getattr(v, 'scale', 0.5)",
        "v.scale = 3.0"),
    **{f"number, {read}": Row("torch.tensor(1.0)", "torch.tensor(2.0)", read, "v.data.fill_(0)")
       for read in (
           *("v.item()", "float(v)", "float(v.detach().numpy())"),
           *("[5.0, 6.0, 7.0][int(v)]", "2.0 + torch.equal(v, v * v)", "float(np.asarray(v))"),
           *("(torch.tensor(2.0) * v).item()", "torch.tensor(2.0).mul_(v).item()"),
           "torch.add(torch.ones(4), torch.ones(4), alpha=v + 0)",
       )},
}
# fmt: on

# What each use moves on: two runs must not be handed the same one.
MOVING = {
    "count": ("itertools.count()", "next(v)"),
    "generator": ("(float(i) for i in range(9))", "next(v)"),
    "iterator in an object": ("NS(deep=[{'a': iter([1.0, 2.0, 3.0])}])", "next(v.deep[0]['a'])"),
    "random numbers": ("random.Random(0)", "v.random()"),
    "generator of numpy": ("np.random.default_rng(0)", "v.random()"),
    "bits": ("np.random.PCG64(0)", "v.random_raw() % 1000"),
}
# What goes on changing at each call: a value, and a statement of the forward.
# fmt: off
COUNTING = {
    "list": ("[0]", "v[0] += 1"),
    "dictionary": ("{'n': 0}", "v['n'] += 1"),
    "object": ("Value(0)", "v.value += 1"),
    "slot": ("Slotted(0)", "v.value += 1"),
    "tensor in a list": ("[torch.zeros(3)]", "v[0].add_(1)"),
    "array of numpy": ("np.zeros(1)", "v[0] += 1"),
    "attribute of a function": ("with_value(plain())", "v.value += 1"),
    "attribute of a library's object": ("threading.Event()", "v.n = getattr(v, 'n', 0) + 1"),
    "context variable": ("variable(0)", "v.set(v.get() + 1)"),
    "deque": ("collections.deque([1, 2, 3])", "v.rotate(1)"),
    "memory": ("memoryview(bytearray(1))", "v[0] += 1"),
    "memory of numbers": ("memoryview(array.array('i', [0]))", "v[0] += 1"),
    "weak dictionary": ("weakref.WeakKeyDictionary({KEY: 0})", "v[KEY] += 1"),
    "captured": ("[captured(0)]", "v[0].__closure__[0].cell_contents += 1"),
    "random numbers": ("random.Random(0)", "v.random()"),
}
# fmt: on
