"""Pictures of measurements, in one style."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import nan
from typing import TYPE_CHECKING, Any

from aiodist.errors import BackendUnavailable

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes

    from aiodist.bench.records import Record

_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "lines.markersize": 3.0,
    "svg.hashsalt": "aiodist",  # the same figures give the same bytes
}


def check_plot() -> None:
    """Raise `BackendUnavailable` without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'aiodist[plot]'") from error


@contextmanager
def picture(
    path: str | os.PathLike[str], rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (6.0, 4.5)
) -> Iterator[Sequence[Sequence[Axes]]]:
    """Yield the panels of a picture, each of `size` inches, row by row; the end of the block saves the picture."""
    check_plot()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        yield figure.subplots(rows, columns, squeeze=False, sharex="col").tolist()
        figure.savefig(path, metadata={"Date": None})


def plot(records: Sequence[Record], op: str, path: str) -> None:
    """Draw time and bus bandwidth of `op` by size into `path`: aiodist's lines are solid, those of others dashed."""
    shown = [one for one in records if one.op == op and one.seconds]
    with picture(path, columns=2 if any(one.busbw_gbps for one in shown) else 1) as (panels,):
        for axes, label in zip(panels, ("us", "bus bandwidth, GB/s"), strict=False):
            for impl in dict.fromkeys(one.impl for one in shown):
                mine = sorted((one for one in shown if one.impl == impl), key=lambda one: one.nbytes or 0)
                values = [(one.seconds or 0.0) * 1e6 if label == "us" else one.busbw_gbps or nan for one in mine]
                style = "o-" if impl.startswith("aiodist:") else "o--"
                axes.plot([one.nbytes or 0 for one in mine], values, style, label=impl)
            if any(one.nbytes for one in shown):
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
            axes.set_xlabel("input of one rank, bytes")
            axes.set_ylabel(label)
        panels[0].set_title(f"{op}, {shown[0].ranks if shown else 0} ranks")
        if shown:
            panels[-1].legend()
