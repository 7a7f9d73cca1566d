"""Tokens of ``generate`` from eager, ``torch.compile`` and lazyinline, in one process in turns.

    python benchmarks/generate.py [--tokens 128] [--rounds 5] [--cache dynamic] [--no-torch]

A small GPT-2 (4 layers, hidden 256). The first row of each is the first call, compiles and links
included; then come further calls of the same lengths, one of each in turn. CPU seconds, the C++
compiler's among them, so that a busy machine tells little; on an idle one they are the wall's. The
tokens are compared. lazyinline comes first, so Dynamo and Inductor are imported on its account.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measurement import Stopwatch
from transformers import GPT2Config, GPT2LMHeadModel

import lazyinline

# Read when Inductor is imported. What its worker processes take would be counted at their end only.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def model() -> GPT2LMHeadModel:
    """Returns the subject."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_embd=256,
        n_head=4,
        vocab_size=1000,
        n_positions=512,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU seconds of a call, and its result."""
    watch = Stopwatch()
    with watch.running():
        result = run()
    return watch.cpu_s, result


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    eager = model()
    ours = lazyinline.compile(copy.deepcopy(eager), reuse="auto")
    subjects: dict[str, Any] = {"eager": eager, "lazyinline": ours}
    if not options.no_torch:
        compiled = copy.deepcopy(eager)
        compiled.compile()
        subjects["torch.compile"] = compiled
    ids = torch.randint(1, 1000, (1, 16), generator=torch.Generator().manual_seed(0))
    more = {} if options.cache == "dynamic" else {"cache_implementation": "static"}

    def generated(subject: Any) -> torch.Tensor:
        result: torch.Tensor = subject.generate(
            ids, max_new_tokens=options.tokens, do_sample=False, **more
        )
        return result

    first, wanted = {}, generated(eager)
    for name, subject in subjects.items():
        first[name], tokens = seconds(lambda subject=subject: generated(subject))
        assert torch.equal(tokens, wanted), f"{name} gives other tokens"
        print(f"{name}: first call {first[name]:.2f} CPU s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(options.rounds):
        for name, subject in subjects.items():
            took, tokens = seconds(lambda subject=subject: generated(subject))
            assert torch.equal(tokens, wanted), f"{name} gives other tokens"
            times[name].append(took)
    report = ours.last_report
    print(f"{options.tokens} tokens, {options.cache} cache, PyTorch {torch.__version__}, 1 thread")
    print(f"lazyinline: {report.num_compiles} compiles, {report.num_links} links")
    for name, found in times.items():
        middle, best = statistics.median(found), min(found)
        print(
            f"  {name:14} first {first[name]:7.2f}   median {1e3 * middle / options.tokens:6.2f} "
            f"ms/token   best {1e3 * best / options.tokens:6.2f}"
        )


if __name__ == "__main__":
    main()
