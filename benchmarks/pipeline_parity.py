"""Pipelines against the single-process model: losses, every gradient, three optimizer steps.

    python benchmarks/pipeline_parity.py [--ranks 1 2 4] [--models own llama gpt2 t5]
        [--schedules 1F1B ...] [--backend eager]

Each row is one schedule on real gloo processes, started by torchrun; the process exits with 1 if a
loss is off by more than 1e-6, a gradient by more than 1e-5 (norm-wise, relative), or a backward
runs more or less often than once per micro-batch.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from decoders import Decoder, DecoderBlock, DecoderConfig
from torch import Tensor, nn

import lazyinline
from lazyinline import lazy_inline
from lazyinline.pipeline_parallel.actions import SCHEDULES

MICRO_BATCHES = 8
BATCH = 16
VOCABULARY = 61
LAYERS = 8
SINGLE = ("GPipe", "1F1B")


def _ids(seed: int, length: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (BATCH, length), generator=generator)


def own() -> tuple[nn.Module, dict[str, Any]]:
    lazy_inline(DecoderBlock)
    config = DecoderConfig(LAYERS, hidden=32, num_heads=2, vocab=VOCABULARY, seq=8, batch=BATCH)
    return Decoder(config), {"ids_BT": _ids(0), "targets_BT": _ids(1)}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    lazy_inline(LlamaDecoderLayer)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = _ids(0)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """The embedding is tied to the head, which is on another rank."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    lazy_inline(GPT2Block)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = _ids(0)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """The encoder's output goes to every decoder layer; three embeddings are one."""
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.t5.modeling_t5 import T5Block

    lazy_inline(T5Block)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=LAYERS // 2,
        num_decoder_layers=LAYERS // 2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _ids(0), "labels": _ids(1, 6)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "own": own,
    "llama": llama,
    "gpt2": gpt2,
    "t5": t5,
}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns ||actual - expected|| / ||expected||."""
    size = float(expected.norm())
    return float((actual - expected).norm()) / size if size else float(actual.norm())


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The eager model's mean loss over micro-batches."""
    parts = {name: t.chunk(MICRO_BATCHES) for name, t in batch.items()}
    outputs = [model(**{n: p[i] for n, p in parts.items()}) for i in range(MICRO_BATCHES)]
    return torch.stack([getattr(o, "loss", o) for o in outputs]).mean()


def compare(name: str, schedule: str, backend: str, split: str = "auto") -> dict[str, Any]:
    """Trains three steps both ways on this rank; returns the largest errors of all ranks."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    reference = copy.deepcopy(model)
    ranks = dist.get_world_size()
    pipe = lazyinline.pipeline(
        model,
        (),
        batch,
        num_stages=ranks if schedule in SINGLE else 2 * ranks,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        split=split,
        backend=backend,
    )
    parameters = dict(pipe.named_parameters())
    expected = dict(reference.named_parameters())
    ours = torch.optim.AdamW(parameters.values(), lr=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    loss_error = gradient_error = 0.0
    for _ in range(3):
        theirs.zero_grad()
        loss = losses_of(reference, batch)
        loss.backward()
        found = pipe.step(**batch)
        if found is not None:
            loss_error = max(loss_error, abs(found.item() - loss.item()) / abs(loss.item()))
        for key, parameter in parameters.items():
            want = expected[key].grad
            assert (parameter.grad is None) == (want is None), key
            if want is not None and parameter.grad is not None:
                gradient_error = max(gradient_error, relative_error(parameter.grad, want))
        ours.step()
        theirs.step()
    counts = [Counter({kind: n for kind, (n, _) in c.items()}) for c in pipe.counts.values()]
    runs = [c["B"] + c["I"] for c in counts] + [c["B"] + c["W"] for c in counts]
    everyone: list[Any] = [None] * ranks
    own = (loss_error, gradient_error, sorted(parameters), runs)
    dist.all_gather_object(everyone, own)
    covered = {key for _, _, keys, _ in everyone for key in keys}
    return {
        "model": name,
        "schedule": schedule,
        "ranks": ranks,
        "loss_error": max(e[0] for e in everyone),
        "gradient_error": max(e[1] for e in everyone),
        "parameters": len(covered),
        "missing": sorted(set(expected) - covered),
        "runs_per_step": sorted({n / 3 for e in everyone for n in e[3]}),
    }


def is_right(row: dict[str, Any]) -> bool:
    """Whether a row keeps the promises."""
    close = row["loss_error"] <= 1e-6 and row["gradient_error"] <= 1e-5
    return close and not row["missing"] and row["runs_per_step"] == [MICRO_BATCHES]


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in options.models:
        for schedule in options.schedules:
            row = compare(name, schedule, options.backend)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def launch(ranks: int, arguments: list[str]) -> list[dict[str, Any]]:
    """Runs this file on so many processes; returns its rows."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(pathlib.Path(__file__)), "--worker", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    wrong = 0
    print(f"{'model':8}{'schedule':24}{'ranks':>6}{'loss error':>14}{'gradient error':>16}")
    for ranks in options.ranks:
        arguments = ["--models", *options.models, "--schedules", *options.schedules]
        for row in launch(ranks, [*arguments, "--backend", options.backend]):
            note = "" if is_right(row) else f"  WRONG {row['missing']} {row['runs_per_step']}"
            wrong += bool(note)
            print(
                f"{row['model']:8}{row['schedule']:24}{row['ranks']:>6}{row['loss_error']:>14.1e}"
                f"{row['gradient_error']:>16.1e}{note}",
                flush=True,
            )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
