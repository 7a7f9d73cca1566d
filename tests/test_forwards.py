"""What a forward may do besides computing: it gives eager's numbers, or runs eagerly with its line.

Each forward below is played by eager and compiled on the same inputs, and all that can be seen is
compared: results, gradients, buffers, parameters, inputs, random states, and what it did outside.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from models import Made
from torch import nn
from values import HELPERS
from worlds import World, assert_as_eager, assert_refused, shown

import lazyinline
from lazyinline import CaptureError

SETUP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.log, self.cache, self.config = 0, [], {}, NS(kind=None)
class Cube(torch.autograd.Function):
    'A backward that is not the derivative, so that it shows which one ran.'
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x**3, positive
    @staticmethod
    def backward(ctx, gradient, _):
        (x,) = ctx.saved_tensors
        return gradient * x * ctx.factor, None
class Handler(logging.Handler):
    def emit(self, record): KEPT.append(record.getMessage())
def counting():
    count = 0
    def hook(*_):
        nonlocal count
        count += 1
        KEPT[:] = [count]
    return hook
def keeping():
    while True: KEPT.append((yield))
class Collector:
    def __init__(self): self.kept, self.count = [], 0
    def hook(self, module, args, output):
        self.kept.append(output.detach())
        self.count += 1
class Clock(datetime.tzinfo): pass
KEPT, QUEUE, COLLECTOR = [], queue.SimpleQueue(), Collector()
LOGGER = logging.Logger("world")
LOGGER.addHandler(Handler())
GENERATOR = keeping()
next(GENERATOR)
BUILTINS = vars(builtins)
LOCK, RLOCK, CONDITION = threading.Lock(), threading.RLock(), threading.Condition()
@functools.lru_cache
def scale(width): return torch.full((width,), 2.0)
def inputs(): return [torch.randn((4, 8), generator=torch.Generator().manual_seed(3))]
"""


def net(forward: str, *more: str) -> tuple[str, ...]:
    """A model of two linear layers with this forward, and what is done to it."""
    lines = "\n".join("        " + line for line in forward.split("\n"))
    kind = f"class Model(Net):\n    def forward(self, x):\n{lines}\nmodel = Model()"
    return HELPERS, SETUP, kind, *more


