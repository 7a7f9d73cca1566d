"""Training steps with all C++ of ours and of Inductor under AddressSanitizer; fails on a report.

The native loop and the generated kernels are built by the C++ compiler with ``-fsanitize=address``,
in an empty folder, and run in a process in which AddressSanitizer stands before malloc. What is
written or read outside an arena, a parameter, a stack or a table of addresses is a report, which
ends the process. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping

# Python does not free all it allocates, and torch frees by one pair of functions what it got by
# another; neither is ours.
_OPTIONS = "detect_leaks=0:alloc_dealloc_mismatch=0:new_delete_type_mismatch=0:halt_on_error=1"
_MARK = b"__asan_init"
_REPORT = "ERROR: AddressSanitizer"
_WRAPPER = """#!/bin/sh
exec {compiler} "$@" -fsanitize=address -fno-omit-frame-pointer -g1
"""
_BEYOND_END = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* out_ptr0, int64_t n)
{
    for (int64_t i = 0; i <= n; ++i) out_ptr0[i] = 1;
}
"""


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inside", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="run a kernel that writes one element too many, and expect a report",
    )
    options = parser.parse_args()
    if options.inside:
        RUNS[options.inside]()
        return
    with tempfile.TemporaryDirectory() as folder:
        done = run_inside("overflow" if options.self_test else "steps", pathlib.Path(folder))
    reported = _REPORT in done.stdout
    print(done.stdout[-6000:])
    if options.self_test:
        ok = reported and done.returncode != 0
        print("a report, as expected" if ok else "NO REPORT: the check cannot fail")
    else:
        ok = done.returncode == 0 and not reported
        print("clean" if ok else f"FAILED with {done.returncode}")
    sys.exit(not ok)


def run_inside(run: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs one of ``RUNS`` in a process with AddressSanitizer."""
    command = [sys.executable, __file__, "--inside", run]
    return subprocess.run(
        command,
        env={**os.environ, **environment(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def environment(folder: pathlib.Path) -> Mapping[str, str]:
    """Makes a compiler that instruments what it builds; returns the variables that choose it."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        sys.exit("there is no C++ compiler (g++, or what CXX names)")
    wrapper = folder / "g++"
    wrapper.write_text(_WRAPPER.format(compiler=compiler))
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    asked = [compiler, "-print-file-name=libasan.so"]
    library = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not pathlib.Path(library).is_absolute():
        sys.exit(f"{compiler} has no libasan.so")
    return {
        "CXX": str(wrapper),
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": _OPTIONS,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "LAZYINLINE_CACHE": "0",
        "PYTHONMALLOC": "malloc",
    }


def steps() -> None:
    """Trains a small decoder in each way that has arenas of its own, and compares with eager."""
    import copy

    import torch
    from decoders import llama

    import lazyinline

    model, args = llama(2, hidden=64, num_heads=2, vocab=67, seq=32, batch=4)
    expected = copy.deepcopy(model)
    expected(*args).backward()
    ways: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
        "compile_step": lambda: lazyinline.compile_step(model),
        "compile_step, 2 micro-batches": lambda: lazyinline.compile_step(model, micro_batches=2),
        "compile": lambda: lazyinline.compile(model),
    }
    for name, make in ways.items():
        run = make()
        for _ in range(2):
            model.zero_grad()
            loss = run(*args)
            if loss.requires_grad:
                loss.backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
        print(f"{name}: loss {loss.item():.5f}, gradients as eager's", flush=True)
    _check_instrumented()


def overflow() -> None:
    """Writes behind a tensor."""
    import torch

    from lazyinline.backend.kernels.bundles import bundle_text, kernel_source
    from lazyinline.backend.kernels.torch_inductor import build_file
    from lazyinline.backend.launches.torch_native import loaded_kernel

    source = kernel_source(["float*", "int64_t"], _BEYOND_END)
    assert source is not None
    path = build_file(bundle_text([source], "overflow"))
    _check_instrumented()
    kernel = loaded_kernel(path, source.symbol, source.argument_types)
    tensor = torch.zeros(1000)
    kernel(tensor, tensor.numel())
    print("one element too many was written, and nobody noticed")


def _check_instrumented() -> None:
    """Every object that this process built speaks of AddressSanitizer."""
    folder = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    objects = list(folder.rglob("*.so"))
    silent = [path.name for path in objects if _MARK not in path.read_bytes()]
    if not objects or silent:
        sys.exit(f"built without AddressSanitizer: {silent or 'everything'}")
    print(f"{len(objects)} shared objects, all instrumented", flush=True)


RUNS: dict[str, Callable[[], None]] = {"steps": steps, "overflow": overflow}

if __name__ == "__main__":
    main()
