"""P12 between processes: a server is killed amid pushes, a new rank takes its place, and each push counts once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

pytestmark = [pytest.mark.drawn(1), pytest.mark.parametrize("run", ["none"], indirect=True)]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_p12_each_push_counts_once_where_a_server_process_is_killed(run: Run, backend: str, tmp_path: Path) -> None:
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("ps_elastic.py", str(tmp_path), n=4, options=("--elastic", "3:4"))
    assert ended.code == 0, ended
    for rank in (0, 1):
        *lost, found = ended.said(rank)
        assert {line[:6] for line in lost} == {"lost: "}, ended
        assert found == f"found: [[300.0], [300.0]] {rank} of 4", ended


@pytest.mark.parametrize(("servers", "dies"), [(1, "worker"), (2, "worker"), (2, "server")])
def test_p12_servers_that_wait_at_the_end_of_the_block_go_on_by_themselves(
    run: Run, servers: int, dies: str, tmp_path: Path
) -> None:
    n = 2 + servers
    ended = run("ps_loop.py", str(tmp_path), str(servers), dies, n=n, options=("--elastic", "1:4"))
    assert ended.code == 0, ended
    for rank in set(range(n)) - {1 if dies == "worker" else n - 1}:
        said = "serves" if rank >= 2 else "2 rounds, at least 40: True"
        assert ended.said(rank) == [f"rank {rank}: {said}", f"rank {rank}: left"], ended
