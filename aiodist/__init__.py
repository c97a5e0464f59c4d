"""An asyncio-native distributed runtime for PyTorch: every collective is an awaitable handle.

Names are resolved when they are first used (PEP 562): the launcher imports this package and must load
neither torch, numpy nor mpi4py. `_HOMES` says where each name lives; the imports under `TYPE_CHECKING` say
the same to type checkers, and a test holds the two together.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiodist import bridges, c10d, checkpoints, codecs, data, engine, handles, nn, ps, streams, testing
    from aiodist.bridges import connect, listen
    from aiodist.checkpoints import load, save
    from aiodist.communicator import Communicator
    from aiodist.engine import Engine
    from aiodist.errors import (
        AiodistError,
        BackendError,
        BackendUnavailable,
        BufferInFlight,
        CheckpointDamaged,
        CommunicatorAborted,
        CommunicatorClosed,
        CommunicatorError,
        ConfigError,
        DeadlockError,
        LaunchError,
        MismatchAborted,
        MismatchError,
        OperationTimeout,
        PeerError,
        PeerLost,
        RemoteError,
    )
    from aiodist.handles import Handle, as_completed, gather, timeout
    from aiodist.handles.tracing import span
    from aiodist.ps import ParameterServer
    from aiodist.types import ANY, ReduceOp
    from aiodist.watch.trace import trace
    from aiodist.world.background import start
    from aiodist.world.runtime import as_handle, init, isolate, open, run

    __version__: str

__all__ = [
    "ANY",
    "AiodistError",
    "BackendError",
    "BackendUnavailable",
    "BufferInFlight",
    "CheckpointDamaged",
    "Communicator",
    "CommunicatorAborted",
    "CommunicatorClosed",
    "CommunicatorError",
    "ConfigError",
    "DeadlockError",
    "Engine",
    "Handle",
    "LaunchError",
    "MismatchAborted",
    "MismatchError",
    "OperationTimeout",
    "ParameterServer",
    "PeerError",
    "PeerLost",
    "ReduceOp",
    "RemoteError",
    "__version__",
    "as_completed",
    "as_handle",
    "bridges",
    "c10d",
    "checkpoints",
    "codecs",
    "connect",
    "data",
    "engine",
    "gather",
    "handles",
    "init",
    "isolate",
    "listen",
    "load",
    "nn",
    "open",
    "ps",
    "run",
    "save",
    "span",
    "start",
    "streams",
    "testing",
    "timeout",
    "trace",
]

_HOMES: Final = {
    "ANY": "aiodist.types",
    "AiodistError": "aiodist.errors",
    "BackendError": "aiodist.errors",
    "BackendUnavailable": "aiodist.errors",
    "BufferInFlight": "aiodist.errors",
    "CheckpointDamaged": "aiodist.errors",
    "Communicator": "aiodist.communicator",
    "CommunicatorAborted": "aiodist.errors",
    "CommunicatorClosed": "aiodist.errors",
    "CommunicatorError": "aiodist.errors",
    "ConfigError": "aiodist.errors",
    "DeadlockError": "aiodist.errors",
    "Engine": "aiodist.engine",
    "Handle": "aiodist.handles",
    "LaunchError": "aiodist.errors",
    "MismatchAborted": "aiodist.errors",
    "MismatchError": "aiodist.errors",
    "OperationTimeout": "aiodist.errors",
    "ParameterServer": "aiodist.ps",
    "PeerError": "aiodist.errors",
    "PeerLost": "aiodist.errors",
    "ReduceOp": "aiodist.types",
    "RemoteError": "aiodist.errors",
    "as_completed": "aiodist.handles",
    "as_handle": "aiodist.world.runtime",
    "connect": "aiodist.bridges",
    "gather": "aiodist.handles",
    "init": "aiodist.world.runtime",
    "isolate": "aiodist.world.runtime",
    "listen": "aiodist.bridges",
    "load": "aiodist.checkpoints",
    "open": "aiodist.world.runtime",
    "run": "aiodist.world.runtime",
    "save": "aiodist.checkpoints",
    "span": "aiodist.handles.tracing",
    "start": "aiodist.world.background",
    "timeout": "aiodist.handles",
    "trace": "aiodist.watch.trace",
}
_MODULES: Final = frozenset(
    {"bridges", "c10d", "checkpoints", "codecs", "data", "engine", "handles", "nn", "ps", "streams", "testing"}
)


def _version() -> str:
    from importlib import metadata  # 20 ms that the launcher does not need

    try:
        return metadata.version("aiodist")
    except metadata.PackageNotFoundError:  # a plain checkout on the path
        return "0+unknown"


def _submodule(name: str) -> object:
    full = f"aiodist.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:  # the module is there, something that it needs is not
            raise
        raise AttributeError(f"module 'aiodist' has no attribute {name!r}", name=name) from None


if not TYPE_CHECKING:  # a type checker that saw this would take any name for granted

    def __getattr__(name: str) -> object:
        if home := _HOMES.get(name):
            value = getattr(importlib.import_module(home), name)
        elif name in _MODULES:
            value = _submodule(name)
        elif name == "__version__":
            value = _version()
        else:
            raise AttributeError(f"module 'aiodist' has no attribute {name!r}", name=name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return list(__all__)
