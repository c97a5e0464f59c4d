"""Testing programs that communicate: N ranks inside one process, and the pytest plugin.

`run_ranks(n, main)` runs the unmodified program n times as tasks of one event loop, with a clock that jumps and an
interleaving that a seed fixes. `simulated_cuda()` opens CUDA devices where there are none, whose work is done late, so
that a missing synchronisation shows. The plugin (see `aiodist.testing.plugin`) gives the marker `ranks` and the
fixtures `coll` and `simulated_cuda`. Names are resolved at first use: pytest loads the plugin in every run, and must
not load torch with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiodist.testing.clock import FakeClockLoop
    from aiodist.testing.cuda import SimulatedCuda, simulated_cuda
    from aiodist.testing.ranks import Deadlock, gather_ranks, run_ranks

__all__ = ["Deadlock", "FakeClockLoop", "SimulatedCuda", "gather_ranks", "run_ranks", "simulated_cuda"]

_HOMES: Final = {
    "Deadlock": "aiodist.testing.ranks",
    "FakeClockLoop": "aiodist.testing.clock",
    "SimulatedCuda": "aiodist.testing.cuda",
    "gather_ranks": "aiodist.testing.ranks",
    "run_ranks": "aiodist.testing.ranks",
    "simulated_cuda": "aiodist.testing.cuda",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if home := _HOMES.get(name):
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
        raise AttributeError(f"module 'aiodist.testing' has no attribute {name!r}", name=name)

    def __dir__() -> list[str]:
        return list(__all__)
