"""The calls of nccl4py and NCCL that aiodist uses, with `BackendError` for errors.

[Note: nccl] Properties of nccl4py 0.6 and NCCL 2.23 to 2.32, found in the sources, with the consequences:

- A communicator with `blocking=False` returns "in progress" from every call and continues in a thread of NCCL. So
  neither the first connection to peers nor a late peer blocks the caller. A hanging call can be aborted. No other call
  may be made on the communicator before its state is "success" again. All communicators are created in this mode.
- nccl4py creates communicators with `ncclCommInitRankScalable`, which NCCL has since 2.23.
- NCCL stores a pointer to the name in a communicator's settings. But nccl4py frees the name after the call. So
  communicators have no name.
- NCCL adds 16-bit floats in 16 bits, and rounds at each hop of a ring or tree, except within a switch. So sums of
  16-bit floats are done in float32. 16-bit floats are native only if the operation does not round.
- NCCL's average of floats multiplies each summand by 1/n before the sum. The products round n more times, and the
  switch cannot do the sum. So a mean is a sum with a later division by the stream.
- NCCL has no 16-bit integers, no complex numbers and no bitwise operators. Operations that move data send bytes.
- NCCL before 2.30 allows one rank per device. Later versions allow more if `NCCL_MULTI_RANK_GPU_ENABLE=1` is set.
- Communicators of one device that share a stream may deadlock on the device if two ranks order their calls differently.
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
"""First version of NCCL that allows several ranks on one device, if enabled by an environment variable."""
ID_BYTES: Final = 128

SUCCESS: Final = 0
IN_PROGRESS: Final = 7
_INTERNAL_ERROR: Final = 3

_PAUSE_SECONDS = 1e-3  # between two polls of a communicator that is being opened or closed


class Library:
    """NCCL's interface for this backend. Only this class uses nccl4py, except that `NcclGroup` calls `abort` of a
    communicator.

    `core` is the module `nccl.core` or a stand-in. Communicators are objects of nccl4py, and opaque to callers. Methods
    do not wait for other ranks unless the docstring says so.
    """

    def __init__(self, core: Any, bindings: Any = None) -> None:  # noqa: ANN401
        """`bindings` is the module `nccl.bindings.nccl`, or None for a stand-in."""
        self._core = core
        self._bindings = bindings
        self.ops = {"sum": core.SUM, "prod": core.PROD, "min": core.MIN, "max": core.MAX}

    def version(self) -> tuple[int, ...]:
        """Return NCCL's version, such as (2, 32, 3), or raise `BackendUnavailable` if NCCL is not found."""
        found = self._core.get_version().libnccl
        if found is None:
            raise BackendUnavailable(f"nccl4py found no libnccl.so.2: {_install()}")
        return tuple(found.version.release)

    def unique_id(self) -> bytes:
        """Return a new id, for all ranks of one communicator. Blocks for some milliseconds at the first call."""
        try:
            return bytes(self._core.get_unique_id())
        except Exception as error:
            raise self.error(error, "a unique id") from error

    def connect(self, size: int, rank: int, unique_id: bytes, aborted: threading.Event) -> Any:  # noqa: ANN401
        """Return a communicator on the current device. Waits for all ranks, or until `aborted` is set."""
        config = self._core.NCCLConfig(blocking=False)
        try:
            comm = self._core.Communicator.init(size, rank, self._core.UniqueId.from_bytes(unique_id), config)
        except Exception as error:
            raise self.error(error, f"connecting {size} ranks") from error
        return self.wait(comm, f"connecting {size} ranks", aborted)

    def wait(
        self,
        comm: Any,  # noqa: ANN401
        what: str,
        aborted: threading.Event,
        timeout: float = float("inf"),
    ) -> Any:  # noqa: ANN401
        """Wait until the last call of `comm` has finished, and return `comm`.

        Aborts `comm` and raises `BackendError` if the call fails, if `aborted` is set, or after `timeout` seconds.
        """
        until = monotonic() + timeout
        try:
            while (state := self.state(comm)) == IN_PROGRESS:
                if aborted.wait(_PAUSE_SECONDS) or monotonic() > until:
                    raise BackendError(f"NCCL: {what}: aborted")
            if state != SUCCESS:
                raise self.failure(comm, state, what)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                comm.abort()
            raise
        return comm

    def group(self) -> Any:  # noqa: ANN401
        """Return a context manager that launches the calls of the block together, at the end."""
        return self._core.group()

    def reducer(self, kind: dtype, op: str) -> Callable[[Any, Tensor, int], None]:
        """Return a function of (communicator, tensor, stream) that enqueues an in-place allreduce of a dense tensor.

        nccl4py's own method inspects both tensors, which takes 7 to 14 us on the host of an H100. The bindings take 0.4
        us.
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
        """Return SUCCESS, IN_PROGRESS or the code of an asynchronous error."""
        try:
            return int(comm.get_async_error())
        except Exception as error:  # noqa: BLE001  - its code is the state
            return int(getattr(error, "status", _INTERNAL_ERROR))

    def close(self, comm: Any, timeout: float) -> None:  # noqa: ANN401
        """Flush and free `comm`.

        Waits `timeout` seconds for the same call of the other ranks, then aborts the communicator.
        """
        try:
            comm.finalize()
            self.wait(comm, "closing", threading.Event(), timeout)
        except BackendError:
            return  # aborted, which also frees the communicator
        except Exception:  # noqa: BLE001  - only an abort is left
            comm.abort()
            return
        comm.destroy()

    def failure(self, comm: Any, state: int, what: str) -> BackendError:  # noqa: ANN401
        """Return the error of a communicator in `state`, with NCCL's last error text."""
        text = str(self._core.get_error_string(state))
        return BackendError(f"NCCL: {what}: {text}{self._last_error(comm)}", code=state)

    def error(self, error: BaseException, what: str, comm: Any = None) -> BackendError:  # noqa: ANN401
        """Return a `BackendError` for the exception `error`, with NCCL's last error text if `error` is NCCL's."""
        code = getattr(error, "status", None)
        last = "" if code is None else self._last_error(comm)
        wrapped = BackendError(f"NCCL: {what}: {error}{last}", code=None if code is None else int(code))
        wrapped.__cause__ = error.with_traceback(None)  # the frames of the error hold tensors
        return wrapped

    def _last_error(self, comm: Any) -> str:  # noqa: ANN401
        text = ""
        with suppress(Exception):  # the text only adds to an error
            if comm is not None and comm.is_valid:
                text = str(comm.get_last_error())
            else:
                bindings = importlib.import_module("nccl.bindings.nccl")
                text = str(bindings.get_last_error(bindings.Comm(0)))
        return f" ({text.strip()})" if text.strip() else ""


