"""Every model type of transformers that a rule can make small, compared with eager.

    python benchmarks/all_families.py                  # all of them: some hours
    python benchmarks/all_families.py --only jamba t5
    python benchmarks/all_families.py --part 0 4       # every fourth

Where benchmarks/families.py has configurations by hand, here each configuration's own defaults are
cut down by the names of their entries, and inputs are made from the forward's parameters. Types
that this does not fit are named with the error of the eager model. Compared are outputs, gradients,
buffers and parameters of three SGD steps in training mode, with the configuration's own dropout and
a length that changes, and the outputs of an inference.

A bias in front of a batch norm has a gradient of zero but for rounding, which differs by as much
as it is. So where a difference is larger than ``TOLERANCE``, the eager model is compared with
itself in float64 in the same way: rounding is what is at most twice as far, in every comparison.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from families import (
    TOLERANCE,
    compiled_parts,
    gradient_error,
    largest_error,
    relative_error,
    tensors,
)
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

import lazyinline

WIDTH, HEADS, VOCAB, TOKEN, IMAGE, LENGTHS = 32, 4, 99, 90, 32, (8, 8, 11, 8)
# The first of these that has a model of a configuration says which.
TASKS: tuple[str, ...] = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM")
TASKS += ("IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "CTC", "AUDIO_CLASSIFICATION")
MOST_PARAMETERS = 30_000_000

# The most that an entry of a configuration may be, by the parts of its name; the first that fits.
LIMITS = {
    "image_size": IMAGE,
    "patch_size": 8,
    "per_tok": 2,
    "first_k_dense": 1,
    "key_value_heads": 2,
    "n_group": 1,
    "topk_group": 1,
    "heads": HEADS,
    "n_head": HEADS,
    "layers": 3,
    "n_layer": 3,
    "head_dim": WIDTH // HEADS,
    "lora_rank": WIDTH // HEADS,
    "d_kv": WIDTH // HEADS,
    "experts": 4,
    "vocab": VOCAB,
    "position": 64,
    "sliding_window": 8,
    "mel_bins": 16,
    "queries": 10,
    "intermediate": 48,
    "ffn": 48,
    "d_ff": 48,
    "hidden": WIDTH,
    "d_model": WIDTH,
    "embd": WIDTH,
    "dim": WIDTH,
    "size": WIDTH,
    "width": WIDTH,
}


def shrink(config: PreTrainedConfig) -> None:
    """Cuts down what a configuration and those inside it hold."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif type(value) is int:
            if name.endswith(("_token_id", "_token_index")):
                smaller = min(value, TOKEN + len(name) % 9)
            else:
                most = next((most for part, most in LIMITS.items() if part in name), value)
                smaller = min(value, most)
            if smaller != value:
                setattr(config, name, smaller)
        elif name == "layer_types" and value:
            # One of each kind, and the number of layers that all configurations get.
            kinds = list(dict.fromkeys(value))
            setattr(config, name, [*kinds, *value][: LIMITS["layers"]])


def model_of(name: str) -> nn.Module | None:
    """Returns a small model of a type, if there is one with a model of its own."""
    kind = CONFIG_MAPPING[name]
    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING") for task in TASKS]
    for table in [*tables, modeling_auto.MODEL_MAPPING]:
        if kind in table:
            found = table[kind]
            break
    else:
        return None
    config = kind()
    shrink(config)
    made = found[0] if isinstance(found, list | tuple) else found
    with torch.device("meta"):
        count = sum(p.numel() for p in made(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters are left")
    torch.manual_seed(0)
    return made(config)


def inputs_of(model: nn.Module, length: int) -> dict[str, Tensor]:
    """Returns inputs for the parameters of a forward, in a batch of two."""
    names = inspect.signature(model.forward).parameters
    config: Any = model.config
    generator = torch.Generator().manual_seed(length)

    def ids(count: int) -> Tensor:
        return torch.randint(5, TOKEN, (2, count), generator=generator)

    given: dict[str, Tensor] = {}
    if "input_ids" in names:
        given["input_ids"] = ids(length)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids(length // 2)
    two_towers = hasattr(config, "vision_config") and config.get_text_config() is not config
    is_asked = "input_ids" not in given or (two_towers and hasattr(model, "logit_scale"))
    if "pixel_values" in names and is_asked:
        shape = (2, 3, IMAGE, IMAGE)
        given["pixel_values"] = torch.randn(shape, generator=generator)
    if "input_features" in names and "input_ids" not in given:
        given["input_features"] = torch.randn(2, 64, LIMITS["mel_bins"], generator=generator)
    if "input_values" in names and "input_ids" not in given:
        given["input_values"] = torch.randn(2, 800 + 100 * length, generator=generator)
    return given


def weighted(output: Any) -> Tensor:
    """Returns a scalar that all differentiable outputs flow into."""
    # The squares that a layer norm gives add up to a constant, which would have no gradient.
    found = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor)]
    parts = [x.double() for x in found if x.requires_grad]
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) for x in parts]
    return sum((x * w).mean() for x, w in zip(parts, weights, strict=True))  # type: ignore[return-value]


