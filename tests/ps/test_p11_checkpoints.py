"""P11: checkpoints of a parameter server, taken during pushes, for any number of servers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.codecs import Json, TopK
from aiodist.errors import CheckpointDamaged, MismatchError, RemoteError
from aiodist.ps import SGD, Adagrad, Adam, Asynchronous, ParameterServer, Synchronous, optimizer
from aiodist.testing import run_ranks
from tests.ps.left_out import Remembering

SECONDS = 60.0
SERVERS: dict[str, dict[str, Any]] = {
    "3": {"servers": [2, 3, 4], "workers": [0, 1]},
    "2": {"servers": [4, 1], "workers": [0, 1]},
    "5": {"workers": [0, 1]},
    "symmetric": {},
}
RULES = {"adam": Adam(lr=0.1), "rms": optimizer(torch.optim.RMSprop, lr=0.01, momentum=0.5), "heavy": SGD(0.1, 0.9)}


def drawn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def tensors() -> dict[str, Tensor]:
    """Return some that are cut, one with fewer elements than servers, an empty one, and a scalar."""
    return {"w": drawn(1001, 1).view(7, 143), "b": drawn(2, 2), "empty": torch.empty(0), "half": drawn(90, 3).half()}


def server(coll: Communicator, layout: str, **more: Any) -> ParameterServer:
    settings: dict[str, Any] = {"rule": "add", "rules": RULES, "split_bytes": 8, "timeout": SECONDS}
    return ParameterServer(coll, tensors(), **(settings | SERVERS[layout] | more))


async def make_more(ps: ParameterServer) -> aiodist.ps.Table:
    """Make an object and a table known."""
    await ps.init("notes", {"epoch": 0}, codec=Json())
    return await ps.embedding("rows", 3, optimizer=Adagrad(lr=0.1))


IDS = torch.arange(0, 500, 7)


async def train(ps: ParameterServer, table: aiodist.ps.Table, seed: int) -> None:
    """Let rank 0 push to all tensors, by every rule."""
    if ps.rank == 0:
        for i, rule in enumerate([None, *RULES]):
            for name in ("w", "b", "half"):
                like = tensors()[name]
                await ps.push(name, drawn(like.numel(), seed + i).view_as(like).to(like.dtype), rule=rule)
        await ps.push("notes", {"epoch": seed})
        await table.push(IDS, drawn(3 * len(IDS), seed).view(-1, 3))
    await ps.barrier()


async def everything(ps: ParameterServer, table: aiodist.ps.Table) -> dict[str, Any]:
    """Return what the servers have, with versions."""
    names = list(tensors())
    pulled = [ps.pull(name, torch.empty_like(t)) for name, t in tensors().items()]
    found: dict[str, Any] = {name: (await pull).clone() for name, pull in zip(names, pulled, strict=True)}
    rows = table.pull(torch.arange(500))
    found |= {"rows": await rows, "notes": await ps.pull("notes")}
    return found | {"versions": [pull.version for pull in (*pulled, rows)]}


def assert_equal(seen: Mapping[str, Any], expected: Mapping[str, Any], *, bits: bool = True) -> None:
    """Compare bit by bit, or to rounding: torch's fused steps round by where a block ends."""
    assert seen.keys() == expected.keys()
    compare = torch.equal if bits else partial(torch.allclose, rtol=1e-5, atol=1e-6)
    for name, value in expected.items() if bits else [(k, v) for k, v in expected.items() if k != "half"]:
        same = compare(seen[name].float(), value.float()) if isinstance(value, Tensor) else seen[name] == value
        assert same, name