# fmt: off
EQUAL = {
    # ---- in place
    "assign to a slice": "out = torch.zeros(4, 16)\nout[:, :8] = self.first(x)\nreturn out * 2",
    "write through a view":
        "h = torch.zeros(8, 8)\nh[2:6].copy_(self.first(x))\nreturn (h * 2).tanh()",
    "read through a view made before":
        "h = x.clone()\nview = h.view(-1)\nh.add_(self.first(x))\nreturn view * 2",
    "change the input": "x.mul_(2)\nreturn self.first(x)",
    "transpose in place": "return self.first(x).t_().exp()",
    "count by +=": "self.count += 1\nreturn self.first(x) * self.count",
    "read a buffer around a write":
        "before = self.first(x) + self.count\nwith torch.no_grad(): "
        "self.count.mul_(0.9).add_(x.mean())\nreturn before, self.second(x) + self.count",
    "scatter":
        "i = torch.arange(8).expand(4, 8).contiguous() // 2\nh = torch.zeros(4, "
        "8).scatter_add_(1, i, self.first(x))\nreturn h + torch.zeros(4, "
        "8).index_put_((torch.tensor([0, 1]),), self.second(x)[:2], accumulate=True)",
    # ---- random numbers; each operator that draws is in test_operators.py
    "draw many kinds":
        "a, b = torch.rand(4, 8), torch.randn(8)\nh = F.dropout(self.first(x) * a + b, "
        "0.3)\nh = F.dropout(self.second(h).tanh(), 0.5)[:, torch.randint(0, 8, "
        "(4,))]\nreturn h + torch.rand_like(h) + torch.bernoulli(torch.full((4,), 0.5)) + "
        "torch.randperm(4)",
    "draw what nobody reads": "torch.rand(3)\nreturn F.dropout(self.first(x).tanh().exp(), 0.5)",
    "draw early and use late":
        "a = torch.rand(4, 8)\nh = self.first(x).tanh().exp()\nb = torch.rand(4, 8)\nreturn "
        "(h * b).exp().sum(0) + (a * 2).exp(), F.dropout(h, 0.5) * b",
    "seed the default generator from C":
        "list(map(torch.default_generator.manual_seed, [0]))\nreturn self.first(x) + torch.rand(8)",
    "seed the default generator":
        "torch.default_generator.manual_seed(0)\nreturn self.first(x) + torch.rand(8)",
    # ---- autograd
    "switch grad off and on":
        "with torch.no_grad(): t = self.first(x).tanh()\ntorch.set_grad_enabled(False)\nu = "
        "self.first(x).exp()\ntorch.set_grad_enabled(True)\nreturn self.second(x) * t + "
        "self.first(x) * u",
    "compute in inference mode":
        "with torch.inference_mode(): t = self.first(x).tanh()\nreturn self.second(x) * t.clone()",
    "return a tensor and its detached self":
        "h = self.first(x).exp()\nreturn h, h.detach(), h.view(-1), h[0], h",
    "return weights and views of them":
        "return self.first(x), self.first.weight.t(), self.second.weight, self.second.weight[0]",
    "return the input and views of it": "return self.first(x), x, x.view(-1)",
    "apply a function":
        "h, positive = Cube.apply(self.first(x), 7.0)\nother, _ = Cube.apply(self.second(h), "
        "-2.0)\nreturn torch.where(positive, h, other)",
    "checkpoint a sequence":
        "parts = [self.first, self.second, self.first]\nreturn "
        "torch.utils.checkpoint.checkpoint_sequential(parts, 2, self.second(x), "
        "use_reentrant=False)",
    "differentiate inside":
        "with torch.enable_grad():\n    x = x.detach().requires_grad_()\n    energy = "
        "self.first(x).exp().sum()\n    (force,) = torch.autograd.grad(energy, x, "
        "create_graph=True)\nreturn energy + force.square().sum()",
    # ---- values and modes
    "make tensors from data":
        "column = torch.tensor([1.0, 2.0, 3.0, 4.0]).unsqueeze(1)\ntable = "
        "torch.from_numpy(np.linspace(0, 1, 8).astype('f4'))\nh = self.first(x) * table + "
        "column * torch.arange(8) + torch.as_tensor(2.5)\nreturn h + torch.full((8,), 0.5) + "
        "x.new_ones(8)",
    "take a number back": "return self.first(x) * torch.tensor(2.0).item()",
    "nest autocast":
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n    h = self.first(x)\n    with "
        "torch.autocast('cpu', enabled=False): h = self.second(h.float())\nreturn "
        "self.second(h)",
    "normalize under autocast":  # statistics are float32; eager rounds the gradient of b as it adds
        "b = self.first.bias\nwith torch.autocast('cpu', dtype=torch.bfloat16):\n    "
        "h = F.layer_norm(self.first(x), (8,), b.detach())\n    "
        "h = F.batch_norm(h, None, None, b, training=True)\n    "
        "return self.second(F.group_norm(h, 2, b))",
    "return plain values":
        "return {'y': self.first(x), 'size': x.shape[0], 'dtype': x.dtype, 'none': None, 'f': 0.5}",
    "make a module":
        "return nn.CrossEntropyLoss(label_smoothing=0.1)(self.first(x), torch.arange(4))",
    # ---- noted once
    "note the kind at the first call":
        "if self.config.kind is None: self.config.kind = 'regression'\nreturn self.first(x) "
        "if self.config.kind == 'regression' else x",
    "remember the largest length": "self.calls = max(self.calls, len(x))\nreturn self.first(x)",
    "fill a cache once":
        "if 'mask' not in self.cache: self.cache['mask'] = torch.ones(8)\nreturn "
        "self.first(x) * scale(8) * self.cache['mask']",
    "cached property":
        'type(self).p = vars(type(self)).get(\'p\') or made(functools.cached_property(lambda '
        's: [2.0]), "v.__set_name__(object, \'p\')")\nreturn self.first(x) * self.p[0]',
    "keep a tensor": "self.last = self.first(x)\nreturn self.second(self.last)",
    "locks": "with LOCK, RLOCK, CONDITION: return self.first(x)",
    "set what is set": "torch.autograd.set_multithreading_enabled(True)\nreturn self.first(x)",
}
# What is said of the forward when it is refused.
# fmt: off
REFUSED = {
    "seed": ("torch.manual_seed(3)\nreturn self.first(x) + torch.rand(8)", "Generator"),
    "use .data": ("h = self.first(x)\nreturn h + (h.round() - h).data", "detach"),
    "hook a gradient": (
        "h = self.first(x)\nh.register_hook(lambda g: g * 3)\nreturn self.second(h)", "hook"),
    "draw in Python": ("return self.first(x) * random.random()", "random"),
    "draw from a generator": (
        "return self.first(x) * torch.rand(4, 8, generator=torch.Generator().manual_seed(3))",
        "Generator"),
    "count in Python": ("self.calls += 1\nreturn self.first(x) * self.calls", "'calls'"),
    "go another way the first time": (
        "if self.config.kind is None:\n    self.config.kind = 'seen'\n    return "
        "self.first(x)\nreturn x", "changes a dictionary or object"),
    "replace a buffer": ("self.count = self.count + 1\nreturn self.first(x) * self.count",
        "'count'"),
    "fill a cache": (
        "if x.shape not in self.cache: self.cache[x.shape] = torch.ones(x.shape)\nreturn "
        "self.first(x) * self.cache[x.shape]", "dictionary"),
    "branch on data": ("return self.first(x) if x.sum() > 0 else self.second(x)",
        "value of a tensor"),
    "set the default dtype": (
        "torch.set_default_dtype(torch.float64)\nh = "
        "torch.arange(8.0)\ntorch.set_default_dtype(torch.float32)\nreturn self.first(x) * h",
        "default dtype"),
    "fill a global": ("h = self.first(x)\nKEPT.append(h)\nreturn self.second(h)", "forward"),
    "log": ("LOGGER.warning('%s rows', len(x))\nreturn self.first(x)", "forward"),
    "put into a queue of C": ("h = self.first(x)\nQUEUE.put(h.detach())\nreturn h", "forward"),
    "set the environment": (
        "os.environ['LAZYINLINE_T'] = os.environ.get('LAZYINLINE_T', '') + 'x'\nreturn "
        "self.first(x)", "forward"),
    "leave grad mode off": ("torch.set_grad_enabled(False)\nreturn self.first(x)", ""),
    "count among Python's own names": (
        "BUILTINS['made_up'] = 1\nreturn self.first(x)", "all names, that builtins holds"),
    "look up a module": (
        "return self.first(x) * len(sys.modules[min(['so'])[::-1]].sep)",
        "by a name that it computes"),
}
# fmt: on
STATE = "[model.calls, model.log, model.cache, model.config, KEPT, QUEUE.qsize(), "
STATE += "os.environ.pop('LAZYINLINE_T', ''), LOCK.locked(), torch.get_default_dtype()]"


