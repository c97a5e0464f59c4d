"""`aiodist run --as`: the variables of its ranks, and the options that exclude one another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiodist.errors import ConfigError
from aiodist.launch import commands
from aiodist.launch.commands import Job
from aiodist.launch.hosts import Host

START_UP = Path(__file__).resolve().parents[2] / "aiodist" / "alias" / "ranks"


def test_t8_an_unknown_name_and_options_that_exclude_it_are_errors() -> None:
    with pytest.raises(ConfigError, match="--as ucc: expected one of gloo, nccl, mpi"):
        Job(("train.py",), 2, alias="ucc")
    with pytest.raises(ConfigError, match="--as gloo with --elastic: all ranks are in one process group"):
        Job(("train.py",), 2, alias="gloo", elastic=(1, 2))
    with pytest.raises(ConfigError, match="--as gloo with --servers"):
        Job(("train.py",), 2, alias="gloo", servers=1)


def test_t8_ranks_have_the_variables_of_torchrun() -> None:
    def of(job: Job, rank: int) -> dict[str, str]:
        return commands.alias_variables(job, rank, 1234, "/mine")

    assert of(Job(("train.py",), 3), 1) == {}
    alone = of(Job(("train.py",), 3, alias="gloo"), 1)
    assert alone == {
        **{"AIODIST_AS": "gloo", "PYTHONPATH": f"{START_UP}:/mine", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": "1234", "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"},
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": f"aiodist-{os.getpid()}"},
    }
    job = Job(("train.py",), 5, alias="gloo", hosts=(Host("me@a", 2), Host("b", 3)))
    places = [of(job, rank) for rank in range(5)]
    assert [(p["GROUP_RANK"], p["LOCAL_RANK"], p["LOCAL_WORLD_SIZE"]) for p in places] == [
        *(("0", "0", "2"), ("0", "1", "2")),
        *(("1", "0", "3"), ("1", "1", "3"), ("1", "2", "3")),
    ]
    assert {(p["GROUP_WORLD_SIZE"], p["MASTER_ADDR"], p["WORLD_SIZE"]) for p in places} == {("2", "a", "5")}


def test_t8_a_job_that_a_rank_starts_inherits_nothing() -> None:
    rank = {**commands.alias_variables(Job(("train.py",), 2, alias="gloo"), 0, 1, ""), "AIODIST_TOKEN": "t"}
    assert commands.inherited(rank).keys() == {"PYTHONPATH"}
    assert commands.inherited({"RANK": "1", "AIODIST_AS": "gloo"}) == {"RANK": "1", "AIODIST_AS": "gloo"}