def kept(path: Path, keep: int | None = None, ranks: int = 5, layout: str = "3", **more: Any) -> dict[str, Any]:
    """Save once, then continue; return the values at the save."""

    async def main() -> dict[str, Any]:
        async with aiodist.init() as coll, server(coll, layout, **more) as ps:
            if not ps.is_worker:
                return {}
            table = await make_more(ps)
            await train(ps, table, 100)
            await ps.configure(["w", "rows"], lr=0.5) if more.get("rule") else None
            if ps.rank == 0:
                assert await ps.save(path, keep_last=keep) == path / "checkpoint-00000001"
            await ps.barrier()
            saved = await everything(ps, table)
            await ps.barrier()
            await train(ps, table, 200)
            return {"saved": saved, "after": await everything(ps, table)}

    return run_ranks(ranks, main)[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("rule", ["add", "adam"])
@pytest.mark.parametrize("layout", SERVERS)
def test_p11_another_number_of_servers_restores_every_bit(tmp_path: Path, layout: str, rule: str) -> None:
    """Three servers save; others load, and the same pushes come to the same: optimizers have their states."""
    more: Any = {"rule": RULES[rule]} if rule != "add" else {}
    expected = kept(tmp_path, **more)

    async def main() -> None:
        async with aiodist.init() as coll, server(coll, layout, **more) as ps:
            if not ps.is_worker:
                return
            table = await make_more(ps)
            await ps.barrier()
            if ps.rank == 0:
                assert await ps.load(tmp_path) == tmp_path / "checkpoint-00000001"
            await ps.barrier()
            assert_equal(await everything(ps, table), expected["saved"])
            await ps.barrier()
            await train(ps, table, 200)
            assert_equal(await everything(ps, table), expected["after"], bits=layout == "3")

    run_ranks(5, main)


@pytest.mark.thorough
@pytest.mark.ranks(3)
@pytest.mark.ranks(3, backend=("shm", "mpi"))
async def test_p11_a_checkpoint_amid_pushes_is_of_one_version(coll: Communicator, tmp_path: Path) -> None:
    """In each tensor, every element of every block and the state of the optimizer count the same steps."""
    path = Path(await coll.broadcast_object(str(tmp_path)))
    numels = {"small": 40, "large": 200_000}
    async with ParameterServer(
        coll, {name: torch.zeros(n) for name, n in numels.items()}, split_bytes=8, timeout=SECONDS
    ) as ps:
        ending = asyncio.Event()

        async def pushes() -> int:
            count = 0
            while not ending.is_set():
                await asyncio.gather(*[ps.push(name, torch.ones(n)) for name, n in numels.items()])
                count += 1
            return count

        pushing = asyncio.create_task(pushes())
        found = [str(await ps.save(path)) for _ in range(3 if coll.rank == 1 else 0)]
        await ps.init("done", torch.zeros(1), start="first") if coll.rank == 1 else None
        found = await coll.broadcast_object(found, root=1)
        ending.set()
        counts = await coll.allgather_object(await pushing)
        await ps.barrier()
        final = {name: float((await ps.pull(name))[0]) for name in numels}
        assert final == dict.fromkeys(numels, sum(counts)), "each push counts once"
        last = dict.fromkeys(numels, -1.0)
        for folder in found:
            await ps.load(folder) if coll.rank == 0 else None
            await ps.barrier()
            for name in numels:
                pull = ps.pull(name)
                [value] = (await pull).unique().tolist()
                assert value == pull.version
                assert last[name] <= value <= final[name]
                last[name] = value
            await ps.barrier()


@pytest.mark.ranks(2)
async def test_p11_memory_that_is_being_written_is_left_by_what_changes_it(
    coll: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    opened = os.open

    def stopped(path: Any, *how: Any) -> int:
        begun.set()
        return opened(path, *how) if go_on.wait(SECONDS) else -1

    path = Path(await coll.broadcast_object(str(tmp_path)))
    big = {"added": drawn(300_001, 5), "copied": drawn(300_001, 6), "adam": drawn(300_001, 7), "small": drawn(9, 8)}
    rules = {"added": "add", "copied": "copy", "adam": "adam", "small": "heavy"}
    async with ParameterServer(coll, big, rule="add", rules=RULES, servers=1, timeout=SECONDS) as ps:

        async def push(seed: int) -> None:
            for name, t in big.items():
                await ps.push(name, drawn(t.numel(), seed).view_as(t), rule=rules[name])

        async def pulled() -> dict[str, Tensor]:
            return {name: (await ps.pull(name, torch.empty_like(t))).clone() for name, t in big.items()}

        if ps.is_worker:
            for seed in (10, 11):
                await push(seed)
            monkeypatch.setattr(os, "open", stopped)
            before = await pulled()
            saving = ps.save(path)
            await asyncio.to_thread(begun.wait, SECONDS)
            for seed in (12, 13):
                await push(seed)
            after = await pulled()
            assert not any(torch.equal(before[name], after[name]) for name in big)
            assert not saving.done()
            go_on.set()
            await saving
            for _ in range(2):  # what was given back is used again
                await push(14)
            await ps.load(path)
            assert all(map(torch.equal, (await pulled()).values(), before.values()))
            for seed in (12, 13):
                await push(seed)
            assert all(map(torch.equal, (await pulled()).values(), after.values()))


def test_p11_residuals_of_codecs_are_restored(tmp_path: Path) -> None:
    """The pushes after a load include the residual, also for another number of servers."""

    def pushed(layout: list[int], first: int, last: int, load: bool) -> dict[str, Tensor]:
        async def main() -> dict[str, Tensor]:
            w, codec = {"w": torch.zeros(600), "v": torch.zeros(3)}, Remembering(TopK(0.1))
            async with (
                aiodist.init() as coll,
                ParameterServer(coll, w, codec=codec, servers=layout, workers=[0], split_bytes=8) as ps,
            ):
                if ps.rank:
                    return {}
                if load:
                    await ps.load(tmp_path)
                for seed in range(first, last):
                    await ps.push("w", drawn(600, seed))
                    await ps.push("v", drawn(3, seed))
                if not load:
                    await ps.save(tmp_path)
                found = {}
                for name, t in w.items():
                    found[name] = (await ps.pull(name)).clone()
                    await ps.push(name, torch.zeros_like(t))  # brings what was left out before
                    found[f"residual {name}"] = codec.last_given(ps, name, t, 8)
                return found

        return run_ranks(4, main)[0]

    before = pushed([1, 2, 3], 0, 3, load=False)
    after = pushed([3, 1], 3, 3, load=True)
    assert_equal(after, before)
    assert before["residual w"].abs().sum() > 1
    total = sum(drawn(600, seed) for seed in range(3))
    assert torch.allclose(after["w"] + after["residual w"], torch.as_tensor(total), atol=1e-5)


def test_p11_the_last_ones_are_kept_and_saves_come_one_after_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with aiodist.init() as coll, server(coll, "symmetric", consistency=Synchronous("sum")) as ps:
            saves = [ps.save(tmp_path, keep_last=2) for _ in range(2)]  # on all ranks at once
            names = {path.name for path in await aiodist.gather(*saves)}
            assert len(names) == 2
            await ps.barrier()

    run_ranks(3, main)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-00000005", "checkpoint-00000006"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def truncated(folder: Path) -> str:
    file = max(folder.glob("rank-*"), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size - 5)
    return rf"{file.name} has \d+ bytes: expected \d+"


def flipped(folder: Path) -> str:
    file = max(folder.glob("rank-*"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    return rf"{file.name}, bytes \d+ to \d+: tensor 'net/.*' is not as it was written"


def missing(folder: Path) -> str:
    (folder / "rank-00001.safetensors").unlink()
    return r"rank-00001.safetensors cannot be read"


def rewritten(folder: Path) -> str:
    file = folder / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"version":', b'"verzion":', 1))
    return r"manifest.json: the SHA-256"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("damage", [truncated, flipped, missing, rewritten])
def test_p11_a_damaged_checkpoint_changes_nothing(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    """The error names the damage; without a path to one, the newest sound checkpoint is loaded."""
    expected = kept(tmp_path)["saved"]

    async def main() -> None:
        async with aiodist.init() as coll, server(coll, "2") as ps:
            if not ps.is_worker:
                return
            table = await make_more(ps)
            await train(ps, table, 300)
            before = await everything(ps, table)
            if ps.rank == 0:
                newer = await ps.save(tmp_path)
                text = damage(newer)
                with pytest.raises(CheckpointDamaged, match=text):
                    await ps.load(newer)
            await ps.barrier()
            assert_equal(await everything(ps, table), before)
            await ps.barrier()
            if ps.rank == 0:
                assert await ps.load(tmp_path) == tmp_path / "checkpoint-00000001"
            await ps.barrier()
            found = await everything(ps, table)
            for name in ("w", "b", "half", "rows"):
                assert torch.equal(found[name], expected[name]), name

    run_ranks(5, main)


OTHERS: dict[str, tuple[dict[str, Tensor], str]] = {
    "a name less": (
        {"w": torch.zeros(4)},
        r"has a 'v': expected 'w', as passed to init\(\); the checkpoint has 'v', 'w'",
    ),
    "a name more": (
        {"w": torch.zeros(4), "v": torch.zeros(3), "x": torch.zeros(1)},
        r"has no 'x': expected 'v', 'w', 'x', as passed to init\(\); the checkpoint has 'v', 'w'",
    ),
    "a shape": ({"w": torch.zeros(2, 2), "v": torch.zeros(3)}, r"shape of 'w' is \[4\]: expected \[2, 2\]"),
    "a dtype": ({"w": torch.zeros(4), "v": torch.zeros(3).double()}, r"dtype of 'v' is float32: expected float64"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_p11_other_names_and_shapes_are_errors_and_change_nothing(tmp_path: Path, other: str) -> None:
    given, text = OTHERS[other]

    async def saves() -> None:
        async with (
            aiodist.init() as coll,
            ParameterServer(coll, {"w": torch.ones(4), "v": torch.ones(3)}, split_bytes=8) as ps,
        ):
            if ps.rank == 1:
                await ps.save(tmp_path)

    async def loads() -> None:
        w = {name: t.clone() for name, t in given.items()}
        async with aiodist.init() as coll, ParameterServer(coll, w, split_bytes=8, timeout=SECONDS) as ps:
            if ps.rank == 1:
                with pytest.raises(MismatchError, match=text):
                    await ps.load(tmp_path)
            await ps.barrier()
            assert all(not t.any() for t in await ps.pull())
            await ps.barrier()
            await ps.push("w", torch.ones_like(w["w"]))
            await ps.sync()

    run_ranks(2, saves)
    run_ranks(3, loads)


@pytest.mark.ranks(2)
async def test_p11_another_rule_with_a_state_is_an_error(coll: Communicator, tmp_path: Path) -> None:
    path = Path(await coll.broadcast_object(str(tmp_path)))
    for rule, text in ((Adam(lr=0.1), ""), (SGD(0.1, 0.9), "rule number 0, .* is Adam: expected SGD")):
        async with ParameterServer(coll, {"w": torch.zeros(4)}, rule=rule, timeout=SECONDS) as ps:
            await ps.push("w", torch.ones(4))
            await ps.barrier()
            if coll.rank == 0 and not text:
                await ps.save(path)
            elif coll.rank == 0:
                with pytest.raises(MismatchError, match=text):
                    await ps.load(path)
            await ps.barrier()


@pytest.mark.ranks(2)
async def test_p11_a_checkpoint_of_a_training_is_of_another_kind(coll: Communicator, tmp_path: Path) -> None:
    path = Path(await coll.broadcast_object(str(tmp_path)))
    module = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    module.weight.fill_(1.0)
    await aiodist.save(path / "training", module, coll=coll)
    async with ParameterServer(coll, {"weight": torch.zeros(1, 1)}, timeout=SECONDS) as ps:
        if coll.rank == 0:
            with pytest.raises(MismatchError, match=r"has module: expected a checkpoint of `ps\.save`"):
                await ps.load(path / "training")
            await ps.save(path / "server")
        await ps.barrier()
    with pytest.raises(ValueError, match="net is module, and the checkpoint has ParameterServer"):
        await aiodist.load(path / "server", module, coll=coll)
    assert module.weight.item() == 1.0


@pytest.mark.ranks(2)
async def test_p11_what_cannot_be_written_or_read_is_raised_on_await(coll: Communicator, tmp_path: Path) -> None:
    path = Path(await coll.broadcast_object(str(tmp_path)))
    (path / "file").touch() if coll.rank == 0 else None
    async with ParameterServer(coll, {"w": torch.zeros(4)}, timeout=SECONDS, consistency=Asynchronous()) as ps:
        with pytest.raises(ValueError, match="keep_last=0: expected"):
            ps.save(path, keep_last=0)
        with pytest.raises(RemoteError, match=r"FileNotFoundError: .*there is none"):
            await ps.load(path / "nothing")
        await ps.barrier()
        with pytest.raises(RemoteError, match=r"server 0 raised (FileExists|NotADirectory)Error"):
            await ps.save(path / "file")
        await ps.push("w", torch.ones(4))
        await ps.barrier()
        assert (await ps.pull("w")).tolist() == [2.0] * 4
        await ps.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("servers", [[0], [1], [0, 1]])
async def test_p11_a_tensor_that_is_freed_meanwhile_is_named(
    coll: Communicator, tmp_path: Path, servers: list[int]
) -> None:
    """The other servers had told so of a number, as RemoteError."""
    path = Path(await coll.broadcast_object(str(tmp_path / "runs")))
    large = torch.zeros(1 << 19)
    async with ParameterServer(coll, {"large": large, "gone": torch.zeros(5)}, servers=servers, workers=[0, 1]) as ps:
        saving = ps.save(path) if coll.rank == 0 else None
        pushes = [ps.push("large", torch.ones(1 << 19)) for _ in range(3)]
        await aiodist.gather(*pushes, ps.free("gone"))
        if saving is not None:
            error = await asyncio.wait_for(asyncio.gather(saving, return_exceptions=True), SECONDS)
            assert isinstance(error[0], Path | KeyError)  # it may have come before
            if isinstance(error[0], KeyError):
                assert "'gone' was freed" in str(error[0])
                assert [entry.name for entry in os.scandir(path)] == []
        await ps.barrier()
