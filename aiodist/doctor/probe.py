"""Questions that `aiodist doctor` asks in other processes: each prints its answer as a JSON object.

`python -m aiodist.doctor.probe QUESTION` asks one on this host. The text of this file is also sent to the Python of
other hosts, which may have another aiodist or none. So the file imports only the standard library at its top.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

_SECONDS = 5.0
_FUTEX_WAITV = 449  # the number of the system call, the same on all processors


def answer(answer: Mapping[str, Any]) -> None:
    """Print an answer as one line."""
    print(json.dumps(answer), flush=True)  # noqa: T201


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Libraries and ranks


def torch() -> None:
    """Report torch: its version, CUDA, GPUs and gloo."""
    import torch
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    answer({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "gloo": gloo})


def ranks(backend: str | None = None) -> None:
    """Report from rank 0 the size of an aiodist job, its backend, its MPI library, and the implementations."""
    import aiodist

    async def main() -> None:
        async with aiodist.init(backend=backend, timeout=30) as coll:
            met = await coll.allgather_object(coll.rank)
            offers = coll.availability()
            shm = offers.of("allreduce", "shm")
            said = {"size": len(met), "backend": coll.backend, "separate": shm.reason * (shm.state != "available")}
            if coll.backend == "mpi":
                from mpi4py import MPI

                said["library"] = MPI.Get_library_version().splitlines()[0].split(",")[0].strip(" \0")
            if coll.rank == 0:
                answer({**said, "availability": str(offers), "selector": str(coll.selector)})

    aiodist.run(main())


def sockets() -> None:
    """Report from rank 0 an aiodist job over gloo."""
    ranks("gloo")


# System calls of shared memory


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def calls() -> None:
    """Report the error number, or 0, of each system call with which the ranks of a host share memory."""
    answer({call.__name__: _error_of(call) for call in (memfd, futex_waitv, process_vm)})


def _error_of(call: Callable[[], None]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    except AttributeError:  # this Python or its C library lacks the call
        return errno.ENOSYS
    return 0


def memfd() -> None:
    """Create shared memory, and seal its size."""
    fd = os.memfd_create("aiodist-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    os.close(fd)


def futex_waitv() -> None:
    """Wait for an empty list, which a kernel with this call refuses as invalid."""
    ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(_FUTEX_WAITV), None, 0, 0, None, 0)
    if ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), "")


def process_vm() -> None:
    """Read the parent's memory in a child process, which kernel.yama.ptrace_scope can forbid as between ranks."""
    byte, parent = ctypes.create_string_buffer(1), os.getpid()
    memory = ctypes.byref(_Range(ctypes.addressof(byte), 1))
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if not child:
        os._exit(0 if libc.process_vm_readv(parent, memory, 1, memory, 1, 0) == 1 else ctypes.get_errno())
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(code, "")


# Another host


def host(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a job on this host, which must be equal on all hosts, and its way to the launcher."""
    spec = find_spec("aiodist")
    parts = {
        "Python": platform.python_version(),
        **{name: version(name) for name in asked["packages"]},
        "source": _digest(os.path.dirname(spec.origin)) if spec and spec.origin else None,
        "folder": asked["folder"] if os.path.isdir(asked["folder"]) else None,
        "script": _digest(asked["script"]) if asked["script"] else None,
    }
    daemon = next((path for path in asked["daemons"] if os.access(path, os.X_OK)), None)
    said = {"parts": parts, "daemon": daemon, "cores": len(os.sched_getaffinity(0)), "all cores": os.cpu_count()}
    try:
        with socket.create_connection(tuple(asked["launcher"]), timeout=_SECONDS) as connection:
            return {**said, "address": connection.getsockname()[0]}
    except OSError as error:
        return {**said, "address": None, "trouble": str(error)}


def _digest(path: str) -> str | None:
    """Return a digest of a file, or of the Python files in a folder; None if there is no such file."""
    walked = sorted(os.walk(path, followlinks=True))
    files = [
        os.path.join(folder, name) for folder, _, names in walked for name in sorted(names) if name.endswith(".py")
    ]
    digest = hashlib.sha256()
    try:
        for file in files or [path]:
            with open(file, "rb") as opened:
                digest.update(os.path.relpath(file, path).encode() + opened.read())
    except OSError:
        return None
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        globals()[sys.argv[1]]()
    else:  # as text, on another host
        answer(host(json.loads(sys.stdin.readline())))
