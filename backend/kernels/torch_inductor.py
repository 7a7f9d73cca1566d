"""Adapter: TorchInductor as a kernel maker for one ATen graph. Its private names live here.

Compiling a leaf has two steps: Python generates the kernels' source, and a C++ compiler builds it.
Inductor builds a shared object per CPU kernel, with a Python binding in each. Within
:func:`deferred_builds` kernels are collected instead: the source of the next leaf is generated
while earlier ones are built, many at a time (:mod:`.bundles`), with Inductor's own flags and
headers, so that results have the same bits. A kernel whose source is not a single plain function is
built by Inductor as usual. Either way its source is made safe first (:func:`.bundles.guarded`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch.fx.node import map_arg

from ...autodiff.traces.torch_partition import copy_graph
from ...reuse.errors import LazyInlineError, PlanError
from ...reuse.ir.program import input_nodes
from ...reuse.ir.torch_symbols import (
    SIZE_TYPES,
    has_sizes,
    sizes_as_literals,
    symbols_of,
    with_size_inputs,
)
from ...reuse.ir.types import TensorType, dense_order, strides_that_matter
from ..files.torch_store import DamagedObjectError, open_store, own_folder, sound_code, sound_object
from ..gpu.torch_gpu import kernels_as_text
from ..launches.torch_facts import cpu_kind, for_this_cpu
from ..launches.torch_native import check_cpp_compiler, native_library
from .bundles import HEADER, BuiltKernels, Bundles, Promise, guarded, kept, kernel_source
from .torch_corrections import (
    casts_rounded,
    drawn_in_order,
    kernels_for_any_size,
    offsets_added_once,
    pads_realized,
    quicker_writing,
    quotients_checked,
    quotients_of_sizes_named,
    settings,
    sums_scaled,
    sums_tiled_beside,
    values_kept_apart,
)

aten = torch.ops.aten

BoxedCallable = Callable[[list[Any]], Sequence[Any]]


def graph_cache_off() -> Any:
    """Returns a context manager in which Inductor does not use its cache of compiled graphs."""
    import torch._inductor.config as config

    # Built C++ objects are still reused: benchmarks measure the time of Python.
    return config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)


def rewrite_joint(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Runs Inductor's passes over a joint forward and backward graph."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    is_sized = has_sizes(module)
    if is_sized:
        module = with_size_inputs(module, symbols_of(module), "last")
    first = input_nodes(module)[0].meta["val"]
    # A pass may add nodes: within a tracing context they get values of the graph's fake mode, which
    # a cut that saves such a value needs.
    device, context = first.device, TracingContext(first.fake_mode)
    if device.type == "cpu":
        check_cpp_compiler()
    layouts = Layouts(module.graph)
    with settings(), vector_units_probed_here(), tracing(context):
        module = _recursive_joint_graph_passes(module, input_device=device)
    layouts.restore(module.graph)
    module.recompile()
    if is_sized:
        sizes_as_literals(module.graph)
        module.recompile()
    return module


class Layouts:
    """Records the layouts of a graph's values, to restore them after Inductor's passes.

    The passes replace ``x * 1``, ``x + 0`` and the like by ``x`` if shape and dtype agree, even if
    the strides differ. But readers were traced with the earlier strides, on which the types of the
    graph's results and the meaning of ``as_strided`` depend.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._values = {node: node.meta.get("val") for node in graph.nodes}
        self._read = {node: [_type(x) for x in _operands(node)] for node in graph.nodes}

    def restore(self, graph: torch.fx.Graph) -> None:
        """Copies operands whose layouts have changed into the layouts that nodes read before."""
        for node in graph.nodes:  # a pass also moves the value of a removed node to its operand
            if node in self._values and "val" in node.meta:
                node.meta["val"] = self._values[node]
        copies: dict[tuple[torch.fx.Node, TensorType], torch.fx.Node] = {}
        for node in list(graph.nodes):
            for operand, wanted in self._moved(node):
                if (operand, wanted) not in copies:
                    with graph.inserting_before(node):
                        copies[operand, wanted] = _copy(graph, operand, wanted)
                node.replace_input_with(operand, copies[operand, wanted])

    def _moved(self, node: torch.fx.Node) -> list[tuple[torch.fx.Node, TensorType]]:
        """Returns the operands whose layouts have changed, each with the type before."""
        operands, types = _operands(node), self._read.get(node, [])
        if len(operands) != len(types):
            return []  # a pass gave it other operands
        pairs = zip(operands, types, strict=True)
        return [(x, wanted) for x, wanted in pairs if wanted and _differs_in_strides(x, wanted)]


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    operands: list[torch.fx.Node] = []
    map_arg((node.args, node.kwargs), operands.append)
    return operands


