"""Pipelines as files: each rank loads its part, and steps go on with the same bits."""

import json
import pathlib
import sys
import zipfile
from typing import Any
from unittest.mock import Mock

import pytest
import test_pipeline
import torch
from ranks import run_ranks, two_replicas
from test_pipeline import make, net_and_batch, train
from torch import Tensor

import lazyinline
from lazyinline import FileError, PipelineError
from lazyinline.frontend.passes.context import Context

HERE = "test_saved_ranks"


alone = test_pipeline.alone  # the fixture: one process that holds every stage


def trained_on(step: Any, args: Any, kwargs: Any = None, optimizer: Any = None) -> list[Any]:
    """Three further steps: losses, and this rank's parts of parameters, gradients and moments."""
    named = dict(getattr(step, "model", step).named_parameters())  # a pipeline has its stages'
    own = getattr(step, "optimizer", None)
    after = own or optimizer or torch.optim.AdamW(named.values(), lr=1e-2)
    torch.manual_seed(2)
    found: list[Any] = []
    for _ in range(3):
        found.append({"loss": step.step(*args, **kwargs or {})})
        if own is None:
            after.step()
        for name, parameter in named.items():
            parts = {"": parameter, ", its gradient": parameter.grad}
            parts |= {f", its {k}": t for k, t in after.state[parameter].items() if t.dim()}
            held = {k: t.detach() for k, t in parts.items() if t is not None}
            found[-1] |= {
                name + k: getattr(t, "to_local", t.clone)().clone() for k, t in held.items()
            }
    return found


def different(found: list[Any], expected: list[Any]) -> list[str]:
    """Names what two runs have of other bits."""
    return [
        f"step {number}: {name}"
        for number, (one, other) in enumerate(zip(found, expected, strict=True))
        for name in one.keys() | other.keys()
        if not same(one.get(name), other.get(name))
    ]


def same(one: Any, other: Any) -> bool:
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return torch.equal(one, other) if both else one is other


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"])
@pytest.mark.sweep(keep="ZBV")
def test_a_loaded_pipeline_goes_on_with_the_same_bits(
    alone: None, schedule: str, tmp_path: pathlib.Path
) -> None:
    model, args = net_and_batch(layers=2)
    pipe = make(model, args, schedule)
    assert not train(pipe, model, args, steps=1)
    path, again = tmp_path / "pipe.lz", tmp_path / "again.lz"
    lazyinline.save(pipe, path)
    loaded: Any = lazyinline.load(path)
    lazyinline.save(loaded, again)
    assert again.read_bytes() == path.read_bytes()
    names = [name for name, _ in pipe.named_parameters()]
    assert [name for name, _ in loaded.named_parameters()] == names
    assert loaded.state_dict().keys() == pipe.state_dict().keys()
    expected = trained_on(pipe, args)
    assert len(expected[0]) > 20
    assert not different(trained_on(loaded, args), expected)
    assert str(loaded.plan).splitlines()[2:] == str(pipe.plan).splitlines()[2:]


