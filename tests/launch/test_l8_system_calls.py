"""L8: the doctor says that a seccomp filter refuses the memory which ranks share, and the reaction of ranks."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

from aiodist.doctor.ask import Answer, ask_command
from aiodist.doctor.findings import fail, ok
from aiodist.doctor.here import memfd

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

NUMBERS = {
    "x86_64": {"memfd_create": 319, "fcntl": 72},
    "aarch64": {"memfd_create": 279, "fcntl": 25},
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


SECCOMP = "allow it in the container's seccomp profile (docker run --security-opt seccomp=unconfined allows all)"


def ask(code: str = "") -> Answer:
    """Return the answer of a process that runs `code` first."""
    return ask_command([sys.executable, "-c", f"from aiodist.doctor import probe\n{code}probe.memfd()"])


def test_l8_what_is_refused_is_named() -> None:
    assert memfd(ask()) == ok("ranks can share memory")
    said = "memfd_create and seals: PermissionError: [Errno 1] Operation not permitted"
    for call in NUMBERS:  # fcntl makes the seals
        assert memfd(ask(refusing(call))) == fail(said, SECCOMP)


def test_l8_what_a_kernel_lacks_has_no_remedy() -> None:
    said = "memfd_create and seals: OSError: [Errno 38] Function not implemented"
    assert memfd(ask(refusing("memfd_create", code=errno.ENOSYS))) == fail(said)


def test_l8_a_filter_that_kills_has_a_remedy() -> None:
    killed = ask("import os, signal\nos.kill(os.getpid(), signal.SIGSYS)\n")
    assert memfd(killed) == fail("memfd_create and seals: exit code -31", SECCOMP)


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


def test_l8_ranks_under_a_filter_give_the_same_results(plain: Launcher) -> None:
    (plain.folder / "work.py").write_text(WORK)
    plain.mpi = "none"
    code = f"{refusing('memfd_create')}\nimport os, sys\nos.execv(sys.argv[1], sys.argv[1:])"
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
    assert "sum: 900000.0 arena: True" in ended.stdout
    # ranks whose memory cannot be mapped count as hosts
    assert ended.stdout.splitlines()[1].strip() == "[0] why: the ranks are on 2 hosts"
