"""Files that are damaged or forged: always a sentence, or a program; nothing is run or written.

A forger knows the format: digests are made again after parts were changed, so that only what reads
a part can notice. No machine's key signs that, so operators are checked one by one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import test_pipeline
import torch
from models import Block, Made, Net, batch

import lazyinline
from lazyinline.backend.files.container import digest_of

alone = test_pipeline.alone  # the fixture: one process that holds every stage
Parts = dict[str, bytes]


def parts_in(content: bytes) -> Parts:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pieces(name: str, content: bytes) -> list[bytes | memoryview]:
    """Returns the header of a part of tensors, and each of them, if it is whole."""
    if name.endswith(".safetensors"):
        start = 8 + int.from_bytes(content[:8], "little")
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            header = json.loads(content[8:start])
            rows = sorted(said["data_offsets"] for said in header.values())
            numbers = (memoryview(content)[start + begin : start + end] for begin, end in rows)
            return [content[:start], *numbers]
    return [content]


def written(parts: Parts, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Returns a file of these parts, with digests that are right."""
    rest = {name: content for name, content in parts.items() if name != "manifest.json"}
    manifest = json.loads(parts["manifest.json"])
    manifest["parts"] = {name: digest_of(pieces(name, rest[name])) for name in rest}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, content in {"manifest.json": json.dumps(manifest).encode(), **rest}.items():
            archive.writestr(name, content)
    return target.getvalue()


# ---- what is done to the bytes of a file ---------------------------------------------------------


def cut_off(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content))]


def flipped(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 8))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def overwritten(content: bytes, random: Random) -> bytes:
    start, length = random.randrange(len(content)), random.randrange(1, 40)
    return content[:start] + random.randbytes(length) + content[start + length :]


def sizes_changed(content: bytes, random: Random) -> bytes:
    """Says another size of a part, in its header or in the directory at the end."""
    places = [m.start() for m in re.finditer(rb"PK\x01\x02|PK\x03\x04", content)]
    start = random.choice(places)
    offset = start + (20 if content[start + 2] == 1 else 18) + random.choice((0, 4))
    size = random.choice((0, 1, 2**31, 2**32 - 1, random.randrange(2**20)))
    return content[:offset] + struct.pack("<I", size) + content[offset + 4 :]


OF_BYTES: tuple[Any, ...] = (cut_off, flipped, overwritten, sizes_changed)


# ---- what a forger does to its parts -------------------------------------------------------------

ODD: tuple[Any, ...] = (-1, 2**63, 2**200, 1e308, "", "../x", None, [], {}, [[]], True, "grad")


def swapped(parts: Parts, random: Random) -> None:
    one, other = random.sample(sorted(parts.keys() - {"manifest.json"}), 2)
    parts[one], parts[other] = parts[other], parts[one]


def renamed(parts: Parts, random: Random) -> None:
    name = random.choice(sorted(parts.keys() - {"manifest.json"}))
    odd = ("../../evil", "/tmp/evil", "..\\evil", "C:evil", "a//b", "objects/x", "x\x00y", "\u202e")
    parts[random.choice(odd)] = parts.pop(name)


def left_out(parts: Parts, random: Random) -> None:
    del parts[random.choice(sorted(parts.keys() - {"manifest.json"}))]


def json_changed(parts: Parts, random: Random) -> None:
    name = random.choice([n for n in parts if n.endswith(".json")])
    found = json.loads(parts[name])
    place: Any = found
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = random.choice(keys)
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or random.random() < 0.15:
            place[key] = random.choice(ODD)
            break
        place = inner
    parts[name] = json.dumps(found).encode()


def json_nested(parts: Parts, random: Random) -> None:
    depth = random.choice((10**3, 10**5, 10**6))
    parts["model.json"] = random.choice((b"[", b'{"a":')) * depth


def text_changed(parts: Parts, random: Random) -> None:
    name = random.choice([n for n in parts if n.endswith(".txt")])
    words = re.split(r"(\W+)", parts[name].decode())
    index = random.randrange(len(words))
    odd = ("2**9", "999999999999", "f64", "eval", "__import__('os')", "from_file", "%x", "call")
    words[index] = random.choice((*odd, "}", random.choice(words), "(" * 500, "-" * 3000))
    parts[name] = "".join(words).encode()