def test_weights_come_from_a_state_dict_and_what_cannot_be_saved_is_said(
    alone: None, tmp_path: pathlib.Path
) -> None:
    model, args = net_and_batch(layers=2)
    elsewhere: Any = make(model, args, "Interleaved1F1B", mesh={"pipeline": 1})
    with pytest.raises(PipelineError, match=r"ranks that are not here: lazyinline\.save it"):
        elsewhere.step(*args)
    pipe = make(model, args, "Interleaved1F1B")
    with pytest.raises(FileError, match="beside"):
        lazyinline.save(pipe, tmp_path / "pipe.lz", weights="beside")
    assert not list(tmp_path.iterdir())
    lazyinline.save(pipe, tmp_path / "pipe.lz", weights="none")
    with pytest.raises(FileError, match="has no weights: give load a state_dict"):
        lazyinline.load(tmp_path / "pipe.lz")
    state = {name: tensor + 1 for name, tensor in pipe.state_dict().items()}
    loaded: Any = lazyinline.load(tmp_path / "pipe.lz", state_dict=state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    assert torch.equal(loaded.step(*args), pipe.step(*args))
    del state["blocks.1.up.weight"]
    with pytest.raises(FileError, match=r"its weights have no blocks\.1\.up\.weight"):
        lazyinline.load(tmp_path / "pipe.lz", state_dict=state)


# ---- between processes ---------------------------------------------------------------------------


def model_and_batch(name: str, layers: int = 2) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if name != "decoder":
        from hugging_face import example

        model, _ = example(name, layers=layers)
        ids = torch.randint(1, 67, (4, 8), generator=torch.Generator().manual_seed(1))
        kwargs = {"input_ids": ids, "labels": ids}
        return model, (), kwargs
    from decoders import Decoder, DecoderConfig

    torch.manual_seed(0)
    config = DecoderConfig(layers, hidden=32, vocab=50, seq=8, batch=4)
    ids = torch.randint(50, (4, 8))
    return Decoder(config), (ids, ids), {}


FOUR = {"num_stages": 4, "micro_batches": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder, clipped": (
        "decoder",
        {"backend": "eager", "optimizer": torch.optim.AdamW, "max_norm": 0.01},
    ),
    "gpt2": ("gpt2", {"backend": "eager"}),
    "llama in kernels": ("llama", {}),
    "decoder in four stages": ("decoder", {"schedule": "Interleaved1F1B", "num_stages": 4}),
    "decoder without bubbles": ("decoder", {"schedule": "ZBVZeroBubble", **FOUR}),
    "gpt2 with its optimizer": ("gpt2", {"optimizer": torch.optim.AdamW}),
    "decoder in replicas": ("decoder", {"backend": "eager"}),
}
"""A model, and how it is split; GPT-2 has one tensor on its first and its last stage."""


def save(rank: int, folder: pathlib.Path) -> list[str]:
    """Trains a step beside eager, saves, and notes what further steps give."""
    case = (folder / "case").read_text()
    mesh = two_replicas() if "replicas" in case else None
    pipe, (model, args, kwargs) = pipeline_of(case, mesh)
    expected = eager_loss(model, args, kwargs)
    lazyinline.save(pipe, folder / "fresh.lz")
    loss = pipe.step(*args, **kwargs)
    lazyinline.save(pipe, folder / "pipe.lz")
    torch.save(trained_on(pipe, args, kwargs), folder / f"further{rank}")
    torch.save((args, kwargs), folder / "batch")
    wrong = loss is not None and not torch.isclose(loss, expected)
    return [f"{loss} and not {expected}"] if wrong else []


def pipeline_of(case: str, mesh: Any) -> tuple[Any, Any]:
    name, options = CASES[case]
    options = {"num_stages": 2, "micro_batches": 2, "schedule": "1F1B", **options}
    model, args, kwargs = made = model_and_batch(name, options["num_stages"])
    optimizer = options.pop("optimizer", None)
    options["optimizer"] = optimizer and optimizer(model.parameters(), lr=1e-2)
    return lazyinline.pipeline(model, args, kwargs, mesh=mesh, **options), made


def eager_loss(model: Any, args: Any, kwargs: Any) -> Tensor:
    with torch.no_grad():
        found = model(*args, **kwargs)
    return getattr(found, "loss", found)


def go_on(rank: int, folder: pathlib.Path) -> list[str]:
    """Loads where no source of a model can be imported, and takes the same further steps."""
    sources = ("transformers", "decoders", "hugging_face")
    assert not sys.modules.keys() & set(sources)
    sys.modules.update(dict.fromkeys(sources))  # type: ignore[arg-type]
    wrong = where_one_cannot_open(rank, folder / "pipe.lz")
    pipe: Any = lazyinline.load(folder / "pipe.lz")
    args, kwargs = torch.load(folder / "batch")
    wrong += different(trained_on(pipe, args, kwargs), torch.load(folder / f"further{rank}"))
    report = pipe.last_report
    # An update has no kernel to be kept: it is one launch, made anew.
    if pipe.optimizer is None and report.backend == "inductor" and report.num_kernels:
        wrong.append(f"{report.num_kernels} kernels were made")
    return wrong


