"""Adapter: the user's optimizer in a training step, inside its program or after it.

The numbers of the parameter groups are read before each step, so that schedulers work. The state is
the optimizer's own, updated in-place, so that ``state_dict`` and checkpoints work as before.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from ..autodiff.training_program import UpdateGroup, Updates
from ..backend.cache import decode_value, encode_value
from ..backend.launches.torch_native import Hold
from ..reuse.errors import FileError, PlanError
from ..reuse.evidence.root_evidence import Check, IdentityChecks
from ..reuse.ir.torch_updates import ADAM, ADAM_SETTINGS, SGD_SETTINGS
from ..reuse.ir.torch_updates import SGD as SGD_UPDATE
from ..reuse.ir.types import TensorType, reach
from .autograd.torch_engine import have_hooks

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_REFUSED = ("amsgrad", "differentiable", "capturable", "dampening")
_FLAGS = (*_REFUSED, "maximize", "nesterov", "decoupled_weight_decay")


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the norm of all gradients together."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class StepOptimizer:
    """The user's optimizer in a training step; ``target`` is the GPU, if it need not be here.

    ``why_after`` says why the update runs after the step's program; empty if it is part of it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        target: str | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise PlanError(f"optimizer= takes a torch.optim.Optimizer, not {type(optimizer)}.")
        if isinstance(optimizer, LBFGS):
            raise PlanError(
                "LBFGS computes the loss several times for one update, so it is no part of a step. "
                "Compile the model with lazyinline.compile, and call it in LBFGS's closure."
            )
        self.optimizer, self.max_norm, self._scaler = optimizer, max_norm, scaler
        self._target = target
        self._compiled_for: list[Any] = []
        self._written: list[list[float]] = []
        self._settings: list[torch.Tensor] = []
        self._fixed: list[list[float]] = []  # for a GPU, what programs were first compiled with
        self.why_after = ""

    # ---- updates in the step's program -------------------------------------------------------

    def groups(self, why_after: str = "") -> tuple[UpdateGroup, ...]:
        """Returns the updates to compile into a program; none if they run after it."""
        # Kept from the first compile on: a later change moves the update after the step.
        tensors = (p for group in self.optimizer.param_groups for p in group["params"])
        is_for_gpu = self._target is not None or any(p.is_cuda for p in tensors)
        if is_for_gpu and not self._fixed:
            self._fixed = self._fixed_now()
        structure = self._structure()
        if structure != self._compiled_for:
            self._compiled_for, self._settings, self._written = structure, [], []
        self.why_after = why_after or self._why_after()
        if self.why_after:
            return ()
        found = tuple(self._groups())
        if not self._settings:  # programs for all sizes read the same tensors
            self._written = [[] for _ in found]
            types = [one.settings for one in found]
            self._settings = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in types]
        self._write_settings()
        return found

    def is_as_compiled(self) -> bool:
        """Whether programs still fit the optimizer; copies its numbers to the tensors they read."""
        if self._compiled_for and self._structure() != self._compiled_for:
            return False
        self._write_settings()
        return True

    @property
    def why_not_saved(self) -> str:
        """Says why a file cannot make this optimizer and its place in the step anew, if so."""
        is_plain = type(self.optimizer) in _SAVED.values() and self._scaler is None
        # These run it after the step wherever it is, so that a loaded one does so, too.
        flags = (group.get(name) for group in self.optimizer.param_groups for name in _REFUSED)
        if is_plain and not self._have_hooks() and (self.max_norm is not None or any(flags)):
            return ""
        return self.why_after

    def hindrance(self, parameters: Sequence[torch.Tensor], model: Sequence[torch.Tensor]) -> str:
        """Says why a program cannot update these parameters of a model; empty if it can."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if not held.issuperset(map(id, parameters)):  # load_state_dict(assign=True) makes others
            return "the optimizer does not hold a parameter any more"
        there = (t for t in model if not t.is_meta)
        laid_out = [t for t in there if t.layout is torch.strided and not is_lazy(t)]
        spans = sorted((t.data_ptr(), _end_of(t), id(t) in held) for t in laid_out)
        # A parameter is updated after its last use, but the other tensor may be used later.
        end, is_held = 0, False
        for start, own_end, is_own in spans:
            if 0 < start < end and (is_held or is_own):
                return "a parameter shares its memory with another tensor of the model"
            end, is_held = max((end, is_held), (own_end, is_own))
        return ""

    def _write_settings(self) -> None:
        groups = self.optimizer.param_groups if self._settings else ()
        for written, tensor, group in zip(self._written, self._settings, groups, strict=True):
            numbers = _settings_of(group)
            # Numbers rarely change, and comparing is faster than copying.
            if numbers != written:
                written[:] = numbers
                given = numbers if tensor.dim() else numbers[0]
                tensor.copy_(torch.tensor(given, dtype=tensor.dtype, device="cpu"))

    def _why_after(self) -> str:
        kind = type(self.optimizer)
        if kind not in (SGD, Adam, AdamW):
            return f"{kind.__name__} has no fused update that a program can hold"
        if self.max_norm is not None:
            return "the norm of all gradients is known only at the end"
        if self._scaler is not None:
            return "a GradScaler looks at all gradients before any update"
        if self._have_hooks():
            return "the optimizer or a parameter has hooks, or its step() was replaced"
        if any(map(operator.ne, self._fixed, self._fixed_now())):
            return "a number that a program for a GPU holds changes: not the learning rate alone"
        if len({p.device for group in self.optimizer.param_groups for p in group["params"]}) > 1:
            return "its parameters are on several devices"
        devices = ("cpu", "meta") if self._target else ("cpu", "cuda")
        found = (_why_not(group, devices) for group in self.optimizer.param_groups)
        return next(filter(None, found), "")

    def _fixed_now(self) -> list[list[float]]:
        return [_settings_of(group)[1:] for group in self.optimizer.param_groups]

    def _structure(self) -> list[Any]:
        """Returns the facts that programs depend on and that may change; compared at each step."""
        groups = self.optimizer.param_groups
        facts = [tuple(map(group.get, _FLAGS)) for group in groups]
        # By id, because a program is bound to these parameter objects.
        facts += [(not g.get("momentum"), *map(id, g["params"])) for g in groups]
        return [self._have_hooks(), *facts, *(self._fixed and self._fixed_now())]

    def _have_hooks(self) -> bool:
        """Whether user code runs when gradients arrive, or around an update."""
        step = vars(self.optimizer).get("step")  # a scheduler's own wrapper has a mark
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            return True
        if any(getattr(self.optimizer, name) for name in _HOOKS):
            return True
        if any(getattr(torch_optimizer, name) for name in _GLOBAL_HOOKS):
            return True
        return have_hooks([p for group in self.optimizer.param_groups for p in group["params"]])

    def _groups(self) -> Iterator[UpdateGroup]:
        for group in self.optimizer.param_groups:
            members = frozenset(map(id, group["params"]))
            numbers = _settings_of(group)
            device = next((p.device for p in group["params"] if p.is_cuda), torch.device("cpu"))
            settings = TensorType(torch.float64, (len(numbers),), (1,), device)
            fixed: tuple[float, ...] = ()
            if self._fixed:
                # Fused CUDA kernels take only the learning rate as a tensor.
                settings, fixed = TensorType(torch.float32, (), (), device), tuple(numbers[1:])
            if "betas" in group:
                is_decoupled = isinstance(self.optimizer, AdamW)
                is_decoupled = is_decoupled or bool(group.get("decoupled_weight_decay"))
                yield UpdateGroup(ADAM, (is_decoupled, group["maximize"], fixed), settings, members)
            else:
                flags = (group["nesterov"], group["maximize"], fixed)
                has_state = group["momentum"] != 0
                yield UpdateGroup(SGD_UPDATE, flags, settings, members, has_state)

    # ---- updates after the program -----------------------------------------------------------

    def scaled(self, seed: torch.Tensor) -> torch.Tensor | None:
        """Returns the seed of a backward times the scaler's scale; None without a scaler."""
        return None if self._scaler is None else self._scaler.scale(seed)

    def update(
        self,
        total_norm: Callable[[Iterable[torch.Tensor]], torch.Tensor] = norm_of,
        agree: Callable[[dict[Any, torch.Tensor]], None] = lambda found: None,
    ) -> None:
        """Updates the parameters by their ``.grad``, as a training loop does.

        ``total_norm`` includes gradients on other ranks; ``agree`` makes the scaler's found_inf
        equal on all of them.
        """
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
            agree(self._scaler._found_inf_per_device(self.optimizer))
        if self.max_norm is not None:
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, total_norm(params))
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()

    def bound(
        self, updates: Updates, parameters: Sequence[torch.Tensor], hold: Hold | None = None
    ) -> tuple[list[torch.Tensor], Check]:
        """Returns the tensors that a program takes besides the model's.

        Missing state is created, as PyTorch creates it before the first step. The second result
        says at each step whether the state still consists of the same tensors.
        """
        for index in updates.parameters:
            # The program sets no gradient, so an older one must not stay.
            parameters[index].grad = None
        # In PyTorch's order, in which the step count comes first.
        for index, name in sorted(updates.state, key=lambda one: one[1] != "step"):
            _make_state(self.optimizer.state[parameters[index]], name, parameters[index])
        tensors = [self.optimizer.state[parameters[i]][name] for i, name in updates.state]
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        checks, state = IdentityChecks(), self.optimizer.state
        checks.attribute(self.optimizer, "state", state)
        for table in (state, *state.values()):
            checks.values(table)
        return [*tensors, *self._settings], checks.function(hold)


