"""N17: a byte that is not as it was written is an error that names its file and place; an older checkpoint serves."""

from __future__ import annotations

import ast
import json
import logging
import random
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch
from torch import nn

import aiodist
from aiodist import CheckpointDamaged, checkpoints
from aiodist.checkpoints.format import Manifest
from aiodist.testing import run_ranks

SAVED_BY = 2

MANIFEST = "manifest.json"


def module() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(60, 300), nn.Linear(300, 2), nn.BatchNorm1d(2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, of two ranks."""
    path = tmp_path_factory.mktemp("damage")

    async def save() -> None:
        async with aiodist.init() as coll:
            await aiodist.save(path, module(), coll=coll, metadata=[1, "two"])

    run_ranks(SAVED_BY, save)
    return path / "checkpoint-00000001"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(copytree(saved, tmp_path / saved.name))


def loaded(path: Path, ranks: int = 2) -> list[Any]:
    """Return what each rank has loaded."""

    async def load() -> Any:
        async with aiodist.init() as coll:
            net = nn.Sequential(nn.Linear(60, 300), nn.Linear(300, 2), nn.BatchNorm1d(2))
            before = {name: t.clone() for name, t in net.state_dict().items()}
            try:
                found = await aiodist.load(path, net, coll=coll)
            except CheckpointDamaged:
                assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
                raise
            expected = module().state_dict()
            assert all(torch.equal(t, expected[name]) for name, t in net.state_dict().items())
            return found

    return run_ranks(ranks, load)


def damage(folder: Path, ranks: int = 2) -> str:
    """Return the message that loading raises."""
    with pytest.raises(CheckpointDamaged) as raised:
        loaded(folder, ranks)
    return str(raised.value)


def flipped(path: Path, at: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST])
def test_n17_each_flipped_bit_is_found_and_its_place_is_named(folder: Path, name: str) -> None:
    file = folder / name
    length = file.stat().st_size
    draw = random.Random()
    places = {0, 7, 8, 9, length - 1, *(draw.randrange(min(length, 400)) for _ in range(5))}
    places |= {draw.randrange(length) for _ in range(8)}
    for at in places:
        mask = 1 << draw.randrange(8)
        flipped(file, at, mask)
        said = damage(folder, ranks=draw.choice([1, 3]))
        assert str(file) in said, (at, mask)
        if name != MANIFEST:
            first, last = map(int, re.search(r"bytes (\d+) to (\d+)", said).groups())  # type: ignore[union-attr]
            assert first <= at < last
        flipped(file, at, mask)
    loaded(folder)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST])
def test_n17_files_that_are_shorter_longer_or_missing(folder: Path, name: str) -> None:
    file = folder / name
    data = file.read_bytes()
    for length in {0, 1, len(data) // 2, len(data) - 1, random.randrange(len(data))}:
        file.write_bytes(data[:length])
        assert str(file) in damage(folder)
    file.write_bytes(data + b"\0")
    assert str(file) in damage(folder)
    file.unlink()
    assert f"{file} cannot be read: No such file" in damage(folder)
    file.mkdir()
    assert str(file) in damage(folder)
    file.rmdir()
    file.write_bytes(data)
    loaded(folder)


def test_n17_files_of_another_checkpoint(folder: Path) -> None:
    first, second = (folder / f"rank-0000{rank}.safetensors" for rank in range(2))
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert str(first) in damage(folder)
    first.write_bytes(whole)
    (folder / "notes.txt").write_text("what lies beside is nobody's business")
    loaded(folder)


def test_n17_a_folder_goes_on_with_the_newest_that_is_sound(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 5):
        copytree(saved, tmp_path / f"checkpoint-0000000{number}")
    copytree(saved, tmp_path / "checkpoint-00000009.part")
    (tmp_path / "other").mkdir()
    (tmp_path / "checkpoint-00000008").mkdir()
    flipped(tmp_path / "checkpoint-00000004" / "rank-00001.safetensors", 2000, 1)
    (tmp_path / "checkpoint-00000003" / "rank-00000.safetensors").unlink()
    caplog.set_level(logging.WARNING, logger="aiodist")
    for ranks in (1, 2, 3):
        caplog.clear()
        assert [found.number for found in loaded(tmp_path, ranks)] == [2] * ranks
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
        for number in (8, 4, 3):
            assert f"checkpoint-0000000{number} is not used" in caplog.text
    rmtree(tmp_path / "checkpoint-00000002")
    flipped(tmp_path / "checkpoint-00000001" / MANIFEST, 300, 4)
    with pytest.raises(CheckpointDamaged, match="checkpoint-00000008") as raised:
        loaded(tmp_path)
    assert len([note for note in raised.value.__notes__ if "an older one" in note]) == 3


def forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a manifest that says something else, with the right checksum."""
    path = folder / MANIFEST
    content = json.loads(path.read_bytes().splitlines()[1])
    change(content)
    written(path, json.dumps(content, separators=(",", ":")).encode())


def written(path: Path, text: bytes) -> None:
    first = f'{{"aiodist checkpoint":3,"nbytes":{len(text)},"sha256":"{sha256(text).hexdigest()}"}}\n'
    path.write_bytes(first.encode() + text + b"\n")


def tensor(content: dict[str, Any]) -> dict[str, Any]:
    """Return one that is in two pieces."""
    found: dict[str, Any] = content["tensors"]["net/0.weight"]
    return found


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no ranks": lambda c: c.update(ranks=0, files=[], own=[]),
    "more ranks": lambda c: c.update(ranks=3),
    "ranks are text": lambda c: c.update(ranks="2"),
    "no tensors": lambda c: c.pop("tensors"),
    "a dtype": lambda c: tensor(c).update(dtype="OBJECT"),
    "another dtype": lambda c: tensor(c).update(dtype="F64"),
    "a shape of 2^60": lambda c: tensor(c).update(shape=[1 << 60, 60]),
    "a negative shape": lambda c: tensor(c).update(shape=[-300, -60]),
    "a shape of floats": lambda c: tensor(c).update(shape=[300.0, 60]),
    "a shape": lambda c: tensor(c).update(shape=[60, 301]),
    "a piece twice": lambda c: tensor(c)["pieces"].append(tensor(c)["pieces"][0]),
    "no pieces": lambda c: tensor(c).update(pieces=[]),
    "a piece left out": lambda c: tensor(c)["pieces"].pop(),
    "a file of nobody": lambda c: tensor(c)["pieces"][0].__setitem__(0, 7),
    "a path for a file": lambda c: tensor(c)["pieces"][0].__setitem__(0, "../../etc/passwd"),
    "a negative offset": lambda c: tensor(c)["pieces"][0].__setitem__(1, -8),
    "a start": lambda c: tensor(c)["pieces"][1].__setitem__(2, 0),
    "a length": lambda c: tensor(c)["pieces"][1].__setitem__(3, 1 << 40),
    "a checksum": lambda c: tensor(c)["pieces"][1].__setitem__(4, 5),
    "a file's bytes": lambda c: c["files"][1].__setitem__(0, 1 << 60),
    "a header's bytes": lambda c: c["files"][1].__setitem__(1, 1 << 60),
    "an unknown tensor": lambda c: c["parts"][0]["state"]["map"].update({"0.bias": {"tensor": "net/5"}}),
    "an unknown value": lambda c: c.update(metadata={"pickle": "gASVAAAAAAAA"}),
    "an array of bfloat16": lambda c: (tensor(c).update(dtype="BF16"), c.update(metadata={"array": "net/0.weight"})),
    "a part": lambda c: c.update(parts=[3]),
    "kinds": lambda c: [each.update(kinds=3) for each in c["own"]],
    "own": lambda c: c.update(own=[3, 4]),
    "a part without a kind": lambda c: c["parts"][0].pop("kind"),
    "own state without kinds": lambda c: [each.pop("kinds") for each in c["own"]],
}