def size_changed(parts: Parts, random: Random) -> None:
    """Says another size, wherever it stands in all texts: they agree with each other."""
    number, other = random.choice(("3", "4", "8")), random.choice(("5", "0", "1099511627776"))
    for name in [n for n in parts if n.endswith(".txt")]:
        changed = re.sub(rf"(?<=[\[,]){number}(?=[\],])", other, parts[name].decode())
        parts[name] = changed.encode()


def header_changed(parts: Parts, random: Random) -> None:
    name = random.choice(("weights.safetensors", "constants.safetensors"))
    content = parts[name]
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if random.random() < 0.3 or not header:
        odd = random.choice((0, length + 8, 10**8, 2**62, 2**64 - 1))
        parts[name] = odd.to_bytes(8, "little") + content[8:]
        return
    said = header[random.choice(sorted(header))]
    key = random.choice(sorted(said))
    said[key] = random.choice((*ODD, [0, 4], [2**62, 2**62], [-4, 4], "F64", "I8", [1] * 70))
    text = json.dumps(header).encode()
    parts[name] = len(text).to_bytes(8, "little") + text + content[8 + length :]


def sizes_said_otherwise(parts: Parts, random: Random) -> None:
    """Lies about which sizes are symbols, their examples, or conditions; or leaves them out."""
    told = json.loads(parts["model.json"])
    names, examples, conditions = random.choice([p for p in told["programs"] if p["sizes"]])[
        "sizes"
    ]
    odd = ("s1", "s2+1", "s99", "s1+-3", "0", "", 7, None, "s1 <= 4", "s1 < 10**9", "Eq(s1,s2)")
    further = ("s1//0 < 1", "s1**99 < 1", "~(s1 < 2)", "eval(1)", "(" * 300, "s1" * 999, "1 < s1")
    further += ("(" * 20 + "s1" + "+1)**7" * 20 + "<3", "PowByNatural(s1,9999999)<3")
    further += ("2*s1", "s1*s1", "s1//2", "LShift(s1,9999999999) > 1")
    known = next(iter(examples), "s1")
    lies = [x.replace("s1", known) if isinstance(x, str) else x for x in (*odd, *further)]
    what = random.randrange(4)
    if what == 0:
        row = random.choice(names)
        row[random.randrange(len(row))] = random.choice(lies)
    elif what == 1:
        examples[random.choice((*examples, "s1", "s7", "x"))] = random.choice((0, 1, 3, *ODD))
    elif what == 2:
        place = random.randrange(len(conditions) + 1)
        conditions[place : place + random.randrange(2)] = [random.choice(lies)]
    else:
        conditions.clear()
    parts["model.json"] = json.dumps(told).encode()


def sizes_used_otherwise(parts: Parts, random: Random) -> None:
    """Computes with other sizes in one operator or header than what is there."""
    name = random.choice([n for n in parts if n.endswith(".txt") and b"[s" in parts[n]])
    text = parts[name].decode()
    found = random.choice(list(re.finditer(r"\bs\d+\b", text)))
    other = random.choice(("(s1+1)", "(s1//3)", "(99*s1)", "(s1-3)", "4", "s1**7", "Eq(s1,4)"))
    other = other.replace("s1", found[0])
    parts[name] = (text[: found.start()] + other + text[found.end() :]).encode()


OF_PARTS: tuple[Any, ...] = (
    *(swapped, renamed, left_out, json_changed, json_changed, json_nested),
    *(text_changed, text_changed, size_changed, header_changed),
)
OF_SIZES = (sizes_said_otherwise, sizes_said_otherwise, sizes_used_otherwise)


def damaged(content: bytes, random: Random, *ways: Any) -> bytes:
    """Returns a file to which one thing was done."""
    ways = ways or (*OF_BYTES, *OF_PARTS)
    way = random.choice(ways)
    if way in OF_BYTES:
        return bytes(way(content, random))
    parts = parts_in(content)
    way(parts, random)
    return written(parts)


