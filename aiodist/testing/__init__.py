"""Testing programs that communicate: N ranks inside one process, and the pytest plugin.

`run_ranks(n, main)` runs the unmodified program n times as tasks of one event loop, with a clock that jumps and an
interleaving that a seed fixes. With `seeds=` it raises `RaceError` if the results differ by seed.
`Faults` has ranks die, stop or lose messages on purpose, in processes too. The plugin
(see `aiodist.testing.plugin`) gives the marker `ranks` and the fixture `coll`. Names are resolved at first use: pytest
loads the plugin in every run, and must not load torch with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiodist.testing.clock import FakeClockLoop
    from aiodist.testing.faults import Fault, FaultKind, Faults, InjectedFault
    from aiodist.testing.races import RaceError
    from aiodist.testing.ranks import Deadlock, gather_ranks, kill_rank, run_ranks

__all__ = [
    "Deadlock",
    "FakeClockLoop",
    "Fault",
    "FaultKind",
    "Faults",
    "InjectedFault",
    "RaceError",
    "gather_ranks",
    "kill_rank",
    "run_ranks",
]

_HOMES: Final = {
    **dict.fromkeys(("Deadlock", "gather_ranks", "kill_rank", "run_ranks"), "aiodist.testing.ranks"),
    **dict.fromkeys(("Fault", "FaultKind", "Faults", "InjectedFault"), "aiodist.testing.faults"),
    "FakeClockLoop": "aiodist.testing.clock",
    "RaceError": "aiodist.testing.races",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if home := _HOMES.get(name):
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
        raise AttributeError(f"module 'aiodist.testing' has no attribute {name!r}", name=name)

    def __dir__() -> list[str]:
        return list(__all__)
