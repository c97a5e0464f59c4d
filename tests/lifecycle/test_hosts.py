"""The host of real processes: ranks with different kernels are on different hosts, also with equal host names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import aiodist
from tests.support.environ import python_path

ROOT = Path(aiodist.__file__).parents[1]
RANK = """
import asyncio, json, socket
import aiodist

NAME = "same"

async def main():
    socket.gethostname = lambda: NAME  # after gloo's own look-up of the real one, which is in C
    async with aiodist.init() as coll:
        ones = coll.arena_empty(1000).fill_(1)
        await coll.allreduce(ones)
        sharing = coll.availability().of("allreduce", "shm")
        print(json.dumps({
            "hosts": coll.topology.host_of, "nodes": coll.nodes, "local": (coll.local_rank, coll.local_size),
            "levels": str(coll.levels), "shared": sharing.state is sharing.state.AVAILABLE, "sum": ones[0].item(),
        }), flush=True)

aiodist.run(main())
"""
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def job(folder: Path, kernels: list[str], **environ: str) -> list[dict[str, Any]]:
    """Run a rank for each of `kernels`: the boot id of the kernel that it sees, "" for the true one."""
    (folder / "rank.py").write_text(RANK)
    ranks = []
    for rank, kernel in enumerate(kernels):
        command = [sys.executable, str(folder / "rank.py")]
        if kernel:
            file = folder / kernel
            file.write_text(f"{uuid.uuid5(uuid.NAMESPACE_DNS, kernel)}\n")
            command = ["unshare", "--mount", "sh", "-c", f'mount --bind {file} {BOOT_ID} && exec "$@"', "sh", *command]
        place = {"AIODIST_RANK": str(rank), "AIODIST_SIZE": str(len(kernels)), "AIODIST_TOKEN": "it"}
        where = {
            "AIODIST_RENDEZVOUS": (folder / "meet").as_uri(),
            "PYTHONPATH": python_path(),
        }
        everything = {**os.environ, **place, **where, **environ}
        ranks.append(
            subprocess.Popen(command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        ends = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(process.returncode for process in ranks), "\n".join(err for _, err in ends)
    return [json.loads(out) for out, _ in ends]


@pytest.mark.thorough
def test_ranks_of_one_kernel_are_one_host_also_where_memory_is_not_to_be_used(tmp_path: Path) -> None:
    for shm in ("1", "0"):
        said = job(tmp_path, ["", ""], AIODIST_SHM=shm)
        for rank, one in enumerate(said):
            assert (one["hosts"], one["nodes"], one["local"]) == (["same"] * 2, 1, [rank, 2])
            assert (one["shared"], one["sum"]) == (shm == "1", 2)


def test_hosts_of_one_name_and_different_kernels_are_two_for_everything(tmp_path: Path) -> None:
    allowed = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"no mounts of its own can be given to a process here: {allowed.stderr.decode()}")
    said = job(tmp_path, ["one", "other", "one"])
    for rank, one in enumerate(said):
        assert (one["hosts"], one["nodes"]) == (["same", "same#2", "same"], 2)
        assert one["local"] == [[0, 2], [0, 1], [1, 2]][rank]
        assert "same#2: rank" in one["levels"]
        assert (one["shared"], one["sum"]) == (False, 3)
