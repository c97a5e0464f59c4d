"""Trace a training on two ranks and draw a step: `python tools/trace_picture.py [PICTURE]`, docs/img/step.svg.

Three tracks of each rank: the compute thread, the reductions of buckets, and prefetch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiodist.bench.plots import picture as drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
STEPS = 46
COLOURS = {"forward": "#9ecae1", "backward": "#3182bd", "wait": "#fdae6b", "optimizer": "#a1d99b", "bucket": "#756bb1"}
OTHER = "#bdbdbd"
LEGEND = {"wait": "waiting for reductions", "bucket": "reduction of a bucket of gradients"}
"""The text of a colour in the legend, if it is not the name of its spans."""
TRACKS = {"compute": "aiodist-compute", "reductions": "reductions", "prefetch": "AnyIO worker thread"}


async def train() -> None:
    """What is traced: layers wide enough for the reductions to take a while, and data that take a while too."""
    import torch
    from torch import nn

    import aiodist
    from aiodist.nn import DataParallel

    def load(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x.sort(dim=1).values
        return x

    async with aiodist.init() as coll:
        layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Tanh())]
        net = await DataParallel.create(nn.Sequential(*layers), coll, bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        async with aiodist.data.prefetch([torch.randn(256, 512)] * STEPS, transform=load) as batches:
            async for x in batches:
                await net.step(lambda x=x: net(x).square().mean(), opt)
        await net.aclose()


def draw(events: list[dict[str, Any]], picture: Path) -> None:
    """Draw the fastest step of both ranks."""
    from matplotlib.patches import Patch

    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    begin, end = quickest([[e for e in spans if e["name"] == "net.step" and e["pid"] == rank] for rank in range(2)])
    labels: list[str] = []
    picture.parent.mkdir(exist_ok=True)
    with drawn(picture, size=(9.0, 3.2)) as ((axes,),):
        for rank in range(2):
            for track, thread in TRACKS.items():
                mine = [e for e in spans if e["pid"] == rank and names[rank, e["tid"]].startswith(thread)]
                visible = [e for e in mine if e["name"] != "net.step" and e["ts"] < end and e["ts"] + e["dur"] > begin]
                bars(axes, visible, -len(labels), begin, end)
                labels.append(f"rank {rank}: {track}")
        axes.set_yticks([-i for i in range(len(labels))], labels)
        axes.set_ylim(0.5 - len(labels), 0.5)
        axes.set_xlim(0, (end - begin) / 1e3)
        axes.set_xlabel("ms")
        axes.grid(visible=False)
        legend = {**{LEGEND.get(name, name): colour for name, colour in COLOURS.items()}, "next batch": OTHER}
        handles = [Patch(color=colour, label=label) for label, colour in legend.items()]
        axes.figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)


def quickest(steps: list[list[dict[str, Any]]]) -> tuple[float, float]:
    """Return begin and end of the step that was least disturbed, once the order is learnt and while data come."""
    times = [(min(e["ts"] for e in both), max(e["ts"] + e["dur"] for e in both)) for both in zip(*steps, strict=True)]
    return min(times[2:-4], key=lambda time: time[1] - time[0])


def bars(axes: Axes, visible: list[dict[str, Any]], row: int, begin: float, end: float) -> None:
    """Draw the spans of one track; those of several threads lie below one another."""
    lanes = sorted({e["tid"] for e in visible})
    for e in visible:
        height = 0.8 / len(lanes)
        y = row + 0.4 - height * (lanes.index(e["tid"]) + 1)
        first, last = max(e["ts"], begin), min(e["ts"] + e["dur"], end)
        colour = COLOURS.get(e["name"].split()[0], OTHER)
        axes.broken_barh([((first - begin) / 1e3, (last - first) / 1e3)], (y, height), color=colour, ec="w", lw=0.3)
        if last - first > 0.07 * (end - begin) and len(lanes) == 1:
            axes.text((first + last - 2 * begin) / 2e3, row, e["name"], ha="center", va="center", fontsize=8)


def main() -> None:
    """Trace, and draw."""
    picture = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "img" / "step.svg"
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--trace", folder, __file__, "--rank"]
        subprocess.run(job, check=True)
        draw(json.loads(Path(folder, "trace.json").read_text())["traceEvents"], picture)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        import aiodist

        aiodist.run(train)
    else:
        main()
