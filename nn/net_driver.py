"""`NetDriver`: the base class of drivers."""

from __future__ import annotations

from aiodist.handles.calls import located
from aiodist.nn.compute import Compute
from aiodist.nn.data_parallel import DataParallel, compute_of, reducer_of
from aiodist.nn.drivers import Driver
from aiodist.nn.made import MadeTogether
from aiodist.nn.reducer import Reducer


class NetDriver(MadeTogether, Driver):
    """A driver that was made for one net. `net.rebind` replaces the reducer and the compute thread of the net."""

    def __init__(self, net: DataParallel) -> None:
        if not isinstance(net, DataParallel):
            raise TypeError(f"net is a {type(net).__name__}: expected what `await DataParallel.create(…)` returned")
        self._net = net

    @property
    def net(self) -> DataParallel:
        """The net of this optimizer."""
        return self._net

    @property
    def _reducer(self) -> Reducer:
        return reducer_of(self._net)

    @property
    def _compute(self) -> Compute:
        return compute_of(self._net)

    @located
    async def flush(self) -> None:
        """Make all pending updates and averages: this rank then has the parameters of all, with `Elastic` the centre.

        All ranks call it. If nothing is pending, nothing is sent.

        Raises:
            RuntimeError: If the net is closed. Errors of the last reductions, updates and averages are raised too.

        """
        await self._net.submit(self.make_updates)

    def make_updates(self) -> None:
        """Do the work of `flush`, on the compute thread; `aiodist.save` calls it."""
        raise NotImplementedError