def play(*texts: str, calls: int = 3, **options: Any) -> list[str]:
    outcome = assert_as_eager(*texts, scene=[""] * calls, state=STATE, tolerance=2e-5, **options)
    torch.set_grad_enabled(True)
    return outcome.eagerly


# Where a code generator may put things in another order.
ORDERED = [n for n in EQUAL if n.startswith(("assign", "read", "draw", "return"))]
# That numbers are drawn in the order of the graph is in test_contract_inductor.py.
GENERATED = ["assign to a slice", "return weights and views of them"]
ALIKE = ("write through a view", "set what is set", "count by +=", "remember the largest length")


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.sweep(keep=[f"[{name}]" for name in EQUAL if name not in (*GENERATED, *ALIKE)])
def test_forward_equals_eager(name: str) -> None:
    play(*net(EQUAL[name]))


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.sweep(keep=GENERATED)
def test_forward_equals_eager_with_generated_kernels(name: str) -> None:
    play(*net(EQUAL[name]), backend="inductor")


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_repeats_is_run_and_refused_where_it_cannot_be(name: str) -> None:
    forward, reason = REFUSED[name]
    assert play(*net(forward), calls=2, grad="grad" in name + forward), "it was compiled"
    text = assert_refused(*net(forward), state=STATE)
    assert not reason or any(part in text for part in reason.split("|")), text


