"""Forged files of steps over a mesh: a sentence on each rank, and none waits for another.

Here this process is one rank of a group whose collectives move nothing.
"""

import pathlib
import re
from typing import Any

import pytest
import test_hostile_files
from parallel_models import mesh_of, tiny, tokens
from rank_threads import one_of_many
from ranks import run_ranks
from test_hostile_files import (
    json_changed,
    left_out,
    opened,
    parts_in,
    refused,
    size_changed,
    swapped,
    text_changed,
    written,
)

import lazyinline
from lazyinline.backend.files.container import write_parts
from lazyinline.frontend.saved.load import captured_programs
from lazyinline.frontend.saved.save import _parts_on_mesh

nothing_is_done, sound = test_hostile_files.nothing_is_done, test_hostile_files.sound


@pytest.fixture(scope="module")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a step over a mesh of two ranks."""
    path, found = tmp_path_factory.mktemp("meshed") / "mesh.lz", dict[str, Any]()
    for rank in range(2):
        with one_of_many(2, rank):
            options: Any = {"mesh": mesh_of(fsdp=2), "backend": "eager", "micro_batches": 2}
            step: Any = lazyinline.parallelize(tiny(1), tokens(), **options)
            found |= _parts_on_mesh(step, "inside")
    write_parts(path, found, None)
    return path.read_bytes()


def test_a_file_of_a_mesh_is_opened_by_as_many_ranks_as_it_has(
    meshed: bytes, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "mesh.lz"
    said = "is a step over a mesh ([['fsdp', 2]]), and torch.distributed has {} rank(s) here"
    assert said.format(0) in opened(meshed, path)

    for rank in range(3):
        with one_of_many(3, rank):
            assert said.format(3) in opened(meshed, path)
    with one_of_many(2):
        assert not opened(meshed, path)
        with pytest.raises(lazyinline.FileError, match="a state_dict has whole tensors"):
            lazyinline.load(path, state_dict={})
    with pytest.raises(lazyinline.FileError, match="its tensors are those of several ranks"):
        captured_programs(path, "bound")
    assert [what for what, _ in captured_programs(path)] == ["TinyLlama, a step"]


def test_what_a_file_of_a_mesh_cannot_say_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    options: Any = {"backend": "eager", "micro_batches": 2}
    path = tmp_path / "mesh.lz"
    with one_of_many(2):
        step = lazyinline.parallelize(tiny(1), tokens(), mesh=mesh_of(fsdp=2), **options)
        with pytest.raises(lazyinline.FileError, match="'beside' is of whole tensors"):
            lazyinline.save(step, path, weights="beside")
        mesh = mesh_of(pipeline=1, tensor=2)
        stages = lazyinline.parallelize(tiny(1), tokens(), mesh=mesh, **options)
        with pytest.raises(lazyinline.FileError, match="whose stages are split over a mesh"):
            lazyinline.save(stages, path)
    assert not path.exists()


STEP = "mesh/0/programs/0/step.txt"
WEIGHTS = "mesh/0/weights.safetensors"
GATHER = "lazyinline.all_gather.default(%a0, 2, 'fsdp')"


@pytest.mark.parametrize(
    ("part", "old", "new", "said"),
    [
        ("model.json", '["fsdp",2]', '["data",2]', "runs over 'fsdp', and the mesh has data"),
        ("model.json", '["fsdp",2]', '["fsdp",4]', "there is no mesh of such dimensions and ranks"),
        ("model.json", '["fsdp",2]', '["",2]', "there is no mesh of such dimensions and ranks"),
        ("model.json", "],[0,1],{", "],[1,1],{", "there is no mesh of such dimensions and ranks"),
        (
            "model.json",
            'embed.weight":"S0"',
            'embed.weight":"S2"',
            "shape (32, 16) cannot lie as S2",
        ),
        (
            "model.json",
            'embed.weight":"S0"',
            'embed.weight":"S0/3"',
            "shape (32, 16) cannot lie as S0/3",
        ),
        (
            "model.json",
            'embed.weight":"S0"',
            'embed.weight":"P"',
            "a tensor lies as 'P', which is no",
        ),
        (
            "model.json",
            'embed.weight":"S0"',
            'embed.weight":"S0,R"',
            "lies as 'S0,R', which is no layout",
        ),
        (
            "model.json",
            'embed.weight":"S0"',
            'embed.weight":"S1"',
            "is of another type than programs",
        ),
        (
            "model.json",
            'embed.weight":"S0"',
            'embed.weight":"R"',
            "is of another type than programs",
        ),
        ("model.json", ',["S0","S0"],', ',["S0"],', "nothing says how"),
        ("model.json", ',["S0","S0"],', ',["S0","R"],', "a step takes or gives other types"),
        ("model.json", '"batching":[2', '"batching":[1', "is of another type than programs take"),
        ("model.json", '"batching":[2', '"batching":[-1', "there must be at least one"),
        ("model.json", '"batching":[2', '"batching":[99999999', "a number of micro-batches"),
        (STEP, "'fsdp'", "'tensor'", "runs over 'tensor', and the mesh has fsdp"),
        (STEP, "'sum', 'fsdp'", "'xor', 'fsdp'", "which has 2 ranks, is told ['xor']"),
        (STEP, GATHER, GATHER.replace("2", "3"), "the operator gives"),
        (STEP, "lazyinline.wait.default(%a0, %a1)", "aten.clone.default(%a0)", "nothing waits for"),
        (STEP, GATHER, "aten.cat.default([%a0, %a0])", "waits for what no collective makes"),
    ],
)
def test_layouts_and_collectives_that_cannot_be_are_refused(
    part: str, old: str, new: str, said: str, meshed: bytes, tmp_path: pathlib.Path
) -> None:
    parts = parts_in(meshed)
    text = parts[part].decode()
    assert old in text
    parts[part] = text.replace(old, new).encode()
    with one_of_many(2):
        assert said in opened(written(parts), tmp_path / "mesh.lz")


def test_a_collective_is_refused_where_there_is_no_mesh(
    sound: bytes, meshed: bytes, tmp_path: pathlib.Path
) -> None:
    parts = parts_in(sound)  # that of a mesh has them known to this process
    name = next(n for n in parts if n.endswith("forward.txt"))
    text = parts[name].decode()
    parts[name] = text.replace("= tanh(", "= lazyinline.wait.default(").encode()
    assert parts[name].decode() != text
    assert "calls lazyinline.wait" in opened(written(parts), tmp_path / "model.lz")


def refuse(rank: int, folder: pathlib.Path) -> str:
    own = folder / f"of {rank}"
    own.mkdir()
    said = opened((folder / "forged.lz").read_bytes(), own / "mesh.lz")
    return said.replace(str(own), "")


def test_ranks_whose_collectives_would_not_meet_are_refused(
    meshed: bytes, tmp_path: pathlib.Path
) -> None:
    """One rank has a sum more than the other, and would wait for it for ever."""
    parts = parts_in(meshed)
    name = "mesh/1/programs/0/step.txt"
    text = parts[name].decode()
    start = re.search(r"(  %\w+ = call @all_reduce_default\()%\w+(\)\n)", text)
    wait = re.search(r"  (%\w+) = call @wait_default_15\(%\w+\)\n", text)
    assert start and wait
    more = (
        f"  %more = call @all_reduce_default({wait[1]})\n  %most = call @wait_default_15(%more)\n"
    )
    parts[name] = text.replace(wait[0], wait[0] + more).encode()
    (tmp_path / "forged.lz").write_bytes(written(parts))
    said = run_ranks(tmp_path, "test_hostile_mesh.refuse")
    assert said[0] == said[1]
    assert "would not meet" in said[0]


@pytest.mark.sweep(keep="few")
@pytest.mark.parametrize("count", [40, 2_000], ids=["few", "many"])
def test_a_forged_step_over_a_mesh_is_refused_in_a_sentence(
    count: int,
    meshed: bytes,
    tmp_path: pathlib.Path,
    nothing_is_done: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAZYINLINE_VERIFY", "0")
    ways = (swapped, left_out, json_changed, text_changed, size_changed)
    with one_of_many(2):
        assert refused(meshed, tmp_path / "mesh.lz", range(count), *ways) > count // 3