def _type(operand: torch.fx.Node) -> TensorType | None:
    value = operand.meta.get("val")
    return TensorType.of(value) if isinstance(value, torch.Tensor) else None


def _differs_in_strides(operand: torch.fx.Node, wanted: TensorType) -> bool:
    found = _type(operand)
    if found is None or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return False
    strides = [strides_that_matter(t.shape, t.stride) for t in (found, wanted)]
    return wanted.is_dense and strides[0] != strides[1]


def _copy(graph: torch.fx.Graph, operand: torch.fx.Node, wanted: TensorType) -> torch.fx.Node:
    """Adds a copy of an operand in a dense layout, by permute, clone and permute."""
    order = dense_order(wanted.shape, wanted.stride)
    assert order is not None, wanted
    back = sorted(range(len(order)), key=order.__getitem__)
    made = operand
    contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), contiguous),
        (aten.permute.default, (back,), {}),
    ]
    for target, args, kwargs in steps:
        given = made.meta["val"]
        made = graph.call_function(target, (made, *args), kwargs)
        made.meta.update(operand.meta)
        made.meta["val"] = target(given, *args, **kwargs)
    return made


@dataclass(frozen=True)
class NotCompiled:
    """A graph that Inductor could not compile; ``reason`` says why."""

    reason: str


def compile_leaves(
    modules: Sequence[torch.fx.GraphModule], on_compiled: Callable[[], None]
) -> list[BoxedCallable | NotCompiled]:
    """Compiles ATen graphs; each result takes a list of tensors, which it empties.

    If sizes are symbolic, the list begins with the value of each symbol. The nodes of a graph carry
    fake tensors of one mode.
    """
    if not modules:  # all from the cache: Inductor is not imported
        return []
    given = [n.meta["val"] for module in modules for n in input_nodes(module)]
    if any(x.device.type == "cpu" for x in given if isinstance(x, torch.Tensor)):
        check_cpp_compiler()
    compiled: list[BoxedCallable | NotCompiled] = []
    asked: list[int] = []
    # All are copied before the first is compiled, for which Inductor may make numbers of symbols.
    copies = [_changeable(module) for module in modules]
    probes = vector_units_probed_here()
    with settings(), probes, _corrections(), deferred_builds() as builds:
        for module in copies:
            compiled.append(_compiled_or_why_not(module))
            asked += [len(compiled) - 1] * (len(builds) - len(asked))
            on_compiled()
        for place, wait in zip(asked, builds, strict=True):
            try:
                wait()
            except Exception as error:  # the compiler's, the loader's, a full disk's
                compiled[place] = _why_not(error)
    return compiled


