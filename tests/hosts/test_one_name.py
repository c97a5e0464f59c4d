"""Two containers with one name: they are two hosts for everything, since neither can map the other's memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hosts.conftest import TwoHosts

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(90)]

SAME = """
import json, socket
import aiodist

socket.gethostname = lambda: "same"

async def main():
    async with aiodist.init() as coll:
        ones = coll.arena_empty(1000).fill_(1)
        await coll.allreduce(ones)
        said = [coll.rank, coll.node, coll.local_rank, coll.local_size, *coll.hosts, ones[0].item()]
        print(json.dumps(said), flush=True)

aiodist.run(main())
"""


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_l5_hosts_of_one_name_and_one_kernel_are_two(any_hosts: TwoHosts, backend: str) -> None:
    if backend == "mpi":
        pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    script = any_hosts.script(SAME, "same.py")
    done = any_hosts.run(script, environ={"AIODIST_BACKEND": backend})
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines())
    assert said == [[rank, rank // 2, rank % 2, 2, "same", "same#2", 4.0] for rank in range(4)]
