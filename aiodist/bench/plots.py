"""Pictures of measurements, in one style."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aiodist.errors import BackendUnavailable

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes

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


def lines(
    axes: Axes,
    points: Sequence[tuple[str, float, float | None]],
    x: str,
    y: str,
    styles: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Draw a line for each name through its points, on logarithmic scales, or on linear ones if every x is 0.

    Lines of aiodist are solid, the others dashed; `styles` overrides the style of a name.
    """
    for name in dict.fromkeys(point[0] for point in points):
        mine = sorted((at, value) for one, at, value in points if one == name and value)
        style = {"marker": "o", "linestyle": "-" if name.startswith("aiodist:") else "--", **styles.get(name, {})}
        axes.plot([at for at, _ in mine], [value for _, value in mine], label=name, **style)
    if any(at for _, at, _ in points):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
