"""Command lines and environments, with no process: each option that removes a trap is there."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.launch import commands, discover
from aiodist.launch.hosts import Host
from aiodist.testing.seams.mpi import Flavour, Job, Mpi

OPENMPI = Mpi("/opt/ompi/bin/mpirun", Flavour.OPENMPI, "5.0.11", "/opt/ompi/lib/libmpi.so.40")
MPICH = Mpi("/opt/mpich/bin/mpirun", Flavour.MPICH, "5.0.2", "/opt/mpich/lib/libmpi.so.12")
OTHER = Mpi("/opt/x/bin/mpirun", Flavour.OTHER, "X 1", None)
GUARD = ["python", "-m", "guard"]


def job(*mpi_args: str, n: int = 4) -> Job:
    return Job(("train.py",), n, mpi_args=mpi_args)


def test_l5_openmpi_takes_more_ranks_than_cores_and_binds_none() -> None:
    assert commands.mpirun_command(job(), OPENMPI, GUARD) == [
        OPENMPI.mpirun,
        *("-n", "4"),
        *("--map-by", ":OVERSUBSCRIBE"),
        *("--bind-to", "none"),
        *GUARD,
    ]


def test_l5_openmpi_keeps_its_files_apart() -> None:
    ours = ["--prtemca", "prte_local_tmpdir_base", "/tmp/a"]
    command = commands.mpirun_command(job(), OPENMPI, GUARD, "/tmp/a")
    assert command[-len(GUARD) - len(ours) : -len(GUARD)] == ours
    for mpi in (replace(OPENMPI, version="4.1.6"), MPICH, OTHER):
        assert "/tmp/a" not in commands.mpirun_command(job(), mpi, GUARD, "/tmp/a")
    theirs = commands.mpirun_command(job("--prtemca", "prte_local_tmpdir_base", "/b"), OPENMPI, GUARD, "/tmp/a")
    assert "/tmp/a" not in theirs


def test_l5_openmpi_has_a_folder_for_the_memory_of_ranks_of_this_host() -> None:
    ours = ["--mca", "btl_sm_backing_directory", "/dev/shm/a"]
    command = commands.mpirun_command(job(), OPENMPI, GUARD, segments="/dev/shm/a")
    assert command[-len(GUARD) - len(ours) : -len(GUARD)] == ours
    theirs = commands.mpirun_command(job(*ours[:2], "/b"), OPENMPI, GUARD, segments="/dev/shm/a")
    assert "/dev/shm/a" not in theirs
    assert commands.segments_in(job(), OPENMPI, {}) == "/dev/shm"
    assert commands.segments_in(job(), OPENMPI, {"OMPI_MCA_btl_sm_backing_directory": "/b"}) == ""
    assert commands.segments_in(replace(job(), hosts=(Host("a", 4),)), OPENMPI, {}) == ""
    for mpi in (replace(OPENMPI, version="4.1.6"), MPICH, OTHER):
        assert commands.segments_in(job(), mpi, {}) == ""


def test_l5_mpich_and_others_take_the_number_alone() -> None:
    for mpi in (MPICH, OTHER):
        assert commands.mpirun_command(job(), mpi, GUARD) == [mpi.mpirun, "-n", "4", *GUARD]


def test_l5_the_users_arguments_replace_ours() -> None:
    command = commands.mpirun_command(job("--map-by", "core", "--bind-to=core"), OPENMPI, GUARD)
    assert command == [OPENMPI.mpirun, "-n", "4", "--map-by", "core", "--bind-to=core", *GUARD]


def test_l5_openmpi_runs_as_root_and_stays_silent() -> None:
    variables = commands.mpirun_environment(OPENMPI, {}, root=True)
    assert variables == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",
        "MPI4PY_LIBMPI": "/opt/ompi/lib/libmpi.so.40",
        "LD_LIBRARY_PATH": "/opt/ompi/lib",
    }
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in commands.mpirun_environment(OPENMPI, {}, root=False)
    assert commands.mpirun_environment(OPENMPI, {"OMPI_MCA_osc": "rdma"}, root=False)["OMPI_MCA_osc"] == "rdma"


def test_l5_mpi4py_loads_the_library_of_this_mpirun() -> None:
    environ = {"MPI4PY_LIBMPI": "/opt/ompi/lib/libmpi.so.40", "LD_LIBRARY_PATH": "/opt/ompi/lib:/opt/mpich/lib::/a"}
    assert commands.mpirun_environment(MPICH, environ, root=True) == {
        "MPI4PY_LIBMPI": "/opt/mpich/lib/libmpi.so.12",
        "LD_LIBRARY_PATH": "/opt/mpich/lib:/opt/ompi/lib:/a",
    }
    assert commands.mpirun_environment(OTHER, environ, root=True) == {}


def test_l5_a_system_library_needs_no_search_path() -> None:
    system = Mpi("/usr/bin/mpirun", Flavour.MPICH, "4", "/usr/lib/x86_64-linux-gnu/libmpich.so.12")
    assert commands.mpirun_environment(system, {}, root=True) == {"MPI4PY_LIBMPI": system.library}


def test_l5_what_another_launcher_wrote_is_not_inherited() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "3",
        "PMIX_RANK": "3",
        "PMI_FD": "7",
        "MPI_LOCALRANKID": "1",
        "AIODIST_RANK": "1",
        "AIODIST_TOKEN": "old",
        "AIODIST_SERVERS": "2",
        "OMPI_MCA_btl": "tcp,self",
        "HOME": "/root",
    }
    common = commands.common_variables(
        {**environ, "AIODIST_TRACE": "/outer", "AIODIST_STRAGGLERS": "1"}, "tcp://h:2", "new"
    )
    assert commands.inherited({"AIODIST_TRACE": "/mine"}) == {"AIODIST_TRACE": "/mine"}  # no rank: the user's
    assert common == {
        "OMPI_MCA_btl": "tcp,self",
        "HOME": "/root",
        "AIODIST_RENDEZVOUS": "tcp://h:2",
        "AIODIST_TOKEN": "new",
        "PYTHONUNBUFFERED": "1",
    }


def test_l5_the_number_of_servers_is_in_the_environment() -> None:
    place = ("tcp://h:2", "new")
    assert commands.common_variables({"AIODIST_SERVERS": "2"}, *place, 1)["AIODIST_SERVERS"] == "1"
    assert "AIODIST_SERVERS" not in commands.common_variables({"AIODIST_SERVERS": "2"}, *place)


def test_l5_without_mpi_the_place_is_in_the_environment() -> None:
    assert commands.place_variables(1, 3) == {
        "AIODIST_RANK": "1",
        "AIODIST_SIZE": "3",
        "AIODIST_LOCAL_RANK": "1",
        "AIODIST_LOCAL_SIZE": "3",
    }


def test_l5_exports_have_a_value_here_or_there() -> None:
    assert commands.exported(("A=1=2", "B", "C="), {"B": "b"}) == {"A": "1=2", "B": "b", "C": ""}
    for bad in ("D", "=1", ""):
        with pytest.raises(ConfigError, match="-x"):
            commands.exported((bad,), {"B": "b"})


def test_l5_the_guard_does_not_import_from_the_working_directory() -> None:
    assert commands.guard_command("h:1", Path("/tmp")) == [sys.executable, "-P", "-m", "aiodist.launch.worker", "h:1"]
    checkout = Path(commands.__file__).parents[2]
    assert "-P" not in commands.guard_command("h:1", checkout)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", (Flavour.OPENMPI, "4.1.4")),
        ("mpirun.real (OpenRTE) 2.1.1\n", (Flavour.OPENMPI, "2.1.1")),
        ("HYDRA build details:\n    Version:          4.0.2\n    CC:  gcc\n", (Flavour.MPICH, "4.0.2")),
        ("HYDRA build details:\n", (Flavour.MPICH, "")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", (Flavour.OTHER, None)),
        ("", (Flavour.OTHER, "")),
    ],
)
def test_l5_the_flavour_is_in_what_version_prints(text: str, expected: tuple[Flavour, str | None]) -> None:
    kind, version = commands.flavour(text)
    assert kind is expected[0]
    assert version == (text if expected[1] is None else expected[1])


# Looking for it


def fake_mpirun(prefix: Path, answer: str, library: str | None = None, name: str = "mpirun") -> str:
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    program = prefix / "bin" / name
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    if library is not None:
        (prefix / "lib").mkdir(exist_ok=True)
        (prefix / "lib" / library).write_text("")
    return str(program)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python in a folder without an mpirun."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    return tmp_path


def test_l5_the_mpirun_beside_python_comes_before_the_path(elsewhere: Path) -> None:
    other = fake_mpirun(elsewhere / "b", "mpirun (Open MPI) 4.0.0", "libmpi.so.40")
    beside = fake_mpirun(elsewhere / "venv", "HYDRA build details:\n  Version: 4.3", "libmpi.so.12")
    path = os.path.dirname(other)
    pytest.importorskip("mpi4py")
    library = str(elsewhere / "venv" / "lib" / "libmpi.so.12")
    assert discover.find_mpi("auto", path) == Mpi(beside, Flavour.MPICH, "4.3", library)
    found = discover.find_mpi("openmpi", path)
    assert found is not None
    assert (found.mpirun, found.library) == (other, str(elsewhere / "b" / "lib" / "libmpi.so.40"))


def test_l5_auto_passes_over_an_unknown_kind(elsewhere: Path) -> None:
    unknown = fake_mpirun(elsewhere / "b", "Intel(R) MPI Library")
    assert discover.find_mpi("auto", os.path.dirname(unknown)) is None
    given = discover.find_mpi(unknown, "")
    assert given is not None
    assert given.flavour is Flavour.OTHER


def test_l5_a_missing_mpi_says_what_to_install(elsewhere: Path) -> None:
    with pytest.raises(BackendUnavailable, match="pip install mpi4py mpich"):
        discover.find_mpi("mpich", str(elsewhere))


def test_l5_none_looks_nowhere(elsewhere: Path) -> None:
    assert discover.find_mpi("none", str(elsewhere)) is None


def test_l5_auto_is_one_rank_per_visible_gpu(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "\n".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})" for i in range(4))
    fake_mpirun(elsewhere, listing, name="nvidia-smi")
    monkeypatch.setenv("PATH", f"{elsewhere / 'bin'}:{os.environ['PATH']}")
    assert discover.gpu_names() == ["NVIDIA H200"] * 4
    assert discover.auto_ranks({}) == 4
    assert discover.auto_ranks({"CUDA_VISIBLE_DEVICES": "0,2"}) == 2
    assert discover.auto_ranks({"CUDA_VISIBLE_DEVICES": "-1"}) == len(os.sched_getaffinity(0))
    assert discover.auto_ranks({"CUDA_VISIBLE_DEVICES": ""}) == len(os.sched_getaffinity(0))