# ---- who looks on --------------------------------------------------------------------------------

_SEEN: list[str] = []
_WATCHING: list[bool] = []


def _look(event: str, args: tuple[Any, ...]) -> None:
    if not _WATCHING:
        return
    if event in ("subprocess.Popen", "os.system", "pickle.find_class", "socket.connect", "os.exec"):
        _SEEN.append(f"{event} {args}")
    is_write = event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR)
    own = (os.environ["LAZYINLINE_CACHE_DIR"], "__pycache__")  # an import keeps its bytecode
    if is_write and not any(one in args[0] for one in own):
        _SEEN.append(f"open {args}")


sys.addaudithook(_look)


@contextlib.contextmanager
def nothing_is_done() -> Iterator[None]:
    """Sees to it that no process is started, nothing unpickled, no file written by its name."""
    _SEEN.clear()
    _WATCHING.append(True)
    try:
        yield
    finally:
        _WATCHING.clear()
    assert not _SEEN


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a small model, in training and in inference."""
    compiled = lazyinline.compile(Net(Block, 1), backend="eager")
    compiled(batch(), 2.0)
    with torch.no_grad():
        compiled(batch(), 2.0)
    path = tmp_path_factory.mktemp("sound") / "model.lz"
    lazyinline.save(compiled, path)
    return path.read_bytes()


def opened(content: bytes, path: Path) -> str:
    """Opens a file; returns the sentence that it is refused with, or nothing."""
    path.write_bytes(content)
    before, said = sorted(path.parent.iterdir()), ""
    with nothing_is_done():
        try:
            lazyinline.load(path)
        except lazyinline.FileError as error:
            said = str(error)
            assert said.endswith(".") and "\n" not in said, said
    assert sorted(path.parent.iterdir()) == before
    return said


def refused(content: bytes, path: Path, seeds: range, *ways: Any) -> set[int]:
    """Returns the seeds of damaged files that were refused; the others are sound programs."""
    found = set()
    for seed in seeds:
        changed = damaged(content, Random(seed), *ways)
        try:
            if opened(changed, path):
                found.add(seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return found


@pytest.mark.sweep(keep="few")
@pytest.mark.parametrize(
    ("seeds", "least"), [(range(28), 17), (range(70, 10_070), 7_000)], ids=["few", "many"]
)
def test_a_damaged_or_forged_file_is_refused_in_a_sentence(
    seeds: range, least: int, sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYINLINE_VERIFY", "0")
    assert len(refused(sound, tmp_path / "model.lz", seeds)) > least


@pytest.mark.parametrize("one, other", [(0, 1), (0, 512), (3, 1025), (511, 512 * 299)])
def test_words_of_a_tensor_that_changed_places_change_its_digest(one: int, other: int) -> None:
    numbers = torch.arange(300 * 512 + 3).numpy()
    before = digest_of([memoryview(numbers).cast("B")])
    numbers[[one, other]] = numbers[[other, one]]
    assert digest_of([memoryview(numbers).cast("B")]) != before


def halves(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes a batch that is even, and of at most 40."""
    if x.shape[0] > 40:
        return self.net(x)  # type: ignore[no-any-return]
    first, second = self.net(x).view(2, -1, 2)
    return first + second.as_strided((x.shape[0] // 2, 1), (2, 1))


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, torch.nn.Module]:
    """A file of a model whose sizes are symbols, with conditions, and the model."""
    model = Made(halves, net=Net(Block, 1))
    compiled: Any = lazyinline.compile(model, backend="eager", dynamic=True)
    with torch.no_grad():
        compiled(batch(8))
    path = tmp_path_factory.mktemp("sized") / "model.lz"
    lazyinline.save(compiled, path)
    return path.read_bytes(), model


def results(path: Path) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Returns what a file computes for some sizes, and from what; nothing where it is refused."""
    found = {}
    try:
        loaded = lazyinline.load(path)
        for size in (2, 7, 8, 12, 42):
            x = batch(size)
            with torch.no_grad(), contextlib.suppress(lazyinline.NoProgramError):
                found[size] = x, loaded(x)
    except lazyinline.LazyInlineError as error:
        said = str(error)
        assert said.endswith(".") and "\n" not in said, said
    return found


@pytest.mark.sweep(keep="few")
@pytest.mark.parametrize("count", [9, 3_000], ids=["few", "many"])
def test_sizes_and_conditions_that_lie_are_refused_or_change_no_number(
    count: int,
    sized: tuple[bytes, torch.nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAZYINLINE_VERIFY", "0")
    content, model = sized
    path, number = tmp_path / "model.lz", 0
    for seed in range(count):
        way = OF_SIZES[seed % len(OF_SIZES)]
        path.write_bytes(damaged(content, Random(seed), way))
        found = results(path)
        number += not found
        if way is sizes_said_otherwise:  # whose program is the model's, up to the size it asks for
            for size, (x, result) in found.items():
                assert size > 40 or torch.allclose(result, model(x)), (seed, size)
    assert number > count / 2


def test_what_is_compressed_is_refused_before_it_grows(sound: bytes, tmp_path: Path) -> None:
    parts = parts_in(sound)
    parts["model.json"] = b" " * 10**8
    content = written(parts, zipfile.ZIP_DEFLATED)
    assert len(content) < 10**6
    assert "compressed" in opened(content, tmp_path / "model.lz")


def test_parts_that_lie_over_one_another_are_refused(sound: bytes, tmp_path: Path) -> None:
    target = io.BytesIO(sound)
    with zipfile.ZipFile(target, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("model.json", b"{}")
    assert "over one another" in opened(target.getvalue(), tmp_path / "model.lz")


@pytest.mark.parametrize("make", ["folder", "missing", "empty", "text"])
def test_what_is_no_file_of_ours_is_refused(make: str, tmp_path: Path) -> None:
    path = tmp_path / "model.lz"
    if make == "folder":
        path.mkdir()
    elif make != "missing":
        path.write_text("" if make == "empty" else "hello", encoding="utf-8")
    with pytest.raises(lazyinline.FileError, match=r"model\.lz.*\.$"):
        lazyinline.load(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.json", b"[", "model.json cannot be read as JSON: "),
        ("model.json", b"{}", "has not the form that save gives it (KeyError: 'batching')"),
        ("programs/0/captured.txt", b"\xb8", "programs/0/captured.txt: 'utf-8' codec"),
        ("programs/0/forward.txt", b"%x\n", "programs/0/forward.txt: line 1: expected a closure"),
        ("weights.safetensors", bytes(8), "weights.safetensors: the header cannot be read as JSON"),
        ("more.json", b"", "it has no part programs/1/captured.txt"),
    ],
)
def test_a_refusal_says_which_part_is_wrong_and_what_to_do(
    name: str, content: bytes, said: str, sound: bytes, tmp_path: Path
) -> None:
    parts = parts_in(sound) | {name: content}
    if name == "more.json":
        del parts["programs/1/captured.txt"]
    told = opened(written(parts), tmp_path / "model.lz")
    assert said in told and told.endswith(": copy it again, or save it again.")


def test_a_forged_signature_makes_nothing_trusted(
    sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_in(sound)
    manifest = json.loads(parts["manifest.json"])
    parts["manifest.json"] = json.dumps(manifest | {"signature": "0" * 64}).encode()
    # Operators of a file that is trusted are not read yet: this one would not be noticed.
    name = "programs/0/forward.txt"
    parts[name] = parts[name].replace(b"tanh", b"sinh", 1)
    parts[name] = re.sub(rb"addmm\(", b"addmm_(", parts[name])
    assert opened(written(parts), tmp_path / "model.lz")


def test_an_operator_that_this_process_registered_is_not_run(sound: bytes, tmp_path: Path) -> None:
    @torch.library.custom_op("hostile::tanh", mutates_args=())
    def own(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    own.register_fake(torch.empty_like)
    parts = parts_in(sound)
    for name in [name for name in parts if name.endswith(".txt")]:
        parts[name] = re.sub(rb"(?<![\w.])tanh\(", b"hostile.tanh.default(", parts[name])
    said = opened(written(parts), tmp_path / "model.lz")
    assert "calls hostile.tanh.default, no operator of PyTorch's own" in said


def test_a_header_that_says_less_memory_than_operators_fill_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.lz"
    compiled = lazyinline.compile(Net(Block, 1), backend="eager")
    with torch.no_grad():
        compiled(batch())
    lazyinline.save(compiled, path)
    parts = parts_in(path.read_bytes())
    for name in [name for name in parts if name.endswith(".txt")]:
        headers = rb"((?:closure|program) @\S+\(.*\) -> \()f32\[3,2\]"
        parts[name], count = re.subn(headers, rb"\1f32[1,2]", parts[name])
        assert count == 2
    assert "other results than the operators give" in opened(written(parts), path)


# ---- pipelines -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a pipeline of two stages on one rank."""
    model, args = test_pipeline.net_and_batch(layers=2)
    path = tmp_path_factory.mktemp("staged") / "pipe.lz"
    with test_pipeline.one_rank():
        lazyinline.save(test_pipeline.make(model, args, "Interleaved1F1B"), path)
    return path.read_bytes()


def test_stages_of_others_and_missing_are_refused(
    alone: None, staged: bytes, tmp_path: Path
) -> None:
    path, parts = tmp_path / "pipe.lz", parts_in(staged)
    for name in ("forward.txt", "backward.txt", "boundary.json"):
        first, second = (f"ranks/0/programs/0/stages/{i}/{name}" for i in (0, 1))
        forged = parts | {first: parts[second], second: parts[first]}
        assert opened(written(forged), path), name
    weights = "ranks/0/weights.safetensors"
    for name in (second, weights):
        without = {n: content for n, content in parts.items() if n != name}
        assert f"it has no part {name}" in opened(written(without), path)
    assert "its weights have no" in opened(
        written(parts | {weights: parts["ranks/0/constants.safetensors"]}), path
    )


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, "2F2B", "schedule='2F2B' is unknown"),
        (0, "InterleavedZeroBubble", "a backward in halves calls other programs than these"),
        (1, [3, 2, 4, 1], "num_stages=3 cannot be spread evenly over 2 rank(s)"),
        (1, [2, 2, 4, 1], "of 2 rank(s) in 1 replica(s), and torch.distributed has 1 rank(s) here"),
        (1, [2, 1, 4, 3], "1 rank(s) in 3 replica(s), and torch.distributed has 1 rank(s) here"),
        (1, [10**9, 1, 4, 1], "there is no pipeline of such sizes: [1000000000, 1, 4, 1]"),
        (1, [2, 1, 10**9, 1], "there is no pipeline of such sizes"),
        (1, [2, 1, 4, 10**9], "there is no pipeline of such sizes"),
        (1, [2, 1, -1, 1], "there is no pipeline of such sizes: [2, 1, -1, 1]"),
        (1, [2, 1, 3, 1], "cannot be split into 3 equal micro-batches"),
        (2, -1.0, "there is no pipeline of such sizes"),
        (3, [0, 0, 2, 1], "a call is on none of its 2 stages"),
        (3, [0], "shorter"),
        (3, [1, 0, 1, 0], "PipelineError"),
    ],
)
def test_ranks_and_stages_that_there_are_not_are_refused(
    place: int, value: Any, said: str, alone: None, staged: bytes, tmp_path: Path
) -> None:
    parts = parts_in(staged)
    told = json.loads(parts["model.json"])
    told["ranks"][place] = value
    parts["model.json"] = json.dumps(told).encode()
    assert said in opened(written(parts), tmp_path / "pipe.lz")


@pytest.mark.parametrize("row", range(4))
def test_gradients_that_nobody_sends_are_refused(
    row: int, alone: None, staged: bytes, tmp_path: Path
) -> None:
    name = "ranks/0/programs/0/stages/1/boundary.json"
    parts = parts_in(staged)
    for wrong in ([99], [0, 0], [-1], [True]):
        told = json.loads(parts[name])
        told[row] = wrong
        forged = parts | {name: json.dumps(told).encode()}
        assert opened(written(forged), tmp_path / "pipe.lz"), wrong