def load() -> Library:
    """Import NCCL, which takes some 0.3 s. Raise `BackendUnavailable` with the reason if that fails."""
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
    """Return the reason why NCCL is missing and the remedy, or None if NCCL is installed.

    The call opens no device and imports no module, so only `load` tests whether NCCL can be loaded.
    """
    if torch.cuda.device_count() == 0:
        return "NCCL needs a CUDA device, and torch sees none"
    if importlib.util.find_spec("nccl") is None:
        return f"nccl4py is not installed: {_install()}"
    return _too_old(version_installed())


def version_installed() -> tuple[int, ...]:
    """Return the version of NCCL's wheel, such as (2, 32, 3), or () if none is installed. NCCL is not loaded.

    The wheel for torch's CUDA counts if two wheels are installed.
    """
    ours, other = ("cu13", "cu12") if _extra() == "cuda13" else ("cu12", "cu13")
    for built_for in (ours, other):
        with suppress(importlib.metadata.PackageNotFoundError):
            parts = importlib.metadata.version(f"nvidia-nccl-{built_for}").split(".")
            return tuple([int(part) for part in parts if part.isdecimal()])  # without "post1"
    return ()


def version() -> str:
    """Return the version of the loaded NCCL, such as "2.32.3". Raise `BackendUnavailable` if there is none."""
    return _dotted(load().version())


def unconnectable(devices: Sequence[tuple[str, str]], found: Sequence[int], *, shared: bool) -> str | None:
    """Return the reason why NCCL would not connect ranks on these devices, or None.

    `devices` has (host, UUID or PCI bus id) of each rank, `found` is NCCL's version, and `shared` is True if
    NCCL_MULTI_RANK_GPU_ENABLE=1 is set on all ranks.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, device in enumerate(devices):
        other = first.setdefault(device, rank)
        if other == rank:
            continue
        where = f"ranks {other} and {rank} share device {device[1]} of {device[0]}"
        if tuple(found[:2]) < MULTI_RANK_VERSION:
            return (
                f"{where}: NCCL {_dotted(found)} allows one rank per device, "
                f"{_dotted(MULTI_RANK_VERSION)} and later allow more"
            )
        if not shared:
            return f"{where}: NCCL allows one rank per device unless NCCL_MULTI_RANK_GPU_ENABLE=1 is set"
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