# fmt: off
HOOKED = {
    "fills a list": "lambda m, a, o: KEPT.append(o)",
    "of an object": "COLLECTOR.hook",
    "fills a deque": "functools.partial(lambda kept, m, a, o: kept.append(o.data), KEPT)",
    "keeps parameters and inputs": "lambda m, a, o, kept=KEPT: kept.extend([m.bias, a[0]])",
    "sends to a generator": "lambda m, a, o: GENERATOR.send(o)",
    "counts": "counting()",
    "saves a tensor":
        "lambda m, a, o: torch.save(o.detach(), KEPT.append(io.BytesIO()) or KEPT[-1])",
}
# fmt: on


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.sweep(keep=["[counts", "keeps", "generator"])
def test_what_a_hook_does_happens_at_each_call(name: str) -> None:
    hook = f"handle = model.first.register_forward_hook({HOOKED[name]})"
    texts = net("return self.second(self.first(x).relu())", hook)
    state = "[[k for k in KEPT if not isinstance(k, io.BytesIO)], len(KEPT), COLLECTOR]"
    removed = ["", "", "handle.remove()", ""]
    outcome = assert_as_eager(*texts, scene=removed, state=state, tolerance=2e-5)
    assert len(outcome.eagerly) == 2
    assert_refused(*texts, state=state)


# What a forward does to its modules.
ACTS = {
    "zero_grad": "self.first.zero_grad()",
    "frozen": "self.first.requires_grad_(False)",
    "converted": "self.first.double().float()",
    "swapped": "torch.utils.swap_tensors(self.first.weight, nn.Parameter(torch.ones(8, 8)))",
    "data": "self.first.weight.data = self.first.weight.data * 0.5",
    "hook": "self.first.weight.register_hook(lambda g: g * 2)",
    "forward hook": "self.first.register_forward_hook(lambda m, a, r: r * 2)",
    "in place": "with torch.no_grad(): self.first.weight.mul_(0.5)",
}


@pytest.mark.parametrize("act", ACTS)
def test_what_a_forward_does_to_its_modules_is_done_at_each_call(act: str) -> None:
    play(*net(f"{ACTS[act]}\nreturn self.first(x)"))


SETTING_GRADIENTS = {
    "begins with it": "x.requires_grad_(True)\nreturn self.first(x.tanh())",
    "takes forces": "x.requires_grad_(True)\ne = x.tanh().sum()\n"
    "return self.first(torch.autograd.grad(e, x, create_graph=True)[0] * e)",
    "switches it back": "x.requires_grad_(True)\ne = self.first(x.tanh()).sum()\n"
    "found = torch.autograd.grad(e, x, create_graph=True)[0]\nx.requires_grad_(False)\n"
    "return found * e, x",
    "uses it afterwards": "x.requires_grad_(True)\ne = self.first(x.tanh()).sum()\n"
    "x.requires_grad_(False)\nreturn x * e",
    "has one already": "y = self.first(x.double().float())\nx.requires_grad_(x.requires_grad)\n"
    "self.first.weight.requires_grad_(True)\nreturn y",
}


@pytest.mark.parametrize("name", SETTING_GRADIENTS)
def test_an_input_is_switched_to_want_a_gradient_at_each_call(name: str) -> None:
    reasons = play(*net(SETTING_GRADIENTS[name]))
    assert name.startswith("uses it") or not reasons