def single(values: Iterable[Tensor]) -> list[Tensor]:
    """Returns tensors of double precision in single."""
    return [x.float() if x.dtype is torch.float64 else x for x in values]


def errors(model: nn.Module, run: nn.Module, owner: nn.Module) -> Iterator[float]:
    """Trains and runs a model, and what runs another one; yields how far apart they are."""
    pairs = ((model, model), (run, owner))
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for _, m in pairs]
    for step, length in enumerate(LENGTHS):
        is_training = step + 1 < len(LENGTHS)
        results, grads = [], []
        for (called, whole), optimizer in zip(pairs, optimizers, strict=True):
            dtype = next(whole.parameters()).dtype
            inputs = inputs_of(model, length)
            given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
            whole.train(is_training)
            optimizer.zero_grad()
            transformers.set_seed(step)
            with torch.set_grad_enabled(is_training):
                output = called(**given)
            if is_training:
                weighted(output).backward()
            results.append(single(tensors(output)))
            found = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
            grads.append(dict(zip(found, single(found.values()), strict=True)))
            optimizer.step()
        yield largest_error(results[1], results[0])
        if is_training:
            is_same = grads[0].keys() == grads[1].keys()
            yield gradient_error(grads[1], grads[0]) if is_same else math.inf
        buffers = (single(whole.buffers()) for whole in (owner, model))
        yield max(map(relative_error, *buffers), default=0.0)
    names = [name for name, _ in model.named_parameters()]
    ends = (single(whole.parameters()) for whole in (owner, model))
    yield gradient_error(*(dict(zip(names, end, strict=True)) for end in ends))


def verdict(name: str, backend: Any) -> str:
    """Compares one type with eager; says what was found."""
    try:
        model = model_of(name)
        if model is None:
            return "is part of another"
        with torch.no_grad():
            model(**inputs_of(model, LENGTHS[0]))
    except Exception as error:
        return f"not compared: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    start, owner = copy.deepcopy(model), copy.deepcopy(model)
    compiled = lazyinline.compile(owner, backend=backend)
    try:
        apart = list(errors(model, compiled, owner))
    except Exception as error:  # a defect of ours: shown, and the other types go on
        return f"**raises** {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    report: Any = compiled.last_report
    said = f"equal ({max(apart):.0e})"
    if max(apart) > TOLERANCE:
        rounding = list(errors(copy.deepcopy(start).double(), start, start))
        limits = [max(TOLERANCE, 2 * one) for one in rounding]
        is_rounding = all(one <= most for one, most in zip(apart, limits, strict=True))
        said = "equal but for rounding" if is_rounding else "**differs**"
        said += f" ({max(apart):.0e}, eager from float64 {max(rounding):.0e})"
    if not report.ran_eagerly:
        return f"{said}, compiled whole, {report.num_block_calls} block calls"
    return f"{said}, {len(compiled_parts(report))} modules compiled: {report.ran_eagerly[:160]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="types of models, as transformers names them")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("FIRST", "STEP"))
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = options.only or list(CONFIG_MAPPING)[options.part[0] :: options.part[1]]
    for name in names:
        print(f"{name:32s} {verdict(name, options.backend)}", flush=True)


if __name__ == "__main__":
    main()
