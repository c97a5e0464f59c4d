"""L8: the doctor names each system call of shared memory that a seccomp filter refuses, and the reaction of ranks."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from aiodist.doctor.ask import Answer, ask_command
from aiodist.doctor.findings import Finding, State
from aiodist.doctor.here import system_calls

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

NUMBERS = {
    "x86_64": {"memfd_create": 319, "futex_waitv": 449, "process_vm_readv": 310, "fcntl": 72},
    "aarch64": {"memfd_create": 279, "futex_waitv": 449, "process_vm_readv": 270, "fcntl": 25},
}[platform.machine()]

# A filter for this process and all it starts: `refuse([numbers])`. Each of the numbers is answered with an errno.
FILTER = """
import ctypes, struct
def refuse(numbers, code):
    load = struct.pack("HBBI", 0x20, 0, 0, 0)  # the number of the call
    tests = [struct.pack("HBBI", 0x15, len(numbers) - i, 0, n) for i, n in enumerate(numbers)]
    ends = [struct.pack("HBBI", 0x06, 0, 0, verdict) for verdict in (0x7FFF0000, 0x00050000 | code)]  # allow, refuse
    program = b"".join([load, *tests, *ends])
    held = ctypes.create_string_buffer(program)
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    if prctl(38, 1, None, 0, 0) or prctl(22, 2, described, 0, 0):  # no new privileges; a filter
        raise OSError(ctypes.get_errno(), "prctl")
"""


def refusing(*calls: str, code: int = errno.EPERM) -> str:
    return f"{FILTER}\nrefuse({[NUMBERS[call] for call in calls]}, {code})\n"


def ask(code: str = "") -> Answer:
    """Return the answer of a process that runs `code` first."""
    return ask_command([sys.executable, "-c", f"from aiodist.doctor import probe\n{code}probe.calls()"])


def test_l8_what_is_refused_is_named() -> None:
    free = ask()
    assert free.said is not None
    assert free.said.keys() == {"memfd", "futex_waitv", "process_vm"}
    assert free.said["memfd"] == 0
    usual = {finding.name: finding.state for finding in system_calls(free)}
    for call, name, state in (
        ("memfd_create", "memfd", State.UNUSABLE),
        ("futex_waitv", "futex_waitv", State.LIMITED),
        ("process_vm_readv", "process_vm", State.LIMITED),
    ):
        found = {finding.name: finding for finding in system_calls(ask(refusing(call)))}
        assert {one: finding.state for one, finding in found.items()} == {**usual, name: state}
        assert found[name].detail.startswith(call)
        assert found[name].detail.endswith(": Operation not permitted")
        assert "seccomp=unconfined" in found[name].remedy


def test_l8_what_a_kernel_lacks_has_no_remedy() -> None:
    found = system_calls(ask(refusing("futex_waitv", "process_vm_readv", code=errno.ENOSYS)))
    assert found[1:] == [
        Finding("futex_waitv", State.LIMITED, "futex_waitv: Function not implemented"),
        Finding("process_vm", State.LIMITED, "process_vm_readv: Function not implemented"),
    ]


def test_l8_seals_and_other_processes_have_remedies() -> None:
    memfd, reading = system_calls(Answer({"memfd": errno.EINVAL, "process_vm": errno.EPERM}))
    assert memfd == Finding("memfd", State.UNUSABLE, "memfd_create and seals: Invalid argument")
    assert "kernel.yama.ptrace_scope=0" in reading.remedy
    (killed,) = system_calls(Answer(None, "exit code -31"))
    assert (killed.state, killed.detail) == (State.UNUSABLE, "the test failed: exit code -31")


WORK = """
import aiodist, torch
async def main():
    async with aiodist.init() as coll:
        t = coll.to_arena_(torch.full((300_000,), 1.0 + coll.rank))
        await coll.allreduce(t)
        if coll.rank == 0:
            print("sum:", t.sum().item(), "arena:", coll.arena_empty(1000).untyped_storage().resizable())
            print("why:", coll.availability().of("allreduce", "shm").reason, flush=True)
aiodist.run(main)
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("calls", [("futex_waitv", "process_vm_readv"), ("memfd_create",)], ids=lambda c: c[0])
def test_l8_ranks_under_a_filter_give_the_same_results(plain: Launcher, calls: tuple[str, ...]) -> None:
    (plain.folder / "work.py").write_text(WORK)
    plain.mpi = "none"
    code = f"{refusing(*calls)}\nimport os, sys\nos.execv(sys.argv[1], sys.argv[1:])"
    ended = subprocess.run(
        [sys.executable, "-c", code, *plain.command("work.py")],
        cwd=plain.folder,
        env=plain.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    shares = "memfd_create" not in calls
    assert f"sum: 900000.0 arena: {not shares}" in ended.stdout
    why = "" if shares else "the ranks are on 2 hosts"  # those whose memory cannot be mapped are
    assert ended.stdout.splitlines()[1].strip() == f"[0] why: {why}".strip()