def where_one_cannot_open(rank: int, path: pathlib.Path) -> list[str]:
    """What is wrong with how ranks hear that one has no file, a damaged one, or no kernels.

    A rank that was left alone would wait in a collective until that fails, and say so.
    """
    wrong, texts, whole = [], unsigned(path), path.read_bytes()
    folder, own = path.parent / f"of{rank}", pathlib.Path("copy.lz")
    folder.mkdir(exist_ok=True)
    named = next(name for name in texts if name.endswith("captured.txt"))
    damaged = {
        "MemoryError: no room": whole,
        f"{named} is damaged": whole.replace(texts[named], texts[named][::-1]),
        "rank 1 says: copy.lz cannot be opened": whole[:-30],
        "rank 1 says: There is no file copy.lz": b"",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if rank == 1:  # nobody hears of what it alone looks for
            with pytest.raises(FileError, match="There is no file"):
                lazyinline.load("other.lz")
        for failing, said in ((0, "MemoryError: no room"), *((1, said) for said in damaged)):
            own.unlink(missing_ok=True)
            if content := damaged[said] if rank == failing else whole:
                own.write_bytes(content)
            with patch.context() as inside, pytest.raises(FileError) as error:
                if content is whole and rank == failing:
                    inside.setattr(Context, "lower", Mock(side_effect=MemoryError("no room")))
                lazyinline.load(own)
            expected = said.removeprefix("rank 1 says: ") if rank == failing else said
            if expected not in str(error.value):
                wrong.append(f"of {failing}: {error.value}")
    return wrong


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sweep(keep="[decoder, clipped]")
def test_each_process_loads_its_part_and_goes_on_with_the_same_bits(
    case: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "case").write_text(case)
    world = 4 if "replicas" in case else 2
    assert run_ranks(tmp_path, f"{HERE}.save", world) == [[]] * world
    (tmp_path / "store").unlink(missing_ok=True)  # before torch 2.14 it goes with its last user
    assert run_ranks(tmp_path, f"{HERE}.go_on", world) == [[]] * world
    # The same is compiled, and written, where none of the ranks is.
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(tmp_path / "cache"))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has: kernels are made for a number of threads
    try:
        elsewhere, _ = pipeline_of(case, {"pipeline": 2} | ({"data": 2} if world == 4 else {}))
        lazyinline.save(elsewhere, tmp_path / "elsewhere.lz")
    finally:
        torch.set_num_threads(num_threads)
    assert (tmp_path / "elsewhere.lz").read_bytes() == (tmp_path / "fresh.lz").read_bytes()


# ---- over a mesh ---------------------------------------------------------------------------------

MESHES = {
    "two": ({"tp": 2}, {"fsdp": 2}, {"fsdp": 1, "tp": 2}),
    "four": ({"fsdp": 2, "tp": 2}, {"fsdp": 4}, {"tp": 2, "fsdp": 2}),
}
"""Of a case, or as for it: its mesh, and two that a file for it is not for."""


