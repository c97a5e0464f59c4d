"""Processes that keep the cores busy: one on each, and none is left behind."""

import os
import select
import subprocess
import sys

import pytest

import aiodist
from aiodist.testing import run_ranks
from benchmarks.busy import cores_to_keep_busy, spinning
from tests.support.environ import python_path


def test_t1_a_process_spins_on_every_core_while_the_block_runs() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with spinning(cores) as ids:
        assert [os.sched_getaffinity(pid) for pid in ids] == [{core} for core in cores]
    for pid in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


LEAVES = """
import os, sys
from benchmarks.busy import spinning
with spinning([min(os.sched_getaffinity(0))]) as ids:
    print(*ids, flush=True)
    sys.stdin.read()
    os._exit(1)  # as if killed: nothing is cleaned up
"""


def test_t1_spinning_processes_end_with_the_process_that_started_them() -> None:
    command = [sys.executable, "-c", LEAVES]
    environ = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdin is not None
        spinner = os.pidfd_open(int(starter.stdout.readline()))
        starter.stdin.close()
        assert select.select([spinner], [], [], 30)[0] == [spinner]  # it is gone
    os.close(spinner)


def test_t1_one_rank_of_a_host_keeps_its_cores_busy() -> None:
    async def main() -> tuple[int, ...]:
        async with aiodist.init() as coll:
            return await cores_to_keep_busy(coll)

    cores = tuple(sorted(os.sched_getaffinity(0)))
    assert run_ranks(3, main) == [cores, (), ()]
