"""`aiodist doctor` on two hosts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hosts.conftest import TwoHosts

pytestmark = [pytest.mark.drawn(1), pytest.mark.timeout(90)]


def test_l8_hosts_are_fine(hosts: TwoHosts) -> None:
    hosts.script("print(1)")
    done = hosts.doctor("--hosts", "alpha,beta", "--mpi", hosts.mpi, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["usable"]
    assert said["verdict"].startswith("ready: a rank on each of 2 hosts met")
    for name, address in (("alpha", hosts.alpha.address), ("beta", hosts.beta.address)):
        found = said["findings"][name]
        assert found.keys() >= EVERY_CHECK
        assert ("MPI" in found) == (hosts.mpi != "none")
        assert {finding["state"] for finding in found.values()} <= {"ok", "warn"}
        assert found["ports"]["detail"] == f"open, at {address}"
        assert found["folder"]["detail"] == str(hosts.folder)


def test_l8_hosts_that_cannot_answer_are_found(any_hosts: TwoHosts) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    any_hosts.beta.do(f"ip route add unreachable {any_hosts.alpha.address}/32")
    try:
        done = any_hosts.doctor("--hosts", "alpha,beta")
    finally:
        any_hosts.beta.do(f"ip route del unreachable {any_hosts.alpha.address}/32")
    assert done.returncode == 1, done.stdout + done.stderr
    said = json.loads(done.stdout)
    ports = said["findings"]["beta"]["ports"]
    assert ports["state"] == "fail"
    assert "No route to host" in ports["detail"]
    assert "firewall" in ports["remedy"]
    assert said["verdict"].startswith("not ready: beta: ports: ")


EVERY_CHECK = {"reachable", "Python", "torch", "aiodist", "source", "folder", "script", "ports", "cores"}