@pytest.mark.parametrize("what", FORGERIES)
def test_n17_nothing_that_a_manifest_says_is_trusted(folder: Path, what: str) -> None:
    forged(folder, FORGERIES[what])
    assert str(folder) in damage(folder)


@pytest.mark.parametrize("depth", [20_000, 1_000_000])
def test_n17_a_manifest_that_is_nested_too_deep(folder: Path, depth: int) -> None:
    """Python 3.14 reads the first: what the value is made of is too deep then."""
    path, given = folder / MANIFEST, b'"metadata":[1,"two"]'
    content = path.read_bytes().splitlines()[1]
    assert given in content
    written(path, content.replace(given, b'"metadata":' + b"[" * depth + b"]" * depth))
    assert str(folder) in damage(folder)


@pytest.mark.parametrize("version", [2, 4])
def test_n17_a_manifest_of_another_version_says_so(folder: Path, version: int) -> None:
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'checkpoint":3,', b'checkpoint":%d,' % version, 1))
    assert f"version {version}: expected 3" in damage(folder)


def test_n17_a_manifest_is_read_as_it_was_written(folder: Path) -> None:
    assert Manifest.read(folder).packed() == (folder / MANIFEST).read_bytes()


def test_n17_nothing_here_unpickles_or_runs_what_it_read() -> None:
    modules = Path(checkpoints.__file__).parent.glob("*.py")
    nodes = [node for module in modules for node in ast.walk(ast.parse(module.read_text()))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    assert imported & {"pickle", "marshal", "shelve", "torch.serialization", "joblib"} == set()
    assert called & {"torch.load", "np.load", "eval", "exec", "compile", "__import__", "getattr_static"} == set()
    assert "json.loads" in called
