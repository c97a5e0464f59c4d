"""What is used of nccl4py and NCCL, and their errors as ours.

[Note: nccl] What was found in the sources of nccl4py 0.6 and NCCL 2.23 to 2.32, and what follows from it:

- A communicator with `blocking=False` answers every call at once with "in progress" and goes on in a thread of
  NCCL's own: neither connecting to peers at the first collective, nor a peer that is late, holds up the caller, and
  what hangs can be aborted. Until its state is "success" again no other call may be made on it. So all are made so.
- nccl4py creates communicators with `ncclCommInitRankScalable`, which NCCL has since 2.23.
- NCCL keeps a pointer to the name in a communicator's settings, and nccl4py the name itself no longer than the call: so
  they are given none.
- NCCL adds 16-bit floats in 16 bits, rounding at each hop of a ring or tree, except within a switch. So it is given
  float32 instead, and offers 16-bit floats only for what rounds nothing.
- Its average of floats multiplies each summand by 1/n before the sum: that rounds n more times, and keeps the sum
  from being done in the switch. So a mean is a sum, divided on the stream afterwards.
- It has no 16-bit integers, no complex numbers and no bitwise operators. What moves data is given bytes.
- Several ranks on one device are refused before 2.30, and later unless `NCCL_MULTI_RANK_GPU_ENABLE=1` is set.
- Communicators of one device whose calls are ordered differently on two ranks may deadlock on the device when
  they share a stream.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final

import torch
from torch import Tensor, dtype

from aiodist.errors import BackendError, BackendUnavailable

OLDEST_VERSION: Final = (2, 23)
MULTI_RANK_VERSION: Final = (2, 30)
"""From here on NCCL lets ranks share a device, where it is told so."""
ID_BYTES: Final = 128

SUCCESS: Final = 0
IN_PROGRESS: Final = 7
_INTERNAL_ERROR: Final = 3

_PAUSE_SECONDS = 1e-3  # between two looks at a communicator that is being made or closed


class Library:
    """NCCL as this backend uses it; every use of nccl4py is here.

    `core` is the module `nccl.core`, or what behaves like it. Communicators are nccl4py's own and known here alone.
    None of the methods waits for other ranks, except where it says so.
    """

    def __init__(self, core: Any, bindings: Any = None) -> None:  # noqa: ANN401
        """`bindings` is the module `nccl.bindings.nccl`; a stand-in for NCCL has none."""
        self._core = core
        self._bindings = bindings
        self.ops = {"sum": core.SUM, "prod": core.PROD, "min": core.MIN, "max": core.MAX}

    def version(self) -> tuple[int, ...]:
        """Return NCCL's version, such as (2, 32, 3); raise `BackendUnavailable` where it is not found."""
        found = self._core.get_version().libnccl
        if found is None:
            raise BackendUnavailable(f"nccl4py found no libnccl.so.2: {_install()}")
        return tuple(found.version.release)

    def unique_id(self) -> bytes:
        """Return a new id, for all ranks of one communicator; blocks for some milliseconds at the first call."""
        try:
            return bytes(self._core.get_unique_id())
        except Exception as error:
            raise self.error(error, "a unique id") from error

    def connect(self, size: int, rank: int, unique_id: bytes, give_up: threading.Event) -> Any:  # noqa: ANN401
        """Return a communicator on the current device; waits until all ranks have come or `give_up` is set."""
        config = self._core.NCCLConfig(blocking=False)
        try:
            comm = self._core.Communicator.init(size, rank, self._core.UniqueId.from_bytes(unique_id), config)
        except Exception as error:
            raise self.error(error, f"connecting {size} ranks") from error
        return self.settle(comm, f"connecting {size} ranks", give_up)

    def settle(
        self,
        comm: Any,  # noqa: ANN401
        what: str,
        give_up: threading.Event,
        patience: float = float("inf"),
    ) -> Any:  # noqa: ANN401
        """Wait until what `comm` does is over and return it.

        Aborts it and raises `BackendError` when that fails, when `give_up` is set or after `patience` seconds.
        """
        until = monotonic() + patience
        try:
            while (state := self.state(comm)) == IN_PROGRESS:
                if give_up.wait(_PAUSE_SECONDS) or monotonic() > until:
                    raise BackendError(f"NCCL: {what}: given up")
            if state != SUCCESS:
                raise self.failure(comm, state, what)
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                comm.abort()
            raise
        return comm

    def group(self) -> Any:  # noqa: ANN401
        """Return a block whose calls are launched together, at its end."""
        return self._core.group()

    def reducer(self, kind: dtype, op: str) -> Callable[[Any, Tensor, int], None]:
        """Return what enqueues an allreduce, in place, of dense numbers of `kind`: (communicator, tensor, stream).

        nccl4py's own method looks into both tensors, for 7 to 14 us beside an H100; its bindings take 0.4 us.
        """
        native = self.ops[op]
        if self._bindings is None:
            return lambda comm, t, stream: comm.allreduce(t, t, native, stream=stream)
        all_reduce, handle = self._bindings.all_reduce, self._bindings.Comm
        code, number = int(getattr(self._core, str(kind).removeprefix("torch.").upper())), int(native)

        def call(comm: Any, t: Tensor, stream: int) -> None:  # noqa: ANN401
            place = t.data_ptr()
            all_reduce(place, place, t.numel(), code, number, handle(comm.ptr), stream)

        return call

    def state(self, comm: Any) -> int:  # noqa: ANN401
        """Return SUCCESS, IN_PROGRESS or the code of an error that came up after its call."""
        try:
            return int(comm.get_async_error())
        except Exception as error:  # noqa: BLE001  - an error as well, and told as one
            return int(getattr(error, "status", _INTERNAL_ERROR))

    def close(self, comm: Any, patience: float) -> None:  # noqa: ANN401
        """Flush and free `comm`; waits for the other ranks to do the same, `patience` seconds, then aborts it."""
        try:
            comm.finalize()
            self.settle(comm, "closing", threading.Event(), patience)
        except BackendError:
            return  # aborted, which frees it as well
        except Exception:  # noqa: BLE001  - it can only be given up
            comm.abort()
            return
        comm.destroy()

    def failure(self, comm: Any, state: int, what: str) -> BackendError:  # noqa: ANN401
        """Return the error of a communicator in `state`, with NCCL's last words."""
        text = str(self._core.get_error_string(state))
        return BackendError(f"NCCL: {what}: {text}{self._last_error(comm)}", code=state)

    def error(self, error: BaseException, what: str, comm: Any = None) -> BackendError:  # noqa: ANN401
        """Return what a call raised as ours, with NCCL's last words where they are NCCL's."""
        code = getattr(error, "status", None)
        last = "" if code is None else self._last_error(comm)
        wrapped = BackendError(f"NCCL: {what}: {error}{last}", code=None if code is None else int(code))
        wrapped.__cause__ = error.with_traceback(None)  # its frames hold tensors
        return wrapped

    def _last_error(self, comm: Any) -> str:  # noqa: ANN401
        text = ""
        with suppress(Exception):  # it only adds to an error
            if comm is not None and comm.is_valid:
                text = str(comm.get_last_error())
            else:
                bindings = importlib.import_module("nccl.bindings.nccl")
                text = str(bindings.get_last_error(bindings.Comm(0)))
        return f" ({text.strip()})" if text.strip() else ""


