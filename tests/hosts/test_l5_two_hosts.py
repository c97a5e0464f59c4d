"""A job on two hosts: where its ranks are, that everything works between them, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.hosts.conftest import TwoHosts

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(90)]

# Everything in one job, since starting one takes seconds; each check prints its observations.
EVERYTHING = """
    import asyncio, json, os, socket, sys
    import torch
    import aiodist
    from tests.support.conformance import MOVES, REDUCTIONS, cases, check

    async def main():
        async with aiodist.init(timeout=30) as coll:
            place = {
                "host": socket.gethostname(), "rank": coll.rank, "node": coll.node, "local_rank": coll.local_rank,
                "hosts": list(coll.topology.hosts), "folder": os.getcwd(), "given": os.environ.get("GIVEN"),
                "inherited": os.environ.get("INHERITED"), "home": os.environ.get("HOME"), "argument": sys.argv[1],
            }
            checked = 0
            for operation in (*REDUCTIONS, *MOVES):
                for case in cases(operation, coll.size, limit=4, seed=11):
                    await check(coll, case)
                    checked += 1
            far = (coll.rank + 2) % 4  # on the other host
            large = coll.send(torch.full((300_000,), float(coll.rank)), far, tag=7)
            place["message"] = (await coll.recv(src=far, tag=7))[-1].item()
            await large
            place["objects"] = await coll.allgather_object({"rank": coll.rank, "text": "x" * coll.rank})
            halves = await coll.split(coll.node)
            place["within"] = (await halves.allreduce(torch.ones(3) * coll.rank)).tolist()
            place["checked"] = checked
            print(json.dumps(place), flush=True)

    aiodist.run(main())
"""


def test_l5_hosts_do_everything_that_one_does(hosts: TwoHosts) -> None:
    script = hosts.script(EVERYTHING)
    done = hosts.run("-x", "GIVEN=a b", script, "--lr=1", environ={"INHERITED": "yes"})
    assert done.returncode == 0, done.stdout + done.stderr
    said = by_rank(done.stdout)
    assert sorted(said) == [0, 1, 2, 3]
    for rank, place in said.items():
        host = ("alpha", "beta")[rank // 2]
        assert (place["host"], place["node"], place["local_rank"]) == (host, rank // 2, rank % 2)
        assert place["hosts"] == ["alpha", "beta"]
        assert (place["folder"], place["argument"]) == (str(hosts.folder), "--lr=1")
        assert (place["given"], place["inherited"]) == ("a b", "yes")
        assert place["message"] == (rank + 2) % 4
        assert place["objects"] == [{"rank": r, "text": "x" * r} for r in range(4)]
        assert place["within"] == [1.0 if rank < 2 else 5.0] * 3
        assert place["checked"] > 100
    assert said[2]["home"] == "/", "what belongs to a host is not carried to another"


def test_l5_hosts_have_as_many_ranks_as_was_said(hosts: TwoHosts) -> None:
    hosts.script("import socket; print(socket.gethostname())", "where.py")
    (hosts.folder / "hostfile").write_text("# where to\nalpha slots=1\n\nbeta:3  # more\n")
    run = ["run", "--mpi", hosts.mpi, "--hostfile", "hostfile", "--rsh", hosts.rsh, "--log-dir", "logs", "where.py"]
    done = subprocess.run(hosts.aiodist(*run), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] alpha", "[1] beta", "[2] beta", "[3] beta"]
    assert (hosts.folder / "logs/rank-3.out").read_text() == "beta\n"


def test_l5_hosts_all_end_when_a_rank_on_another_dies(hosts: TwoHosts) -> None:
    script = hosts.script("""
        import os, pathlib, signal, threading
        import aiodist

        async def main():
            async with aiodist.init() as coll:
                await coll.barrier()
                past = [pathlib.Path(f"past-{rank}") for rank in range(4)]
                past[coll.rank].touch()
                if coll.rank == 3:
                    while not all(path.exists() for path in past):  # who is still in the barrier would fail there
                        threading.Event().wait(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()

        aiodist.run(main())
    """)
    done = hosts.run(script)
    assert (done.returncode, causes(done.stderr)) == (128 + signal.SIGKILL, ["rank 3: signal SIGKILL"])
    assert hosts.left_after(3) == []


def test_l5_hosts_hear_of_an_error_on_another(hosts: TwoHosts) -> None:
    script = hosts.script("""
        import asyncio, sys
        import aiodist

        async def main():
            async with aiodist.init() as coll:
                await coll.barrier()
                if coll.rank == 3:
                    sys.exit(7)
                try:
                    await coll.recv(src=3)
                except aiodist.errors.PeerError as error:
                    print("heard of", error.lost if hasattr(error, "lost") else 3, flush=True)
                    raise

        aiodist.run(main())
    """)
    done = hosts.run(script)
    assert done.returncode == 7, done.stdout + done.stderr
    assert causes(done.stderr)[0] == "rank 3: exit code 7"
    assert {f"[{rank}] heard of 3" for rank in range(3)} == set(done.stdout.splitlines())
    assert hosts.left_after(3) == []


def test_l5_hosts_pass_signals_on(hosts: TwoHosts) -> None:
    hosts.script("import signal; print('ready', flush=True); signal.pause()", "forever.py")
    with subprocess.Popen(hosts.command("forever.py"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = {process.stdout.readline() for _ in range(4)}
        assert ready == {f"[{rank}] ready\n" for rank in range(4)}
        launcher = next(pid for pid in hosts.alpha.processes() if parent(pid) == os.getpid())
        os.kill(launcher, signal.SIGINT)
        assert process.wait(20) == 130
    assert hosts.left_after(3) == []


def test_l5_hosts_with_a_slow_link_still_work(any_hosts: TwoHosts) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    script = any_hosts.script("""
        import asyncio, time
        import torch
        import aiodist

        async def main():
            async with aiodist.init(timeout=60) as coll:
                t = torch.ones(4 << 20)
                await coll.allreduce(t)
                start = time.perf_counter()
                await coll.allreduce(t)
                print("took", time.perf_counter() - start, float(t[-1]), flush=True)

        aiodist.run(main())
    """)
    with any_hosts.slow("1gbit"):
        before = any_hosts.bytes_sent()
        done = any_hosts.run(script)
        sent = any_hosts.bytes_sent() - before
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = [float(line.split()[2]) for line in done.stdout.splitlines()]
    assert [line.split()[3] for line in done.stdout.splitlines()] == ["16.0"] * 4
    # Two hosts exchange at least the 16 MiB once each way, which this link carries in 0.134 s.
    assert min(seconds) > 0.1
    assert sent > 4 * (16 << 20)


def test_l5_hosts_that_are_wrong_are_named(hosts: TwoHosts) -> None:
    hosts.script("print('never')", "never.py")
    done = hosts.run("never.py", hosts="alpha:1,gamma:1")
    assert done.returncode == 2
    assert "rsh: no host gamma" in done.stderr
    assert "aiodist doctor --hosts alpha:1,gamma:1" in done.stderr
    assert hosts.mpi == "none" or "never" not in done.stdout  # without an MPI each host starts its ranks by itself
    assert hosts.left_after(5) == []


def causes(stderr: str) -> list[str]:
    """The lines that say who died: those without a rank's prefix."""
    return [line for line in stderr.splitlines() if not line.startswith("[")]


def by_rank(stdout: str) -> dict[int, dict[str, Any]]:
    said = (json.loads(line.partition(" ")[2]) for line in stdout.splitlines())
    return {place["rank"]: place for place in said}


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
