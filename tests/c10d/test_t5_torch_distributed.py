"""`torch.distributed` on aiodist: what runs over gloo runs over "aiodist", with the same losses; see programs/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from aiodist.c10d import Home
from aiodist.errors import BackendUnavailable, OperationTimeout
from aiodist.testing.seams.mpi import find_mpi, mpirun_environment
from tests.support.environ import python_path
from tests.support.nursed import stub
from tests.support.torch_ranks import run_alone, started

Found = dict[tuple[str, int], dict[str, Any]]

PROGRAMS = Path(__file__).parent / "programs"
WAYS = (
    *(
        "ddp",
        "ddp_static_graph",
        "ddp_comm_hook",
        "ddp_hooks_in_cpp",
        "ddp_powersgd",
        "ddp_no_sync",
        "ddp_join",
        "ddp_sparse",
    ),
    *("zero_redundancy_optimizer", "fsdp1", "fsdp2", "dtensor", "device_mesh", "pipeline", "checkpoint"),
    *("functional_collectives", "object_collectives", "groups", "coalescing", "messages", "uneven_alltoall"),
    *("channels_last", "operators", "ddp_hook_of_its_own", "ddp_unused_parameters"),
    *("ddp_post_local_sgd", "fsdp2_mixed_precision", "dtensor_layouts", "pipeline_1f1b"),
    *("checkpoint_in_the_background", "autograd_collectives", "works"),
)


@pytest.fixture(scope="module")
def found(nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what came of every way, by backend and rank."""
    folder = tmp_path_factory.mktemp("ways")
    for backend in ("gloo", "aiodist"):
        for code, output in started(PROGRAMS / "every_way.py", backend, folder, nursery=nursery):
            assert code == 0, output
    return {(b, r): json.loads((folder / f"{b}-{r}.json").read_text()) for b in ("gloo", "aiodist") for r in (0, 1)}


@pytest.mark.drawn(3)
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
@pytest.mark.timeout(240)
def test_t5_every_signature_of_torchs_process_group(nursery: str, tmp_path: Path) -> None:
    """The signatures of the installed torch, called by position and by name, have the results of gloo."""
    for backend in ("gloo", "aiodist"):
        for code, output in started(PROGRAMS / "every_signature.py", backend, tmp_path, nursery=nursery):
            assert code == 0, output
    for rank in (0, 1):
        theirs, ours = (json.loads((tmp_path / f"{b}-{rank}.json").read_text()) for b in ("gloo", "aiodist"))
        assert {name: value for name, value in ours.items() if name in theirs} == theirs
        assert len(theirs) > 100
        assert all(name.startswith("alltoall ") for name in ours.keys() - theirs.keys())


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["destroy", "drop", pytest.param("leave", marks=pytest.mark.thorough)])
def test_t5_a_process_waits_at_exit_for_callbacks_of_futures(end: str) -> None:
    """A thread inside torch at the end of the interpreter would abort the rank."""
    for code, output in started(PROGRAMS / "callback_at_exit.py", end):
        assert code == 0, output