def load() -> Library:
    """Return NCCL, imported now, in some 0.3 s; raise `BackendUnavailable`, which says why, where it cannot be had."""
    reason = missing()
    if reason is not None:
        raise BackendUnavailable(reason)
    try:
        library = Library(importlib.import_module("nccl.core"), importlib.import_module("nccl.bindings.nccl"))
        found = library.version()
    except BackendUnavailable:
        raise
    except Exception as error:
        raise BackendUnavailable(f"nccl4py cannot be imported: {error}: {_install()}") from error
    if (reason := _too_old(found)) is not None:
        raise BackendUnavailable(reason)
    return library


def missing() -> str | None:
    """Return why there is no NCCL here and what to do about it, None where it is installed.

    Neither opens a device nor imports anything: whether it can be loaded, `load` says.
    """
    if torch.cuda.device_count() == 0:
        return "NCCL needs a CUDA device, and torch sees none"
    if importlib.util.find_spec("nccl") is None:
        return f"nccl4py is not installed: {_install()}"
    return _too_old(version_installed())


def version_installed() -> tuple[int, ...]:
    """Return the version of NCCL that is installed as a wheel, such as (2, 32, 3), and () where none is.

    Loads nothing. Where two are installed it is that of torch's CUDA.
    """
    ours, other = ("cu13", "cu12") if _extra() == "cuda13" else ("cu12", "cu13")
    for built_for in (ours, other):
        with suppress(importlib.metadata.PackageNotFoundError):
            parts = importlib.metadata.version(f"nvidia-nccl-{built_for}").split(".")
            return tuple([int(part) for part in parts if part.isdecimal()])  # without "post1"
    return ()


def version() -> str:
    """Return the version of NCCL as it is loaded, such as "2.32.3"; raise `BackendUnavailable` where there is none."""
    return _dotted(load().version())


def refuses(devices: Sequence[tuple[str, str]], found: Sequence[int], *, shared: bool) -> str | None:
    """Return why NCCL would not connect ranks on these devices, None where it would.

    `devices` has (host, UUID or PCI bus id) of each rank, `found` is NCCL's version, and `shared` says whether
    NCCL_MULTI_RANK_GPU_ENABLE=1 is set on all of them.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, device in enumerate(devices):
        other = first.setdefault(device, rank)
        if other == rank:
            continue
        where = f"ranks {other} and {rank} share device {device[1]} of {device[0]}"
        if tuple(found[:2]) < MULTI_RANK_VERSION:
            return (
                f"{where}: NCCL {_dotted(found)} takes one rank on a device, from {_dotted(MULTI_RANK_VERSION)} on more"
            )
        if not shared:
            return f"{where}: NCCL takes one rank on a device unless NCCL_MULTI_RANK_GPU_ENABLE=1 is set"
    return None


def _too_old(found: Sequence[int]) -> str | None:
    if found and tuple(found[:2]) < OLDEST_VERSION:
        return f"NCCL is {_dotted(found)}, {_dotted(OLDEST_VERSION)} or later is needed: {_install()}"
    return None


def _install() -> str:
    return f"pip install 'aiodist[{_extra()}]'"


def _extra() -> str:
    return "cuda13" if (torch.version.cuda or "").startswith("13") else "cuda12"


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