SAYING = """
def saying(run, action, calls, *args):
    'Returns what each call of something warns of.'
    found = []
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter(action)
        warnings.filterwarnings("ignore", message=".*runs eagerly")
        for _ in range(calls):
            run(*args)
            found.append([(str(w.message), w.category.__name__, w.lineno % 1000) for w in log])
            log.clear()
    return found
"""
WARNING = {
    "once a line": "warnings.warn(f'of {x.dim()} dimensions', FutureWarning)",
    "as a message": "warnings.warn(UserWarning('a message'))",
    "and needs a number": "warnings.warn('before a number')\nfloat(x.sum())",
}


@pytest.mark.parametrize("action", ["default", "always", "module", "once", "ignore"])
@pytest.mark.parametrize("name", WARNING)
@pytest.mark.sweep(keep=["line-always", "line-once", "-default]"])
def test_a_warning_is_given_as_often_as_eager_gives_it(name: str, action: str) -> None:
    given = []
    for is_compiled in (False, True):
        world = World(*net(f"{WARNING[name]}\nreturn self.first(x)"), SAYING)
        model = world.model
        run = lazyinline.compile(model, backend="eager") if is_compiled else model
        given.append(world.value("saying")(run, action, 4, *world.inputs()[0]))
    if (name, action) == ("and needs a number", "always"):  # two calls try a capture
        given = [[*(list(dict.fromkeys(x)) for x in calls[:2]), *calls[2:]] for calls in given]
    assert given[0] == given[1]


@pytest.mark.parametrize("returned", ["self.first(x)", "self.first(x) * x.max().item()"])
def test_a_print_comes_once_a_call(returned: str, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(*net(f"print('rows', len(x))\nreturn {returned}"))
    compiled = lazyinline.compile(world.model, backend="eager")
    for _ in range(3):
        compiled(*world.inputs()[0])
        assert capsys.readouterr().out == "rows 4\n"


# An argument, and how a forward puts a tensor t into it (``a``).
# fmt: off
FILLED = {
    "object": ("Value([])", "a.value.append(t); a.last = t"),
    "object, bound anew": ("Value([])", "a.value = [*a.value, t]"),
    "slots": ("Slotted([])", "a.value.append(t); a.more = t"),
    "namespace": ("NS(v=[])", "a.v.append(t); a.last = t"),
    "list": ("[]", "a.append(t)"),
    "list of a class": ("Items()", "a.append(t)"),
    "deque": ("collections.deque()", "a.append(t)"),
    "dictionary": ("{}", "a[len(a)] = t"),
    "ordered dictionary": ("collections.OrderedDict()", "a[len(a)] = t"),
    "default dictionary": ("collections.defaultdict(list)", "a[len(a)] = t"),
    "object in containers": ("({'k': Value([])},)",
        "a[0]['k'].value.append(t); a[0]['k'].last = t"),
    "object in an object": ("NS(h=[Slotted([])])", "a.h[0].value.append(t)"),
    "dictionary that loses": ("{'x': torch.ones(1), 'n': 0}", "a.pop('x', None); a['n'] += 1"),
}
ENDS = {
    "nothing": "pass",
    "a value": "t.sum().item()",
    "numpy": "t.detach().numpy()",
    "a text": "str(t)",
    "an error on a fake": "if type(t) is not Tensor: raise ZeroDivisionError",
}
# fmt: on
FILLING = """
ARGUMENT = {0}
def inputs(): return example(grad=False), ARGUMENT
def forward(self, x, a):
    t = self.linear(x)
    {1}
    {2}
    return t * 2
model = block(forward)()
"""


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("holder", FILLED)
@pytest.mark.sweep(
    keep=[
        *("[slots-", "[object-nothing", "[list of a class-nothing", "[default dictionary-nothing"),
        *("[object in containers-nothing", "loses-nothing", "[deque-nothing", "[list-a value"),
    ]
)
def test_what_an_argument_holds_is_as_eager_leaves_it(holder: str, end: str) -> None:
    text = FILLING.format(*FILLED[holder], ENDS[end])
    assert_as_eager(HELPERS, text, scene=[""] * 3, state="ARGUMENT", grad=False)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "RuntimeError"])
