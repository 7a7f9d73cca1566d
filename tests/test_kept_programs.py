"""How often a model is compiled, and how many of its programs are kept."""

import functools
import logging
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import num_calls
from models import Around
from torch import nn

import lazyinline
from lazyinline import lazy_inline
from lazyinline.backend.run.planned import Runtime
from lazyinline.frontend.checks.torch_state import TensorLayouts
from lazyinline.frontend.guards import guard
from lazyinline.frontend.sizes import shapes as dynamic
from lazyinline.reuse import torch_pytree

logger = logging.getLogger(__name__)


def num_compiles(compiled: nn.Module) -> int:
    return len(compiled.__dict__["_lazyinline_calls"].entries)


@functools.cache
def warn_once(text: str) -> None:
    logger.warning(text)


def talking(layers: Any, x: torch.Tensor) -> torch.Tensor:
    """Says once what it does, as models of libraries do."""
    warn_once("the loss type is unknown")
    logger.info("the loss type is unknown")
    return layers[0](x)  # type: ignore[no-any-return]


def test_what_the_process_does_beside_a_model_that_logs_compiles_nothing_anew() -> None:
    logger.addHandler(logging.NullHandler())
    compiled, x = (
        lazyinline.compile(Around(talking, nn.Linear(3, 3)), backend="eager"),
        torch.ones(2, 3),
    )
    going = threading.Event()
    thread = threading.Thread(target=going.wait)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(x)
        thread.start()
        logging.getLogger(f"{__name__}.another").addHandler(logging.StreamHandler())
        compiled(x)
        going.set()
        thread.join()
        compiled(x)
    assert num_compiles(compiled) == 1


class Varying(nn.Module):
    """Its shapes follow what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.size = 1

    def forward(self, x: torch.Tensor, size: int, *, flag: bool = False) -> torch.Tensor:
        return self.linear(x).repeat(1, size * self.size + flag)


@pytest.mark.parametrize("what", ["argument", "attribute", "length"])
@pytest.mark.parametrize("way", ["compile", "step"])
@pytest.mark.sweep(keep="step-length")
def test_programs_are_bounded_and_one_warning_names_what_keeps_changing(
    way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(guard, "MAX_WITH_ARENAS", 2)
    monkeypatch.setattr(dynamic, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(guard, "MANY_COMPILES", 4)
    model = Varying()
    compiled: Any = lazyinline.compile(model, backend="eager", dynamic=False)
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager", dynamic=False)
    entries = step._entries if way == "step" else vars(compiled)["_lazyinline_calls"].entries
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (*range(1, 8), *range(5, 8)):
            model.size = size if what == "attribute" else 1
            x = torch.randn(size if what == "length" else 1, 2)
            args = (x, size if what == "argument" else 1)
            if way == "step":
                torch.testing.assert_close(step(*args), model(*args).sum().detach())
            else:
                assert torch.equal(compiled(*args), model(*args))
    (warning,) = [w for w in caught if w.category is guard.CompiledRepeatedlyWarning]
    named = {
        "argument": "Varying was compiled 4 times.*the argument size .1, 2, 3, 4.",
        "attribute": "Varying was compiled 4 times.*the attribute (model.)?size .1, 2, 3, 4.",
        "length": r"the argument x .float32.1, 2., float32.2, 2.",
    }
    assert re.search(named[what], str(warning.message)), warning.message
    assert warning.filename == __file__
    assert len(entries) == 3
    assert entries._num_compiles == 7  # the last three calls found theirs
    if way == "step":
        assert sum(entry._lease is not None for entry in entries) == 2
        assert sum(bool(entry._batch) for entry in entries) == 2  # our copies of batches


# ---- the cost of noticing --------------------------------------------------------------------


def calls_of(function: Callable[[], object]) -> int:
    """Counts the calls of a function once it has run."""
    function()
    return num_calls(function)


@pytest.mark.sweep
def test_noticing_takes_no_call_of_python_and_few_facts_per_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a Hugging Face Llama block: 13 modules, 9 tensors, 16 attributes read (and room for more).

    Loops in C compare the facts, or the native library, in some ten nanoseconds each. A module has
    16: its class, dictionary, mode and forward, seven tables, and what five of these hold.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    kind = lazy_inline(type("Layer", (LlamaDecoderLayer,), {}))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    num_facts: list[int] = []

    def guard(layers: int) -> Callable[[], bool]:
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **heads))
        for layer in model.model.layers:
            layer.__class__ = kind
        ids = torch.zeros(1, 4, dtype=torch.long)
        compiled = lazyinline.compile(model, backend="eager")
        compiled(ids, labels=ids)
        (entry,) = vars(compiled)["_lazyinline_calls"].entries
        leaves, tree = torch_pytree.flatten(((ids,), {"labels": ids}))
        assert entry.guard.accepts(leaves, tree)
        return functools.partial(entry.guard.accepts, leaves, tree)

    def hold(*facts: tuple[Any, ...]) -> bool:
        num_facts.append(sum(map(len, facts)) // 3)  # each an owner, a name and an object
        return True

    few, many = (calls_of(guard(layers)) for layers in (2, 34))
    assert few > 0 and many - few < 32, (few, many)
    monkeypatch.setattr(Runtime, "hold", staticmethod(hold))
    few, many = (guard(layers)() and num_facts[-1] for layers in (2, 34))
    assert 13 + 9 + 16 <= (many - few) / 32 <= 13 * 16 + 9 + 2 * 16, (few, many)


def test_layouts_are_compared_exactly_whatever_the_callers_modes() -> None:
    tensors = [torch.ones(3, 3, requires_grad=True), torch.ones(2)]
    layouts = TensorLayouts(tensors)
    assert layouts.same(tensors)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with mode:
            assert layouts.same(tensors)
            assert TensorLayouts(tensors).same(tensors)
            assert not layouts.same([tensors[0].detach(), tensors[1]])
    tensors[0].requires_grad_(False)
    assert not layouts.same(tensors)
    with torch.no_grad():
        assert not layouts.same(tensors)
