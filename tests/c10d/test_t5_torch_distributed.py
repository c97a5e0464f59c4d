"""`torch.distributed` on aiodist: what runs over gloo runs over "aiodist", with the same losses; see programs/."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.environ import python_path

Found = dict[tuple[str, int], dict[str, Any]]

PROGRAMS = Path(__file__).parent / "programs"
WAYS = (
    *("ddp", "ddp_static_graph", "ddp_comm_hook", "ddp_powersgd", "ddp_no_sync", "ddp_join", "ddp_sparse"),
    *("zero_redundancy_optimizer", "fsdp1", "fsdp2", "dtensor", "device_mesh", "pipeline", "checkpoint"),
    *("functional_collectives", "object_collectives", "groups", "coalescing", "messages", "uneven_alltoall"),
    *("channels_last", "operators"),
)
# Of torch's own tests: one of each kind.
DRAWN = (
    *("test_all_gather_coalesced_simple", "test_all_reduce_full_group_sum", "test_all_to_all_single_unequal_split"),
    *("test_barrier_full_group", "test_broadcast_group", "test_gather", "test_irecv"),
    *("test_scatter_group", "test_send_recv_any_source", "test_send_recv_with_tag", "test_DistributedDataParallelCPU"),
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def started(program: str, *args: object, size: int = 2, seconds: float = 110) -> list[tuple[int, str]]:
    """Run `size` ranks of a program by torch's variables; return each one's exit code and output."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **place}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), *map(str, args)],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what came of every way, by backend and rank."""
    folder = tmp_path_factory.mktemp("ways")
    for backend in ("gloo", "aiodist"):
        for code, output in started("every_way.py", backend, folder):
            assert code == 0, output
    return {(b, r): json.loads((folder / f"{b}-{r}.json").read_text()) for b in ("gloo", "aiodist") for r in (0, 1)}


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", WAYS)
def test_t5_comes_to_what_gloo_comes_to(found: Found, way: str) -> None:
    for rank in (0, 1):
        ours, theirs = found["aiodist", rank][way], found["gloo", rank][way]
        assert isinstance(ours, list), ours  # else a traceback
        assert ours == theirs


@pytest.mark.processes
def test_t5_every_way_is_compared(found: Found) -> None:
    assert set(WAYS) == set(found["aiodist", 0])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("own", "own ways agree"),
        ("opposite", "both orders agree"),
        ("differ", "the difference was told"),
    ],
)
def test_t5_beyond_gloo(way: str, said: str) -> None:
    for code, output in started("other_ways.py", way):
        assert code == 0, output
        assert said in output


@pytest.mark.processes
def test_t5_a_killed_rank_is_named_within_a_second() -> None:
    (code, output), _ = started("other_ways.py", "killed", "0.5")  # 0.5 s for a machine that does other things too
    assert code == 0, output
    assert "the loss was told" in output


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        ["aiodist.cli", "run", "-n", "2", "--mpi", "none"],
        ["aiodist.cli", "run", "-n", "2"],
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    ],
    ids=["aiodist", "aiodist-mpi", "torchrun"],
)
def test_t5_starters(command: list[str]) -> None:
    module, *rest = command
    main = "from aiodist.cli import main; main()" if module == "aiodist.cli" else ""
    start = ["-c", main, *rest] if main else ["-m", module, *rest]
    environ = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *start, str(PROGRAMS / "other_ways.py"), "start"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("started") == 2


@pytest.mark.processes
def test_t5_wrap_in_an_asyncio_program() -> None:
    for code, output in started("wrapped.py"):
        assert code == 0, output
        assert "side by side" in output


def test_t5_import_torch_loads_nothing_of_ours() -> None:
    assert not [point for point in metadata.entry_points(group="torch.backends") if "aiodist" in point.value]
    code = "import sys, torch, torch.distributed; assert not [m for m in sys.modules if m.startswith('aiodist')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def outcomes(folder: Path, names: Sequence[str], seconds: float) -> tuple[dict[str, str], set[str]]:
    started("torch_tests.py", folder, *names, size=3, seconds=seconds)
    lines = [json.loads(line) for r in range(3) for line in (folder / f"rank{r}.jsonl").read_text().splitlines()]
    return {name: why for name, end, why, _ in lines if end == "failed"}, {name for name, *_ in lines}


@pytest.mark.processes
def test_t5_some_of_torchs_own_tests(tmp_path: Path) -> None:
    failed, run = outcomes(tmp_path, DRAWN, 110)
    assert not failed, "\n".join(failed.values())
    assert run == set(DRAWN)
