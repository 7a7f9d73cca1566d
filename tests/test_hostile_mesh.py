"""Forged files of several ranks: a sentence on each, and none waits for another.

Here this process is one rank of a group whose collectives move nothing.
"""

import contextlib
import pathlib
import re
from typing import Any

import pytest
import test_hostile_files as forger
from parallel_models import FEED_FORWARD, tiny, tokens
from rank_threads import one_of_many, run_in_threads
from test_hostile_files import opened, parts_in, refused, written

import lazyinline
from lazyinline.frontend.lazyinline_command.main import main

sound, piped = forger.sound, forger.staged  # the fixtures: of one rank, and its pipeline


OPTIONS: Any = {"backend": "eager", "micro_batches": 2}


@pytest.fixture(scope="module")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a step over a mesh of two ranks."""
    path = tmp_path_factory.mktemp("meshed") / "mesh.lz"
    step = lazyinline.parallelize(tiny(0), tokens(), mesh={"fsdp": 2}, **OPTIONS)
    with pytest.raises(lazyinline.FileError, match='for a mesh use weights="inside"'):
        lazyinline.save(step, path, weights="beside")
    assert not path.exists()
    lazyinline.save(step, path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of two stages, each over two ranks."""
    path, mesh = tmp_path_factory.mktemp("staged") / "stages.lz", {"pipeline": 2, "tensor": 2}
    stages = lazyinline.parallelize(
        tiny(2, heads=0), tokens(rows=8), plan=FEED_FORWARD, mesh=mesh, **OPTIONS
    )
    lazyinline.save(stages, path)
    return path.read_bytes()


# The mesh of each file, how many ranks it has, and those that open it here.
MESHES = {"meshed": ("fsdp 2", 2, (0,)), "staged": ("pipeline 2 tensor 2", 4, (0, 3))}