def step_optimizer(
    optimizer: Optimizer | None,
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    target: str | None = None,
) -> StepOptimizer | None:
    """Returns the optimizer of a step, if it has one; refuses options without an optimizer."""
    if optimizer is not None:
        return StepOptimizer(optimizer, max_norm, scaler, target)
    if max_norm is not None or scaler is not None:
        raise PlanError("max_norm= and scaler= say how optimizer= updates; pass the optimizer too.")
    return None


# ---- in a file -----------------------------------------------------------------------------------

_SAVED = {kind.__name__: kind for kind in (SGD, Adam, AdamW)}


def optimizer_data(optimizer: StepOptimizer | None, names: Mapping[int, str]) -> Any:
    """Returns an optimizer without its state, as JSON data; refuses one that a file cannot make."""
    if optimizer is None:
        return None
    if why := optimizer.why_not_saved:
        raise FileError(f"A step with its optimizer behind it cannot be saved: {why}.")
    groups = [
        [
            [names[id(p)] for p in group["params"]],
            {n: encode_value(v) for n, v in group.items() if n not in ("params", "initial_lr")},
        ]
        for group in optimizer.optimizer.param_groups
    ]
    defaults = {n: encode_value(v) for n, v in optimizer.optimizer.defaults.items()}
    return [type(optimizer.optimizer).__name__, groups, defaults, optimizer.max_norm]