@pytest.mark.parametrize("holder", FILLED)
@pytest.mark.sweep(keep=["[slots-", "[list-Key"])
def test_an_error_of_any_kind_leaves_no_tensor_of_a_capture(holder: str, error: str) -> None:
    world = World(HELPERS, FILLING.format(*FILLED[holder], f"KEPT.append(t)\n    raise {error}"))
    world.run("KEPT = []")
    compiled = lazyinline.compile(world.model, backend="eager")
    with pytest.raises(eval(error)):
        compiled(*world.inputs()[0])
    shown([world.value("ARGUMENT"), world.value("KEPT")])  # says if one is no plain tensor


def test_the_door_raises_where_a_tensor_of_a_capture_was_left() -> None:
    from lazyinline.frontend.tracing.torch_tracing import new_fake_mode

    with new_fake_mode():
        left = torch.ones(3)

    with pytest.raises(lazyinline.VerifyError, match="a capture was left"):
        lazyinline.compile(Made(lambda self, x: [{"left": left}, x.sum().item()]), backend="eager")(
            torch.randn(3)
        )


WRAP = "@torch.fx.wrap\ndef doubled(x): return x * 2\ndef trebled(x): return x * 3"


WRAPPED = [
    "return self.second(doubled(self.first(x)))",
    "global doubled\nh, doubled = doubled(self.first(x)), trebled\nreturn self.second(h)",
]


@pytest.mark.parametrize("forward", WRAPPED)
def test_a_global_that_fx_wraps_is_what_it_is_in_eager(forward: str) -> None:
    """PyTorch's tracers exchange it while they run."""
    options = {"scene": [""] * 3, "state": "doubled is trebled", "tolerance": 2e-5}
    outcome = assert_as_eager(*net(forward), WRAP, **options)
    assert not outcome.reports[-1].ran_eagerly


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def channels_last(x: Any) -> Any:
    return x.to(memory_format=torch.channels_last)


def transposed() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(drawn(8, 8).t())
    return layer


def norms() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    layers += [nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2, stride=2, bias=False)]
    layers += [nn.Dropout2d(0.3), nn.InstanceNorm2d(2, track_running_stats=True)]
    return nn.Sequential(*layers, nn.GroupNorm(1, 2))


LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "convolutions": (norms, drawn(2, 3, 8, 8)),
    "channels_last": (
        lambda: channels_last(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU())),
        channels_last(drawn(2, 3, 8, 8)),
    ),
    "embedding": (
        lambda: nn.Embedding(10, 8, padding_idx=1, scale_grad_by_freq=True),
        torch.arange(6),
    ),
    "bag": (lambda: nn.EmbeddingBag(10, 8, mode="mean"), torch.arange(6).view(2, 3)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), drawn(4, 8)),
    "transposed_weight": (transposed, drawn(4, 8)),
    "empty_batch": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), drawn(0, 8)),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sweep(keep=["ns-eager", "g-eager", "orthogonal-eager", "transposed", "empty"])
def test_layer_equals_eager(name: str, backend: str) -> None:
    make, x = LAYERS[name]
    torch.manual_seed(1)
    assert_equals_eager(make(), [x], backend=backend, tolerance=2e-5)


@pytest.mark.parametrize(
    "model",
    [
        nn.Embedding(10, 8, sparse=True),
        nn.Embedding(10, 8, max_norm=1.0),
        nn.Sequential(nn.Embedding(10, 8), nn.BatchNorm1d(2, momentum=None)),
    ],
    ids=["sparse_gradient", "renormalized_weight", "momentum_from_data"],
)
def test_layer_is_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError):
        lazyinline.compile(model, backend="eager", fallback="error")(torch.tensor([[1, 2], [3, 4]]))