@pytest.mark.parametrize("kind", MESHES)
def test_a_file_is_opened_by_as_many_ranks_as_its_mesh_has(
    kind: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    content, path = request.getfixturevalue(kind), tmp_path / "mesh.lz"
    mesh, world, ranks = MESHES[kind]
    for number in {0, 2, 3} - {world}:
        with one_of_many(number, number - 1) if number else contextlib.nullcontext():
            said = f"over a mesh ({mesh}), and torch.distributed has {number} rank(s) here"
            assert said in opened(content, path)
    for rank in ranks:
        with one_of_many(world, rank):
            assert not opened(content, path)
            with pytest.raises(lazyinline.FileError, match="a state_dict has whole tensors"):
                lazyinline.load(path, state_dict={})


def changed(content: bytes, part: str, *pairs: tuple[str, str], is_once: bool = False) -> bytes:
    """Returns a file in one part of which some texts are others, under right digests."""
    parts = parts_in(content)
    text = parts[part].decode()
    for old, new in pairs:
        assert text.count(old) == 1 if is_once else old in text
        text = text.replace(old, new)
    return written(parts | {part: text.encode()})


MODEL, STEP = "model.json", "ranks/0/programs/0/step.txt"
GATHER = "lazyinline.all_gather.default(%a0, 2, 'fsdp')"
NO_MESH = "there is no mesh of such dimensions and ranks"
LAYOUTS = {  # in place of S0
    "S2": "shape (32, 16) cannot lie as S2",
    "S0/3": "shape (32, 16) cannot lie as S0/3",
    "P": "a tensor lies as 'P', which is no",
    "S0,R": "lies as 'S0,R', which is no layout",
    "S1": "is of another type than programs",
    "R": "is of another type than programs",
}


# What is changed in a part of a file, and what one rank says of it.
OF_MESH = [
    (MODEL, '["fsdp",2]', '["data",2]', "runs over 'fsdp', and the mesh has data"),
    (MODEL, '["fsdp",2]', '["fsdp",4]', NO_MESH),
    (MODEL, '["fsdp",2]', '["fsdp",1048575],["tp",1048575]', NO_MESH),  # too many to be listed
    (MODEL, '["fsdp",2]', '["",2]', NO_MESH),
    (MODEL, "],[0,1],{", "],[1,1],{", NO_MESH),
    *(
        (MODEL, 'embed.weight":"S0"', f'embed.weight":"{new}"', said)
        for new, said in LAYOUTS.items()
    ),
    (MODEL, ',["S0","S0"],', ',["S0"],', "nothing says how"),
    (MODEL, ',["S0","S0"],', ',["S0","R"],', "a step takes or gives other types"),
    (MODEL, '"batching":[2', '"batching":[1', "is of another type than programs take"),
    (MODEL, '"batching":[2', '"batching":[-1', "there must be at least one"),
    (MODEL, '"batching":[2', '"batching":[99999999', "a number of micro-batches"),
    (STEP, "'fsdp'", "'tensor'", "runs over 'tensor', and the mesh has fsdp"),
    (STEP, "'sum', 'fsdp'", "'xor', 'fsdp'", "which has 2 ranks, is told ['xor']"),
    (STEP, GATHER, GATHER.replace("2", "3"), "the operator gives"),
    (STEP, "lazyinline.wait.default(%a0, %a1)", "aten.clone.default(%a0)", "never waits"),
    (STEP, GATHER, "aten.cat.default([%a0, %a0])", "waits for a tensor that no"),
]
FORWARD = "ranks/0/programs/0/stages/0/forward.txt"
AXES = '["pipeline",2],["tensor",2]'
OF_STAGES = [
    (0, MODEL, '["pipeline",2]', '["data",2]', NO_MESH),
    (0, MODEL, '["tensor",2]', '["pp",2]', NO_MESH),
    (0, MODEL, AXES, '["pipeline",1],["tensor",4]', "and its mesh is another"),
    (0, MODEL, "[2,2,2,2]", "[2,2,2,1]", "of 2 rank(s) in 1 replica(s), and"),
    (0, MODEL, '0.gate.weight":"S0"', '0.gate.weight":"R"', "is of another type"),
    (2, MODEL, '1.gate.weight":"S0"', '1.gate.weight":"S1"', "is of another type"),
    (0, FORWARD, "'tensor'", "'fsdp'", "runs over 'fsdp', and the mesh has tensor"),
    (0, FORWARD, "lazyinline.wait.default(%a0)", "aten.clone.default(%a0)", "never waits"),
    (0, FORWARD, "return %v_11, %v_12", "return %a7, %v_12", "the header has other result"),
    (0, FORWARD, "%a2: f64[16]", "%a2: f64[17]", "cannot be given this"),
]


@pytest.mark.parametrize(
    ("kind", "rank", "part", "old", "new", "said"),
    [*(("meshed", 0, *row) for row in OF_MESH), *(("staged", *row) for row in OF_STAGES)],
)
def test_layouts_and_collectives_that_cannot_be_are_refused(
    kind: str,
    rank: int,
    part: str,
    old: str,
    new: str,
    said: str,
    caplog: Any,
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
) -> None:
    content = changed(request.getfixturevalue(kind), part, (old, new))
    with one_of_many(MESHES[kind][1], rank):
        assert said in opened(content, tmp_path / "mesh.lz")
    assert not caplog.records  # PyTorch logs no traceback of an operator that was tried


def test_a_collective_is_refused_where_there_is_no_mesh(
    sound: bytes, meshed: bytes, tmp_path: pathlib.Path
) -> None:
    # That of a mesh has them known to this process.
    name = next(n for n in parts_in(sound) if n.endswith("forward.txt"))
    content = changed(sound, name, ("= tanh(", "= lazyinline.wait.default("))
    assert "calls lazyinline.wait" in opened(content, tmp_path / "model.lz")


def test_ranks_whose_collectives_would_not_meet_are_refused(
    meshed: bytes, tmp_path: pathlib.Path
) -> None:
    """One rank has a sum more than the other, and would wait for it for ever."""
    name = "ranks/1/programs/0/step.txt"
    text = parts_in(meshed)[name].decode()
    start = re.search(r"  (%\w+) = call @all_reduce_default\(%\w+\)\n", text)
    assert start
    wait = re.search(rf"  (%\w+) = call @(wait_default\w*)\({start[1]}\)\n", text)
    assert wait
    more = f"  %more = call @all_reduce_default({wait[1]})\n  %most = call @{wait[2]}(%more)\n"
    content = changed(meshed, name, (wait[0], wait[0] + more))

    def refuse(rank: int) -> str:
        own = tmp_path / str(rank)
        own.mkdir()
        return opened(content, own / "mesh.lz").replace(str(own), "")

    said = run_in_threads(2, refuse)
    assert said[0] == said[1]
    assert "would not meet" in said[0]


FLAT = """aten closure @flat(%a0: f64[4,8,16]) -> (f64[32,16]) {
  %1: f64[32,16] = view(%a0, [32, 16])
  return %1
}

"""
WHOLE = """aten closure @whole(%a0: f64[32,16]) -> (f64[4,8,16]) {
  %1: f64[4,8,16] = view(%a0, [4, 8, 16])
  return %1
}

"""


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.sweep(keep="0")
def test_a_stage_that_sends_what_the_next_one_does_not_take_is_refused(
    rank: int, staged: bytes, tmp_path: pathlib.Path
) -> None:
    content = changed(
        staged,
        FORWARD,
        ("program @main", FLAT + "program @main"),
        (") -> (f64[4,8,16], $struct0) {  // 39", ") -> (f64[32,16], $struct0) {  // 39"),
        ("  return %v_11, %v_12", "  %sent = call @flat(%v_11)\n  return %sent, %v_12"),
        is_once=True,
    )
    content = changed(
        content,
        FORWARD.replace("forward", "backward"),
        ("program @main", WHOLE + "program @main"),
        ("%a7: f64[4,8,16]) -> (f64[32,16]", "%given: f64[32,16]) -> (f64[32,16]"),
        ("  %v_11, %v_12, %v_13,", "  %a7 = call @whole(%given)\n  %v_11, %v_12, %v_13,"),
        is_once=True,
    )
    with one_of_many(4, rank):
        said = opened(content, tmp_path / "stages.lz")
    assert "stage 0 sends other types than the next one takes" in said


# ---- files of several ranks ----------------------------------------------------------------------


SHOWN = {
    "piped": [["forward of stage 0", "backward of stage 0", "forward of stage 1", "backward of"]],
    "meshed": [["step"]],
    "staged": [
        ["forward of stage 0", "backward of stage 0"],
        ["forward of stage 1", "backward of"],
    ],
}


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("piped", ["rank 0"]), ("meshed", ["ranks 0, 1"]), ("staged", ["ranks 0, 1", "ranks 2, 3"])],
)
@pytest.mark.sweep(keep="[staged")
def test_commands_show_what_ranks_run_once_and_which_run_the_same(
    kind: str,
    ranks: list[str],
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "ranks.lz"
    path.write_bytes(request.getfixturevalue(kind))

    assert main(["inspect", str(path)]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("// the ")]
    expected = [(what, who) for row, who in zip(SHOWN[kind], ranks, strict=True) for what in row]
    assert len(heads) == len(expected)
    for head, (what, who) in zip(heads, expected, strict=True):
        assert head.startswith(f"// the {what}") and head.endswith(f", {who}")

    assert main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("// ")] == [
        f"// {who}" for who in ranks
    ]
    assert shown.count("opened from a file") == len(ranks)
    assert len(list(tmp_path.glob("page-rank*.html"))) == len(ranks)

    assert main(["export", str(path), str(tmp_path / "model.onnx")]) == 2
    assert "Only inference programs of a file are exported, and" in capsys.readouterr().err


@pytest.mark.sweep(keep=["piped-1-few", "meshed-2-few"])
@pytest.mark.parametrize("count", [6, 2_000], ids=["few", "many"])
@pytest.mark.parametrize(("kind", "world"), [("piped", 1), ("meshed", 2), ("staged", 4)])
def test_a_forged_file_of_several_ranks_is_refused_in_a_sentence(
    kind: str,
    world: int,
    count: int,
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAZYINLINE_VERIFY", "0")
    content: bytes = request.getfixturevalue(kind)
    ways = (forger.swapped, forger.left_out, forger.json_changed)
    ways += (forger.text_changed, forger.size_changed)
    seeds, found = range(max(6, count // world)), set[int]()
    for rank in range(world):  # each reads its own parts
        with one_of_many(world, rank):
            found |= refused(content, tmp_path / "forged.lz", seeds, *ways)
    assert len(found) > len(seeds) // 2