def _changeable(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns a copy for Inductor, whose passes change graphs; symbolic sizes are inputs first."""
    copied = with_size_inputs(module, symbols_of(module), "first")
    return sums_scaled(values_kept_apart(pads_realized(copied)))


def _compiled_or_why_not(module: torch.fx.GraphModule) -> BoxedCallable | NotCompiled:
    """Compiles a graph; returns any error as a reason, since PyTorch can run the graph."""
    try:
        return _compile(module)
    except LazyInlineError:
        raise
    except Exception as error:
        return _why_not(error)


def _why_not(error: Exception) -> NotCompiled:
    from torch._inductor.exc import InductorError

    kind = "" if isinstance(error, InductorError) else f"{type(error).__name__}: "
    return NotCompiled(f"{kind}{error}".strip())


@contextmanager
def _corrections() -> Iterator[None]:
    """Applies the corrections for generating C++ kernels."""
    with (
        quicker_writing(),
        offsets_added_once(),
        sums_tiled_beside(),
        casts_rounded(),
        drawn_in_order(),
        quotients_checked(),
        quotients_of_sizes_named(),
    ):
        yield


_MEASURED = ("max_autotune", "max_autotune_gemm", "benchmark_fusion", "triton.multi_kernel")


def write_gpu_leaves(
    modules: Sequence[torch.fx.GraphModule], on_written: Callable[[], None]
) -> list[BoxedCallable | NotCompiled]:
    """Generates wrappers of ATen graphs on a GPU, with kernels as text.

    Within :func:`..gpu.torch_gpu.gpu_described` that GPU need not be here.
    """
    import torch._inductor.config as config

    measuring = [name for name in _MEASURED if config.get_config_copy().get(name)]
    if measuring:
        raise PlanError(
            f"Inductor's {', '.join(measuring)} would measure kernels on a GPU as they are "
            "written, and they are no more than text then. Switch that off for lazyinline."
        )
    written: list[BoxedCallable | NotCompiled] = []
    # In one thread of this process, where the patches are; tuning would need the device. A result
    # that reuses a buffer which a launch allocated would need a copy.
    off = dict.fromkeys(("triton.autotune_at_compile_time", "allow_buffer_reuse"), False)
    plain = config.patch({"compile_threads": 1, **off})
    with settings(), plain, kernels_as_text(), drawn_in_order(), quicker_writing():
        for module in [_changeable(module) for module in modules]:
            written.append(_compiled_or_why_not(module))
            on_written()
    return written


def with_unaligned_inputs(
    module: torch.fx.GraphModule, positions: Collection[int]
) -> torch.fx.GraphModule:
    """Returns a graph whose kernels accept some inputs unaligned."""
    copied = copy_graph(module)
    for position in positions:
        # Inductor reads the alignment from the offset of an input's fake tensor: if that is no
        # multiple of 16 bytes, the kernel does not load several elements at once.
        input_nodes(copied)[position].meta["unaligned"] = True
    return copied


def _example(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    if not node.meta.get("unaligned"):
        return value
    with value.fake_mode:
        size = value.untyped_storage().nbytes() // value.element_size()
        whole = torch.empty(size + 1, dtype=value.dtype, device=value.device)
        return whole.as_strided(value.shape, value.stride(), 1)


def _compile(module: torch.fx.GraphModule) -> BoxedCallable:
    from torch._inductor.compile_fx import compile_fx_inner

    output = module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    # Inductor must keep the layouts of all results, saved tensors too: they are in their types.
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    for node in input_nodes(module):
        node.meta["val"] = _example(node)
    inputs = [n.meta["val"] for n in input_nodes(module)]
    is_sized = any(isinstance(x, SIZE_TYPES) for x in inputs)
    with kernels_for_any_size() if is_sized else nullcontext():
        artifact = compile_fx_inner(module, inputs)
    function = getattr(artifact, "current_callable", None)
    return function if function is not None else artifact


# ---- builds of C++ -------------------------------------------------------------------------------


_STORE = "lazyinline"  # in Inductor's folder: clearing our cache of results keeps built kernels
_FORMAT = 1


@contextmanager
def deferred_builds() -> Iterator[list[Callable[[], None]]]:
    """Postpones waiting for the C++ compiler.

    Yields a list of functions, each of which waits for the kernels of one wrapper and raises what
    failed.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import parallel_num_threads

    own_folder()
    num_threads = parallel_num_threads()
    wait, build_one = AsyncCompile.wait, AsyncCompile.cpp_pybinding
    bundles = _bundles()

    def collect(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        source_code = guarded(source_code, num_threads)
        source = kernel_source(argtypes, source_code)
        if source is None:
            return build_one(self, argtypes, for_this_cpu(source_code))
        bundles.beside(native_library)
        return bundles.ask(source)

    def postpone(self: AsyncCompile, scope: dict[str, Any]) -> None:
        builds.append(functools.partial(finish, self, scope))
        bundles.start()

    def finish(waiting: AsyncCompile, scope: dict[str, Any]) -> None:
        bundles.finish()
        promised = {n: value for n, value in scope.items() if isinstance(value, Promise)}
        scope.update({name: kept(value) for name, value in promised.items()})
        wait(waiting, scope)

    builds: list[Callable[[], None]] = []
    collecting = mock.patch.object(AsyncCompile, "cpp_pybinding", collect)
    with mock.patch.object(AsyncCompile, "wait", postpone), collecting:
        try:
            yield builds
        finally:
            bundles.close()


def _bundles() -> Bundles:
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return Bundles(
        lambda: BuiltKernels(open_store(own_folder() / _STORE), build_setting()),
        build_file,
        lambda types, source: CppPythonBindingsCodeCache.load_pybinding(
            list(types), for_this_cpu(source)
        ),
        max(1, get_compile_threads()),
    )


def build_file(text: str) -> Path:
    """Builds a C++ file as Inductor builds a kernel; returns the object, or raises its error."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return Path(sound_code(CppPythonBindingsCodeCache, ctypes.PyDLL).load(text)._name)


def build_setting() -> str:
    """Returns all facts besides the source that decide how a kernel is built."""
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import (
        CppBuilder,
        CppTorchDeviceOptions,
        get_compiler_version_info,
        get_cpp_compiler,
    )
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(),
        device_type="cpu",
        use_relative_path=config.is_fbcode(),
        **CppPythonBindingsCodeCache.cpp_compile_command_flags,
    )
    command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    compiler = get_compiler_version_info(get_cpp_compiler())
    versions = f"{torch.__version__} {torch.version.git_version}"
    return "\n".join([str(_FORMAT), versions, cpu_kind(), compiler, command])


@contextmanager
def vector_units_probed_here() -> Iterator[None]:
    """Probes vector instruction sets in this process, and no more of them than needed."""
    from torch._inductor import config, cpu_vec_isa

    # With an empty cache half of the first compile's time went to these probes: Inductor builds an
    # object per instruction set of the CPU, starts a Python process for each to see whether it
    # loads, and takes the best. Here they are tried from the best on until one works, in this
    # process, which loads the kernels a moment later. A damaged object (its writer was killed) is
    # built again.
    own_folder()
    with ExitStack() as stack:
        if hasattr(cpu_vec_isa.VecISA, "_probe_load"):
            built = _built_as_kernels(cpu_vec_isa.VecISA.check_build)
            stack.enter_context(mock.patch.object(cpu_vec_isa.VecISA, "_probe_load", _loads_here))
            stack.enter_context(mock.patch.object(cpu_vec_isa.VecISA, "check_build", built))
        if takes_the_first(config.cpp.simdlen):
            best = mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", best_vector_units)
            stack.enter_context(best)
        yield


def takes_the_first(vector_bits: int | None) -> bool:
    """Whether Inductor takes the first working instruction set of its list: its default."""
    unasked = vector_bits is None and not os.environ.get("ATEN_CPU_CAPABILITY")
    return unasked and sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def best_vector_units() -> list[Any]:
    """Returns the first of Inductor's working instruction sets, without probing the others."""
    from torch._inductor import cpu_vec_isa

    has = cpu_vec_isa.x86_isa_checker()
    known = (s for s in cpu_vec_isa.supported_vec_isa_list if set(str(s).split()) <= set(has))
    return list(itertools.islice(filter(bool, known), 1))


def _loads_here(isa: Any, path: str) -> bool:
    """Whether an object loads into this process; one that is damaged is deleted, and raises."""
    path = str(sound_object(Path(path)))
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True


def _built_as_kernels(check_build: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    from torch._inductor import config

    built = set[tuple[type, str]]()

    def check(isa: Any, code: str) -> bool:
        if (type(isa), code) in built:
            return True
        for _ in range(2):
            with contextlib.suppress(DamagedObjectError):
                # A probe is cheaper with the kernels' header, which is precompiled. For code
                # without vectors Inductor builds a file that fits any instruction set.
                is_short = config.cpp_cache_precompile_headers and "at::vec::" in code
                # In namespaces, since they may define names that the kernels' header defines.
                apart = [f"namespace asked {{\n{one}\n}}" for one in _asked_next(isa)]
                if is_short and _builds(isa, "\n".join([code, *apart])):
                    built.update((type(isa), one) for one in _asked_next(isa))
                    return True
                return (is_short and _builds(isa, code)) or check_build(isa, code)
        return False

    return check


def _asked_next(isa: Any) -> list[str]:
    """Returns the further probes of a working instruction set, to build all in one file."""
    asked = {
        "_avx512_bf16_code": torch.cpu._is_avx512_bf16_supported,
        "_avx512_vnni_code": torch.cpu._is_vnni_supported,
        "_amx_code": lambda: True,
    }
    return [getattr(isa, name) for name, asks in asked.items() if hasattr(isa, name) and asks()]


def _further_instructions(isa: Any) -> ExitStack:
    """Returns a context in which an instruction set has the flags that Inductor adds later."""
    # Inductor probes for these only once the set itself works. With other flags than the kernels',
    # a probe needs a precompiled header of its own, which takes as long as twenty kernels.
    has = {
        "_is_avx512_bf16_supported": torch.cpu._is_avx512_bf16_supported,
        "_is_amx_fp16_supported": torch.cpu._is_amx_fp16_supported,
    }
    stack = ExitStack()
    for name, is_supported in has.items():
        if hasattr(isa, name):
            stack.enter_context(mock.patch.object(isa, name, is_supported()))
    return stack


def _builds(isa: Any, code: str) -> bool:
    """Whether a kernel for an instruction set can be built, and loads here; see _loads_here."""
    from torch._inductor import codecache

    picked = mock.patch.object(codecache, "pick_vec_isa", lambda: isa)
    with picked, _further_instructions(isa):
        try:
            build_file(f"{HEADER}\n{for_this_cpu(code)}")
        except DamagedObjectError:
            raise
        except Exception:  # the compiler's or the loader's: this set does not work
            return False
    return True