def on_mesh(case: str, *, absent: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model over a mesh, its batch, and how it is compiled."""
    from parallel_models import MEGATRON, mesh_of, tiny, tokens

    made = dict if absent else mesh_of

    if case in STAGES:
        axes, plan, kind, more = STAGES[case]
        options = {"mesh": made(**axes), "plan": plan and MEGATRON, "micro_batches": 2}
        options["backend"] = "eager"
        return tiny(4, **kind).float(), tokens(rows=8), {"args": tokens(rows=8), **options, **more}
    mesh = made(**MESHES["two" if case == "two" else "four"][0])
    options: dict[str, Any] = {"mesh": mesh, "backend": "eager", "micro_batches": 2}
    if case in MESHES:
        batch, model = tokens(rows=8), tiny().float()
        return model, batch, {"args": batch, "plan": MEGATRON, **options}
    from parallel_models import LLAMA

    model, args, kwargs = model_and_batch("llama")
    options |= {"backend": "inductor", "micro_batches": 1, "plan": LLAMA}
    return model, (), {"args": args, "kwargs": kwargs, **options}


def optimizer_of(step: Any) -> torch.optim.Optimizer:
    own = getattr(step, "model", step)  # a pipeline has the parameters of its stages
    return torch.optim.AdamW([p for _, p in own.named_parameters()], lr=1e-2)


def save_over_mesh(rank: int, folder: pathlib.Path) -> list[str]:
    """Trains a step of each case beside eager, saves, and notes what further steps give."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    wrong = []
    for place in map(folder.joinpath, (folder / "cases").read_text().split()):
        model, args, options = on_mesh(place.name)
        kwargs = options.get("kwargs", {})
        expected = eager_loss(model, args, kwargs)
        step: Any = lazyinline.parallelize(model, **options)
        lazyinline.save(step, place / "fresh.lz")
        torch.manual_seed(1)
        loss, optimizer = step.step(*args, **kwargs), optimizer_of(step)
        if place.name not in STAGES:
            optimizer.step()
            state = lazyinline.for_checkpoint(get_optimizer_state_dict(model, optimizer))
            dcp.save({"optimizer": state}, checkpoint_id=place / "optimizer")
        lazyinline.save(step, place / "mesh.lz")
        found = trained_on(step, args, kwargs, optimizer)
        torch.save((found, args, kwargs), place / f"further{rank}")
        drawn = place.name in STAGES and "dropout" in STAGES[place.name][2]
        if not drawn and not torch.isclose(loss, expected, rtol=1e-3):
            wrong.append(f"{place.name}: {loss} and not {expected}")
    return wrong


def go_on_over_mesh(rank: int, folder: pathlib.Path) -> list[str]:
    """Loads where no source of a model can be imported, and takes the same further steps."""
    sources = ("transformers", "decoders", "hugging_face", "parallel_models")
    assert not sys.modules.keys() & set(sources)
    sys.modules.update(dict.fromkeys(sources))  # type: ignore[arg-type]
    places = map(folder.joinpath, (folder / "cases").read_text().split())
    return [f"{place.name}: {text}" for place in places for text in gone_on(rank, place)]


def gone_on(rank: int, place: pathlib.Path) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    torch.manual_seed(rank)  # what a file is opened with need not agree
    step: Any = lazyinline.load(place / "mesh.lz")
    lazyinline.save(step, place / "again.lz")
    again, first = (unsigned(place / name) for name in ("again.lz", "mesh.lz"))
    names = first.keys() | again.keys()
    wrong = where_one_cannot_open(rank, place / "mesh.lz")
    wrong += [f"saved again {n} is another" for n in names if first.get(n) != again.get(n)]
    optimizer, is_staged = optimizer_of(step), place.name in STAGES
    if not is_staged:
        state = get_optimizer_state_dict(step.model, optimizer)
        loaded = {"optimizer": lazyinline.for_checkpoint(state)}
        dcp.load(loaded, checkpoint_id=place / "optimizer")
        set_optimizer_state_dict(step.model, optimizer, state)
    expected, args, kwargs = torch.load(place / f"further{rank}")
    found = trained_on(step, args, kwargs, optimizer)
    wrong += different(found, expected)
    # Each parameter with its gradient and two moments.
    num_parameters = len(optimizer.param_groups[0]["params"])
    assert num_parameters and len(found[0]) == 1 + 4 * num_parameters
    if is_staged:
        assert "stage 1" in str(step.plan)
        return wrong
    assert len(found[0]) > 50 and step.plan.num_bytes
    report = step.last_report
    if report.backend == "inductor" and report.num_kernels:
        wrong.append(f"{report.num_kernels} kernels were made")
    return [*wrong, *refused_meshes(place)]


def unsigned(path: pathlib.Path) -> dict[str, Any]:
    """The parts of a file, without the signature of the machine."""
    with zipfile.ZipFile(path) as archive:
        parts: dict[str, Any] = {name: archive.read(name) for name in archive.namelist()}
    parts["manifest.json"] = list(json.loads(parts["manifest.json"])["parts"])
    return parts


def refused_meshes(folder: pathlib.Path) -> list[str]:
    """What is wrong with how this rank refuses meshes that the file is not for."""
    from torch.distributed.device_mesh import init_device_mesh

    wrong = []
    right, *others = MESHES["two" if folder.name == "two" else "four"]
    for axes in others:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        with pytest.raises(FileError) as error:
            lazyinline.load(folder / "mesh.lz", mesh=mesh)
        said = f"it is for a mesh of {' x '.join(f'{n} 2' for n in right)} on cpu, and mesh= is"
        wrong += [] if said in str(error.value) else [str(error.value)]
    return wrong


def written_without_ranks(case: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares what ranks saved with what one process compiles and writes for all of them."""
    monkeypatch.setenv("LAZYINLINE_CACHE_DIR", str(folder.parent / "cache"))
    model, _, options = on_mesh(case, absent=True)
    elsewhere: Any = lazyinline.parallelize(model, **options)
    lazyinline.save(elsewhere, folder / "elsewhere.lz")
    assert (folder / "elsewhere.lz").read_bytes() == (folder / "fresh.lz").read_bytes()


# ---- stages over a mesh --------------------------------------------------------------------------

HALVES: dict[str, Any] = {"schedule": "InterleavedZeroBubble", "num_stages": 4}
STAGES: dict[str, tuple[dict[str, int], Any, dict[str, Any], dict[str, Any]]] = {
    "tensor": ({"pipeline": 2, "tensor": 2}, "by hand", {}, {}),
    "tied": ({"tensor": 2, "pp": 2}, "by hand", {"tied": True}, {"recompute": "full"}),
    "gathered": ({"pp": 2, "fsdp": 2}, None, {"dropout": 0.3}, {"backend": "inductor"}),
    "rows": ({"data": 2, "pp": 2}, None, {"tied": True}, {"schedule": "GPipe"}),
    "halves": ({"pp": 2, "tp": 2}, "by hand", {}, HALVES),
    "kernels": ({"fsdp": 2, "pp": 2}, None, {}, {**HALVES, "backend": "inductor"}),
}
"""The mesh, how tensors lie, the model, and how it is compiled."""


# Cases, and whose cache loads them: of a file of another machine, operators are checked one by one.
OVER_MESH = {
    "two": "another",
    "four": "another",
    "tensor tied rows halves": "another",
    "llama gathered kernels": "cache",
}


@pytest.mark.parametrize("cases", OVER_MESH)
@pytest.mark.sweep(keep="two")
def test_each_rank_of_a_mesh_loads_its_part_and_goes_on_with_the_same_bits(
    cases: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cases").write_text(cases)
    for case in cases.split():
        (tmp_path / case).mkdir()
    world = 2 if cases == "two" else 4
    assert run_ranks(tmp_path, f"{HERE}.save_over_mesh", world) == [[]] * world
    (tmp_path / "store").unlink(missing_ok=True)  # before torch 2.14 it goes with its last user
    cache = tmp_path / OVER_MESH[cases]
    assert run_ranks(tmp_path, f"{HERE}.go_on_over_mesh", world, cache) == [[]] * world
    for case in cases.split():
        written_without_ranks(case, tmp_path / case, monkeypatch)


# ---- ranks of a mesh that are not there ----------------------------------------------------------


def test_what_ranks_have_alike_is_traced_for_two_and_linked_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from parallel_models import tiny, tokens

    from lazyinline.pipeline_parallel.mesh import sharded

    traced: list[str] = []
    own = sharded.local_graph

    def counted(leaf: Any, *args: Any) -> Any:
        traced.append(leaf.name)
        return own(leaf, *args)

    monkeypatch.setattr(sharded, "local_graph", counted)
    numbers = []
    for size in (1, 4):
        traced.clear()
        made: Any = lazyinline.parallelize(
            tiny(0).float(), tokens(rows=8), mesh={"dp": size}, backend="eager"
        )
        numbers.append(len(traced))
        assert len({id(one.lowered.programs) for one in made.kept}) == 1
        assert len(made.kept) == size
    assert numbers[1] == 2 * numbers[0]


def test_a_step_for_absent_ranks_leaves_the_model_and_says_what_it_is_for(
    tmp_path: pathlib.Path,
) -> None:
    from parallel_models import tiny, tokens

    model, args = tiny(0).float(), tokens(rows=8)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    made: Any = lazyinline.parallelize(model, args, mesh={"dp": 2}, backend="eager")
    after = dict(model.named_parameters())
    assert all(id(after[n]) == i and torch.equal(after[n], t) for n, (i, t) in before.items())
    with pytest.raises(lazyinline.PlanError, match=r"ranks that are not here: lazyinline\.save it"):
        made.step(*args)
    with pytest.raises(FileError, match='for a mesh use weights="inside"'):
        lazyinline.save(made, tmp_path / "mesh.lz", weights="none")
    lazyinline.save(made, tmp_path / "mesh.lz")
    with pytest.raises(FileError, match=r"0 rank.s. here: start 2"):
        lazyinline.load(tmp_path / "mesh.lz")
    for wrong in ({"dp": 0}, {}, {"rows": 2}, {"dp": 3}):
        with pytest.raises(lazyinline.PlanError):
            lazyinline.parallelize(model, args, mesh=wrong, backend="eager")
