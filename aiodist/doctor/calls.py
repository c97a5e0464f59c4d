"""The system calls that ranks of a host share memory with: which of them this kernel has, and lets processes use."""

from __future__ import annotations

import errno
import os

from aiodist.doctor.report import Answer, Finding, State

# Run in a process of its own, since a filter may kill for such a call. `process_vm_readv` of oneself meets filters
# alone; of a process that is no child, as among ranks, it also meets kernel.yama.ptrace_scope.
ASK_CALLS = """
import ctypes, errno, fcntl, json, os
libc = ctypes.CDLL(None, use_errno=True)
byte = ctypes.create_string_buffer(1)

class Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]

def memfd():
    os.close(os.memfd_create("aiodist-doctor", os.MFD_CLOEXEC))

def seals():
    fd = os.memfd_create("aiodist-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    os.close(fd)

def futex_waitv():
    libc.syscall(ctypes.c_long(449), None, 0, 0, None, 0)  # of no futex: EINVAL where it is known
    if ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), "")

def process_vm_readv(pid=0):
    here = Range(ctypes.addressof(byte), 1)
    if libc.process_vm_readv(pid or os.getpid(), ctypes.byref(here), 1, ctypes.byref(here), 1, 0) != 1:
        raise OSError(ctypes.get_errno(), "")

def of_another():
    parent, child = os.getpid(), os.fork()
    if not child:
        os._exit(tried(lambda: process_vm_readv(parent)))
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(code, "")

def tried(call):
    try:
        call()
    except OSError as error:
        return error.errno
    except AttributeError:  # this Python or its C library does not know it
        return errno.ENOSYS
    return 0

calls = (memfd, seals, futex_waitv, process_vm_readv, of_another)
print(json.dumps({call.__name__: tried(call) for call in calls}))
"""

_FILTER = "allow it in the container's seccomp profile (docker run --security-opt seccomp=unconfined allows all)"
_PTRACE = "sysctl kernel.yama.ptrace_scope=0, as root, or the capability SYS_PTRACE"


def system_calls(answer: Answer) -> list[Finding]:
    """Look at sealed memfds, which ranks share memory by, and at what would spare them waking up and copying."""
    said = answer.said
    if said is None:
        return [Finding("system calls", State.UNUSABLE, f"they were tried in vain: {answer.trouble}", _FILTER)]
    memfd = ("memfd_create", said["memfd"]) if said["memfd"] else ("seals of a memfd", said["seals"])
    own, other = said["process_vm_readv"], said["of_another"]
    reading = ("process_vm_readv", own) if own else ("process_vm_readv of another process", other)
    return [
        _finding("memfd", *memfd, "memory that ranks share", State.UNUSABLE),
        _finding("futex_waitv", "futex_waitv", said["futex_waitv"], "a thread sleeps at several words at once"),
        _finding("process_vm", *reading, "a process reads another's memory", remedy=_FILTER if own else _PTRACE),
    ]


def _finding(
    name: str, call: str, code: int, use: str, lacking: State = State.LIMITED, *, remedy: str = _FILTER
) -> Finding:
    if not code:
        return Finding(name, State.AVAILABLE, use)
    refused = code in (errno.EPERM, errno.EACCES)
    filtered = ", by a seccomp filter it seems" if refused and remedy is _FILTER else ""
    return Finding(name, lacking, f"{call}: {os.strerror(code)}{filtered}", remedy if refused else "")