@pytest.mark.processes
@pytest.mark.timeout(30)
def test_t5_the_groups_timeout_bounds_the_meeting() -> None:
    """One rank of two comes: the group's 1 s counts, not the 60 s of the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with pytest.raises(DistStoreError, match=r"timeout after 1000ms.*rank 1 did not come .* within 1 s") as raised:
        Home.open(store, 0, 2, 1.0)
    assert isinstance(raised.value.__cause__, OperationTimeout)
    assert raised.value.__cause__.late == {1: "never came"}


@pytest.mark.drawn(1)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("own", "own ways agree"),
        ("layouts", "all layouts agree"),
        ("sizes", "sizes are correct"),
        ("opposite", "both orders agree"),
        ("shared", "right or told"),
        ("arena", "in the arena"),
        ("differ", "the mismatch was raised"),
        ("late", "the late rank was named"),
        ("debugged", "the threads were shown"),
    ],
)
def test_t5_beyond_gloo(nursery: str, way: str, said: str) -> None:
    for rank, (code, output) in enumerate(started(PROGRAMS / "other_ways.py", way, nursery=nursery)):
        assert code == 0, output
        assert said in output or (way, rank) == ("late", 1)


@pytest.mark.processes
def test_t5_a_program_that_raises_ends(nursery: str) -> None:
    for code, output in started(PROGRAMS / "other_ways.py", "raised", seconds=30, nursery=nursery):
        assert code == 1
        assert "has had enough" in output


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_t5_ranks_meet_again_over_the_same_store(nursery: str) -> None:
    """Keys of an earlier group must not count: a rank would look for the hub of that group, and wait."""
    for code, output in started(PROGRAMS / "meets_again.py", size=3, seconds=50, nursery=nursery):
        assert (code, output) == (0, "met three times\n")


@pytest.mark.processes
def test_t5_an_end_that_raises_leaves_no_group(nursery: str) -> None:
    ends = started(PROGRAMS / "other_ways.py", "unequal", nursery=nursery)
    assert [code for code, _ in ends] == [0, 0], ends
    assert any("the error of the end: MismatchError" in output for _, output in ends)


@pytest.mark.processes
def test_t5_a_killed_rank_is_named_within_a_second(nursery: str) -> None:
    (code, output), _ = started(PROGRAMS / "other_ways.py", "killed", nursery=nursery)
    assert code == 0, output
    assert "the loss was told" in output


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["aborted", "dropped", "shut down"])
def test_t5_groups_that_are_given_up_leave_nothing(way: str) -> None:
    """A second round of as many groups leaves no more threads, descriptors and maps than the first did.

    The program ends with its own exit code, after its at-exit calls.
    """
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "given_up.py"), way, "10"],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all flat" in done.stdout, done.stdout
    assert "at-exit ran" in done.stdout, done.stdout
    assert "Traceback" not in done.stderr, done.stderr


_ABORTS = (
    "a group is being made",
    "a collective is in flight",
    "from many threads",
    "on the loop's own thread",
    "the group is being closed",
    "after it was closed",
    "as the collector finds it",
)


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize("when", _ABORTS)
def test_t5_an_abort_ends_at_any_time(when: str) -> None:
    """In seconds, with the threads of the group: also as a part of garbage that a thread of a loop collects."""
    assert "all ended" in run_alone(PROGRAMS / "abort_at_any_time.py", when)


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "words"), [("abort", "told: Connection closed by peer: "), ("shutdown", "rank 2: left")]
)
def test_t5_a_peer_that_is_gone_is_told_in_the_words_of_gloo(end: str, words: str) -> None:
    """One that closes in a thread, where no line of the program calls, "left"."""
    said = run_alone(PROGRAMS / "peer_gone.py", end)
    assert said.count(words) == 2, said


@pytest.mark.drawn(1)
@pytest.mark.processes
@pytest.mark.parametrize("gone", ["0", "1", "2"])
def test_t5_an_abort_leaves_a_message_between_two_others_alone(gone: str) -> None:
    """Operations with the lost rank fail meanwhile."""
    said = run_alone(PROGRAMS / "message_apart.py", gone)
    assert said.count("told: Connection closed by peer") == 3, said
    assert "whole" in said, said


def command(starter: str) -> tuple[list[str], dict[str, str]]:
    """Return what starts two ranks, and the variables that it needs; skip the test where its MPI is missing."""
    if starter == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], {}
    name, _, kind = starter.partition(" ")
    aiodist = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi"]
    if kind == "none":
        return [*aiodist, kind], {}
    named = kind
    if kind == "mpich" and (prefix := os.environ.get("AIODIST_TEST_MPICH")):
        named = str(Path(prefix) / "bin" / "mpirun")
    try:
        found = find_mpi(named, os.environ.get("PATH", os.defpath))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert found is not None
    if name == "aiodist":
        return [*aiodist, named], {}
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if kind == "openmpi" else []
    variables = mpirun_environment(found, os.environ, root=os.geteuid() == 0)
    return [found.mpirun, *options, "-n", "2", sys.executable], variables


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize("starter", ["aiodist none", "aiodist openmpi", "torchrun", "mpirun openmpi", "mpirun mpich"])
def test_t5_starters(nursery: str, starter: str) -> None:
    start, variables = command(starter)
    done = subprocess.run(
        [*start, *stub(nursery, PROGRAMS / "other_ways.py", "start")],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("started") == 2


@pytest.mark.thorough
@pytest.mark.processes
def test_t5_wrap_in_an_asyncio_program(nursery: str) -> None:
    for code, output in started(PROGRAMS / "wrapped.py", nursery=nursery):
        assert code == 0, output
        assert "side by side" in output


@pytest.mark.processes
def test_t5_calls_raise_the_versions_of_what_they_write(nursery: str) -> None:
    for code, output in started(PROGRAMS / "versions.py", nursery=nursery):
        assert code == 0, output
        assert "versions" in output


@pytest.mark.thorough
@pytest.mark.processes
def test_t5_tensors_that_overlap_give_what_copies_give_or_are_refused(nursery: str) -> None:
    for code, output in started(PROGRAMS / "overlaps.py", nursery=nursery):
        assert code == 0, output
        assert "overlaps" in output


@pytest.mark.thorough
def test_t5_import_torch_loads_nothing_of_ours() -> None:
    assert not [point for point in metadata.entry_points(group="torch.backends") if "aiodist" in point.value]
    code = "import sys, torch, torch.distributed; assert not [m for m in sys.modules if m.startswith('aiodist')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


_FOUND = """
import sys, torch.distributed as dist
try:
    dist.Backend._ensure_backend_registered("aiodist")  # what init_process_group does from torch 2.14 on
except AttributeError:
    from importlib.metadata import entry_points
    [point] = entry_points(group="torch.distributed.backends", name="aiodist")
    point.load()()
assert "aiodist" in dist.Backend.backend_list
dist.init_process_group("aiodist", store=dist.HashStore(), rank=0, world_size=1)
print(type(dist.group.WORLD).__name__)
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_t5_torch_finds_the_backend_by_itself() -> None:
    done = subprocess.run([sys.executable, "-c", _FOUND], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "AiodistProcessGroup\n"), done.stderr
