"""PEFT's adapters: injected before and after the compile, switched, merged and saved."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, gradients
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tiny_gpt2 import gpt2, in_place, token_ids
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import lazyinline
from lazyinline import CompileReport

STEPS = 6
Reports = list[CompileReport]


def lora(rank: int = 4, **options: Any) -> LoraConfig:
    settings = {"lora_alpha": 8, "lora_dropout": 0.1, "task_type": "CAUSAL_LM", **options}
    return LoraConfig(r=rank, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **settings)


def adapted(model: nn.Module, config: LoraConfig | None = None) -> Any:
    """Injects an adapter whose weights are drawn under one seed, the zero ones too."""
    torch.manual_seed(1)
    peft = get_peft_model(model, config or lora())
    drawn(peft, "default")
    return peft


def drawn(peft: nn.Module, adapter: str, *, seed: int = 2) -> None:
    """Gives an adapter weights that change the output: PEFT begins with zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if f".lora_B.{adapter}." in name:
                parameter.normal_(std=0.1, generator=generator)


def two_adapters(model: Any) -> Any:
    """Adds a second adapter of another rank."""
    model.add_adapter("second", lora(2))
    drawn(model, "second", seed=3)
    return model.eval()


def before() -> Any:
    return in_place(adapted(gpt2()))


def after() -> Any:
    return adapted(in_place(gpt2()))


def wrapped() -> Any:
    return lazyinline.compile(adapted(gpt2()), backend="eager", reuse="auto")


def logits(model: Any, *, seed: int = 0) -> Tensor:
    with torch.no_grad():
        return model(input_ids=token_ids(2, seed=seed)).logits


def trained(model: nn.Module, steps: int = STEPS) -> list[float]:
    """Trains what asks for a gradient, with dropout of one seed."""
    model.train()
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(asked, lr=1e-2)
    torch.manual_seed(7)
    losses = []
    for step in range(steps):
        ids = token_ids(2, seed=step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [before, after, wrapped], ids=lambda make: make.__name__)
def test_adapters_train_as_in_eager_and_the_frozen_base_stays(
    make: Callable[[], Any], compiles: Reports
) -> None:
    ours, theirs = make(), adapted(gpt2())
    base = {name: p.clone() for name, p in theirs.named_parameters() if "lora" not in name}
    assert trained(ours) == pytest.approx(trained(theirs), rel=1e-5)
    assert len(compiles) == 1
    assert not compiles[0].ran_eagerly
    found = dict(ours.named_parameters())
    expected = gradients(theirs)
    for name, gradient in gradients(ours).items():
        assert (gradient is None) == ("lora" not in name)
        if gradient is None:
            assert torch.equal(found[name], base[name])
        else:
            assert_close(gradient, expected[name])


def test_generated_code_trains_an_adapter_as_in_eager() -> None:
    ours = in_place(adapted(gpt2()), backend="inductor")
    assert trained(ours, 3) == pytest.approx(trained(adapted(gpt2()), 3), rel=1e-5)


def test_an_adapter_that_was_active_before_costs_no_compile(compiles: Reports) -> None:
    ours, theirs = two_adapters(before()), two_adapters(adapted(gpt2()))
    for name in ("default", "second", "default", "second", "second", "default"):
        for model in (ours, theirs):
            model.set_adapter(name)
        assert_close(logits(ours), logits(theirs))
    assert len(compiles) == 2


def test_adapters_that_are_off_for_a_while_are_off(compiles: Reports) -> None:
    ours, theirs = before().eval(), adapted(gpt2()).eval()
    plain = logits(gpt2().eval())
    for _ in range(2):
        assert_close(logits(ours), logits(theirs))
        with ours.disable_adapter():
            assert_close(logits(ours), plain)
    assert len(compiles) == 2


def test_merged_and_taken_out_again_and_merged_for_good() -> None:
    ours, theirs = before().eval(), adapted(gpt2()).eval()
    for change in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
        results = []
        for model in (ours, theirs):
            changed = getattr(model, change)()
            results.append(logits(changed if change == "merge_and_unload" else model))
        assert_close(*results)


def test_an_adapter_is_saved_and_loaded_into_a_compiled_base(tmp_path: pathlib.Path) -> None:
    ours = before()
    assert isinstance(ours, PeftModel)
    trained(ours, 2)
    ours.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    expected = logits(ours.eval())
    for base in (gpt2(), in_place(gpt2())):
        assert_close(logits(PeftModel.from_pretrained(base, tmp_path).eval()), expected)


def base_after() -> Any:
    peft = adapted(gpt2())
    in_place(peft.get_base_model())
    return peft


def generated(model: Any, **settings: Any) -> Tensor:
    ids = token_ids(2, 4)
    mask = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    lengths = {"min_new_tokens": 6, "max_new_tokens": 6}
    return model.generate(input_ids=ids, do_sample=False, **mask, **lengths, **settings)


@pytest.mark.parametrize(
    "make", [after, base_after, before, wrapped], ids=lambda make: make.__name__
)
def test_generate_gives_eagers_tokens(make: Callable[[], Any]) -> None:
    ours, theirs = make().eval(), adapted(gpt2()).eval()
    assert torch.equal(generated(ours), generated(theirs))
    report = lazyinline.last_report(ours if make is wrapped else ours.get_base_model())
    assert report is not None and not report.ran_eagerly
    assert report.num_compiles == 2  # the prompt, and every token after it
    with theirs.disable_adapter():
        plain = generated(theirs)
    with ours.disable_adapter():
        assert torch.equal(generated(ours), plain)


class Called(GPT2LMHeadModel):
    """Does something of its own around each call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("make", [in_place, lazyinline.compile], ids=["in place", "wrapped"])
def test_a_base_whose_calls_go_past_what_is_compiled_says_so(make: Callable[..., Any]) -> None:
    base = gpt2()
    base.__class__ = Called
    peft = adapted(base).eval()
    expected = generated(adapted(gpt2()).eval())
    with pytest.warns(UserWarning, match=r"runs Called eagerly.*__call__ of its own"):
        assert torch.equal(generated(make(peft, backend="eager")), expected)


@pytest.mark.parametrize("make", [before, wrapped], ids=lambda make: make.__name__)
def test_training_and_generating_take_turns(make: Callable[[], Any], compiles: Reports) -> None:
    ours, theirs = make(), adapted(gpt2())
    for turn in range(2):
        assert trained(ours, 2) == pytest.approx(trained(theirs, 2), rel=1e-5)
        assert torch.equal(generated(ours.eval()), generated(theirs.eval()))
        if not turn:
            first = len(compiles)
    assert len(compiles) == first


@pytest.mark.parametrize("make", [in_place, lazyinline.compile], ids=["in place", "wrapped"])
def test_generate_with_a_learned_prompt_gives_eagers_tokens(make: Callable[..., Any]) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    # PEFT 0.21 counts the positions of the prompt again at each token, beyond those of the text.
    theirs, base = (adapted(gpt2(n_positions=32), config).eval() for _ in range(2))
    ours = make(base, backend="eager")
    assert torch.equal(generated(ours), generated(theirs))
    report = lazyinline.last_report(base.get_base_model() if ours is base else ours)
    assert report is not None and not report.ran_eagerly
