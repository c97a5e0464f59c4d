"""`Environment.read` with the captured variables of each starter, shortened."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from aiodist.errors import ConfigError
from aiodist.testing.seams.world import Environment, Starter, servers

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-4242@1",
    "PRTE_LAUNCHED": "1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "ROLE_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "node1",
}
SALLOC = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_JOB_NODELIST": "node1"}
OURS = {"AIODIST_RENDEZVOUS": "tcp://127.0.0.1:4242", "AIODIST_TOKEN": "secret"}
PLACE = {"AIODIST_RANK": "1", "AIODIST_SIZE": "2", "AIODIST_LOCAL_RANK": "1", "AIODIST_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "starter", "mpi", "rendezvous"),
    [
        (OPENMPI, Starter.MPI, True, None),
        (MPICH, Starter.MPI, True, None),
        ({**SALLOC, **OPENMPI}, Starter.MPI, True, None),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2"}, Starter.MPI, True, None),
        (TORCHRUN, Starter.TORCHRUN, False, "env://"),
        ({**SRUN, **TORCHRUN}, Starter.TORCHRUN, False, "env://"),
        (SRUN, Starter.SLURM, False, "env://"),
        ({**OURS, **PLACE}, Starter.AIODIST, False, OURS["AIODIST_RENDEZVOUS"]),
        ({**OURS, **OPENMPI}, Starter.AIODIST, True, OURS["AIODIST_RENDEZVOUS"]),
        ({**OURS, **MPICH}, Starter.AIODIST, True, OURS["AIODIST_RENDEZVOUS"]),
        ({**SALLOC, **OURS, **PLACE}, Starter.AIODIST, False, OURS["AIODIST_RENDEZVOUS"]),
    ],
)
def test_l4_each_starter_is_recognised(
    environ: Mapping[str, str], starter: Starter, mpi: bool, rendezvous: str | None
) -> None:
    here = Environment.read(environ)
    assert (here.starter, here.rank, here.size) == (starter, 1, 2)
    assert (here.mpi, here.rendezvous) == (mpi, rendezvous)


@pytest.mark.parametrize("environ", [{}, SALLOC, {"RANK": "3"}, {"WORLD_SIZE": "4"}])
def test_l4_plain_python_is_one_rank(environ: Mapping[str, str]) -> None:
    here = Environment.read(environ)
    assert (here.starter, here.rank, here.size) == (Starter.ALONE, 0, 1)
    assert (here.mpi, here.rendezvous) == (False, None)


def test_l4_settings_are_read_under_any_starter() -> None:
    here = Environment.read({**OPENMPI, **OURS, "AIODIST_BACKEND": "gloo"})
    assert (here.backend, here.token) == ("gloo", "secret")
    here = Environment.read({"AIODIST_BACKEND": ""})
    assert (here.backend, here.token) == (None, "")


def test_l4_a_rendezvous_may_be_given_under_any_starter() -> None:
    given = "file:///shared/meet"
    for environ in (TORCHRUN, SRUN):
        assert Environment.read({**environ, "AIODIST_RENDEZVOUS": given}).rendezvous == given


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK='one': expected a whole number"),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=2"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
        ({**PLACE, "AIODIST_RANK": "-1"}, "AIODIST_RANK=-1 and AIODIST_SIZE=2"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x'"),
        ({**OURS, "AIODIST_RANK": "0"}, "AIODIST_SIZE is not set, though related variables are"),
        ({"AIODIST_SIZE": "2"}, "AIODIST_RANK is not set, though related variables are"),
        (
            {**PLACE, "AIODIST_PREVIOUS": "0,x"},
            "AIODIST_PREVIOUS='0,x': expected a rank or nothing for each of 2 ranks",
        ),
        ({**PLACE, "AIODIST_PREVIOUS": "0"}, "AIODIST_PREVIOUS='0': expected a rank or nothing for each of 2 ranks"),
        ({"AIODIST_SHM": "maybe"}, "AIODIST_SHM='maybe': expected 0 or 1"),
    ],
)
def test_l4_what_makes_no_sense_is_named(environ: Mapping[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Environment.read(environ)
    assert words in str(caught.value)


@pytest.mark.parametrize("place", [OPENMPI, MPICH, TORCHRUN, SRUN, {**OURS, **PLACE}, {}])
def test_l5_servers_are_read_under_any_starter(place: Mapping[str, str]) -> None:
    assert servers(5, {**place, "AIODIST_SERVERS": "2"}) == 2
    for none in ({}, {"AIODIST_SERVERS": ""}, {"AIODIST_SERVERS": "0"}):
        assert servers(5, {**place, **none}) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-1", "AIODIST_SERVERS=-1 of 3 ranks: expected 0 <= servers < ranks"),
        ("3", "AIODIST_SERVERS=3 of 3 ranks"),
        ("two", "AIODIST_SERVERS='two': expected a whole number"),
    ],
)
def test_l5_a_bad_number_of_servers_is_named(value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        servers(3, {"AIODIST_SERVERS": value})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "metrics", "seconds"),
    [
        ({}, None, None),
        ({"AIODIST_METRICS": "9400", "OTEL_METRIC_EXPORT_INTERVAL": "500"}, "9400", None),
        ({"AIODIST_METRICS": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, "otlp", 60.0),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "b", "OTEL_METRIC_EXPORT_INTERVAL": "500"}, None, 0.5),
    ],
)
def test_w13_the_place_of_metrics(given: dict[str, str], metrics: str | None, seconds: float | None) -> None:
    found = Environment.read(given)
    assert (found.metrics, found.otlp_interval) == (metrics, seconds)