def optimizer_of(
    data: Any, tensors: Callable[[str], torch.Tensor], target: str | None, *, trusted: bool
) -> StepOptimizer:
    """Returns the optimizer that :func:`optimizer_data` wrote.

    A trusted one is made without its constructor, whose checks import Dynamo.
    """
    kind, groups, defaults, max_norm = data
    if not isinstance(max_norm, float | int | None):
        raise FileError(f"gradients are clipped to {max_norm!r}, which is no number")
    numbers = {n: decode_value(v) for n, v in defaults.items()}
    made = [
        {"params": list(map(tensors, names)), **{n: decode_value(v) for n, v in told.items()}}
        for names, told in groups
    ]
    if not trusted:
        found: Optimizer = _SAVED[kind](made)
        found.defaults.update(numbers)
    else:
        found = _SAVED[kind].__new__(_SAVED[kind])
        found.__setstate__({"defaults": numbers, "state": defaultdict(dict), "param_groups": made})
    return StepOptimizer(found, max_norm, target=target)


def optimizer_state(optimizer: StepOptimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Returns the tensors of an optimizer's state, by ``exp_avg/<parameter>``."""
    state = optimizer.optimizer.state
    return {
        f"{name}/{names[id(parameter)]}": tensor
        for parameter, held in state.items()
        for name, tensor in held.items()
        if isinstance(tensor, torch.Tensor)
    }


def _why_not(group: Mapping[str, Any], devices: Collection[str]) -> str:
    """Says why a program on these devices cannot contain a group's update; empty if it can."""
    for name in _REFUSED:
        if group.get(name):
            return f"{name}={group[name]}"
    for parameter in group["params"]:
        plain = type(parameter) in (torch.nn.Parameter, torch.Tensor)
        on_device = parameter.device.type in devices
        if not plain or not on_device or not parameter.is_floating_point():
            return f"a parameter is a {type(parameter).__name__} on {parameter.device}"
    return ""


def _settings_of(group: Mapping[str, Any]) -> list[float]:
    named = {**group, **dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))}
    return [float(named[name]) for name in (ADAM_SETTINGS if "betas" in group else SGD_SETTINGS)]


def _end_of(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + reach(tensor.shape, tensor.stride()) * tensor.element_size()


def _make_state(state: dict[str, Any], name: str, parameter: torch.Tensor) -> None:
    found = state.get(name)
    if found is None and name == "step":
        state[name] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    elif found is None:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    elif name == "step":
        if found.dtype != torch.float32 or found.device != parameter.device:
            state[name] = found.to(parameter.device, torch.float32)
    elif found.dtype != parameter.dtype or found.stride() != parameter.stride():
        raise PlanError(
            f"The optimizer's {name} of a parameter of shape {tuple(parameter.shape)} is "
            f"{found.dtype} with strides {found.stride()}; load a state that was saved for "
            f"{parameter.dtype} with strides {parameter.stride()}."
        )
