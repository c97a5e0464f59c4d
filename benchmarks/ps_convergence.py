"""`python -m benchmarks ps-convergence`: test losses of training clients with rare exchanges.

Eight workers and the centre take turns in this process, so figures depend only on the seed. The clients are those of
`aiodist.ps.training`; the server is a dict that adds pushes and counts bytes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aiodist.bench.plan import writable
from aiodist.bench.plots import check_plot, picture
from aiodist.errors import ConfigError
from aiodist.ps.training import EASGD, Downpour, elastic_alpha
from benchmarks.verdicts import Verdict, terminal, verdict_table

__all__ = ["METHODS", "Found", "Task", "app", "one_thread", "train", "verdicts", "write"]

METHODS = ("easgd", "downpour")
_INPUTS, _HIDDEN, _CLASSES, _BATCH = 32, 64, 10, 32
_TEST = 4096
_ETA, _BETA = 0.2, 0.9
_LOOKS = 16
"""The number of test losses."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Found:
    """The result of one run."""

    impl: str
    tau: int
    workers: int
    value: float
    """The centre's test loss after the last step."""
    nbytes: int
    """Bytes that all workers pushed and pulled."""
    curve: tuple[tuple[int, float], ...]
    """Steps and the centre's test loss after them."""


# --- the task --------------------------------------------------------------------------------------------------------


class Task:
    """A task: learn a fixed random network of one hidden layer; each worker has its own samples."""

    def __init__(self, workers: int, steps: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        into = torch.randn(_INPUTS, _HIDDEN, generator=draw) / _INPUTS**0.5
        out = torch.randn(_HIDDEN, _CLASSES, generator=draw) / _HIDDEN**0.5

        def samples(*shape: int) -> tuple[Tensor, Tensor]:
            x = torch.randn(*shape, _INPUTS, generator=draw)
            return x, ((x @ into).tanh() @ out).argmax(-1)

        self.test = samples(_TEST)
        self.batches = [samples(steps, _BATCH) for _ in range(workers)]
        """The samples of each worker: `(steps, batch, inputs)` and `(steps, batch)`."""
        self.steps = steps
        self._seed = seed

    def model(self) -> nn.Module:
        """Return the untrained model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            return nn.Sequential(nn.Linear(_INPUTS, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _CLASSES))

    def test_loss(self, model: nn.Module) -> float:
        """Return the mean cross-entropy on the test set."""
        x, y = self.test
        with torch.no_grad():
            return float(cross_entropy(model(x), y))


# --- the server ------------------------------------------------------------------------------------------------------


class _Over:
    """An awaitable that has finished."""

    def done(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


class _Centre:
    """A server in memory that adds pushes and counts bytes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = dict(model.named_parameters())
        self.nbytes = 0

    def push(self, what: Sequence[str], values: Sequence[Tensor], *, rule: str | None = None) -> _Over:
        if rule != "add":
            raise ValueError(f"rule={rule!r}: expected 'add'")
        with torch.no_grad():
            for name, value in zip(what, values, strict=True):
                self.tensors[name].add_(value)
                self.nbytes += value.nbytes
        return _Over()

    def pull(self, what: Sequence[str], out: Sequence[Tensor], *, reads: object = None) -> _Over:
        with torch.no_grad():
            for name, into in zip(what, out, strict=True):
                into.copy_(self.tensors[name])
                self.nbytes += into.nbytes
        return _Over()


# --- training --------------------------------------------------------------------------------------------------------


async def train(task: Task, method: str, tau: int) -> Found:
    """Train all workers in turns, a step each, and return the result of the centre."""
    centre = _Centre(task.model())
    models = [task.model() for _ in task.batches]
    clients = [_client(method, centre, model, tau, len(models)) for model in models]
    every = max(1, task.steps // _LOOKS)
    curve = []
    for step in range(task.steps):
        for model, client, (x, y) in zip(models, clients, task.batches, strict=True):
            model.zero_grad()
            cross_entropy(model(x[step]), y[step]).backward()
            await client.step()
        if (step + 1) % every == 0 or step + 1 == task.steps:
            curve.append((step + 1, task.test_loss(centre.model)))
    for client in clients:
        await client.aclose()
    return Found(f"aiodist:{method}", tau, len(models), curve[-1][1], centre.nbytes, tuple(curve))


def _client(method: str, centre: _Centre, model: nn.Module, tau: int, workers: int) -> EASGD | Downpour:
    optimizer = torch.optim.SGD(model.parameters(), lr=_ETA)
    named = dict(model.named_parameters())
    if method == "easgd":
        return EASGD(centre, named, optimizer, tau=tau, alpha=elastic_alpha(_BETA, workers))
    return Downpour(centre, named, optimizer, n_push=tau, n_pull=tau)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread, as the tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


async def _all(task: Task, taus: Sequence[int], tell: Callable[[str], None]) -> list[Found]:
    found = []
    with one_thread():
        for method in METHODS:
            for tau in taus:
                tell(f"{method}, tau {tau} …")
                found.append(await train(task, method, tau))
    return found


# --- what is said of it ----------------------------------------------------------------------------------------------


def verdicts(found: Sequence[Found]) -> list[Verdict]:
    """Return the losses and bytes of the longest interval, compared with the shortest."""
    least, most = (pick(one.tau for one in found) for pick in (min, max))
    by = {(one.impl, one.tau): one for one in found}
    often, seldom = by["aiodist:easgd", least], by["aiodist:easgd", most]
    sums, sums_seldom = by["aiodist:downpour", least], by["aiodist:downpour", most]
    beside = f"tau {most} against {least}"
    return [
        Verdict(f"EASGD, test loss at {beside}", _ratio(seldom.value, often.value), "x", 1.05),
        Verdict(f"EASGD, less traffic at {beside}", often.nbytes / seldom.nbytes, "x", most / least, at_least=True),
        Verdict(f"Downpour, test loss at {beside}", _ratio(sums_seldom.value, sums.value), "x", 2.0, at_least=True),
    ]


def _ratio(loss: float, other: float) -> float:
    """Return the ratio of two losses; a loss of NaN is infinite."""
    return loss / other if math.isfinite(loss) else math.inf


def _table(task: Task, found: Sequence[Found]) -> Table:
    title = (
        f"ps-convergence: {len(task.batches)} workers in turns, {task.steps} steps each, MLP {_INPUTS}-{_HIDDEN}-"
        f"{_CLASSES}, batch {_BATCH}, SGD {_ETA}, alpha {_BETA}/{len(task.batches)}"
    )
    result = Table(title=title, title_justify="left")
    for column in ("impl", "tau", "bytes", "test loss"):
        result.add_column(column, justify="left" if column == "impl" else "right")
    for one in found:
        result.add_row(one.impl, str(one.tau), f"{one.nbytes:,}", f"{one.value:.4g}")
    return result


def write(path: str | Path, found: Sequence[Found]) -> None:
    """Write a JSON list with a line for each run; a loss of NaN is null."""
    Path(path).write_text("[\n" + ",\n".join(json.dumps(_entry(one), allow_nan=False) for one in found) + "\n]\n")


def _entry(one: Found) -> dict[str, object]:
    fields = asdict(one)
    fields["ranks"] = fields.pop("workers")
    fields["value"] = _number(one.value)
    fields["curve"] = [(step, _number(loss)) for step, loss in one.curve]
    return {"op": "ps-convergence", **fields}


def _number(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _plot(path: str, found: Sequence[Found]) -> None:
    """Draw test losses by step and by bytes, into `path`."""
    with picture(path, columns=2) as ((curves, costs),):
        for method, style in zip(METHODS, ("-", "--"), strict=True):
            runs = [one for one in found if one.impl == f"aiodist:{method}"]
            for shade, one in enumerate(runs):
                steps, losses = zip(*one.curve, strict=True)
                curves.plot(steps, losses, style, color=f"C{shade}", label=f"{method}, tau {one.tau}")
            costs.plot([one.nbytes for one in runs], [one.value for one in runs], f"o{style}", label=method)
            for one in runs:
                costs.annotate(f" {one.tau}", (one.nbytes, one.value))
        costs.set_xscale("log")
        for axes, label in ((curves, "steps of each worker"), (costs, "bytes pushed and pulled, by tau")):
            axes.set_yscale("log")
            axes.set_xlabel(label)
            axes.set_ylabel("test loss of the centre")
            axes.legend(fontsize="small", ncols=2)


# --- the command -----------------------------------------------------------------------------------------------------


@app.command()
def convergence(
    workers: Annotated[int, typer.Option(metavar="P", min=1, help="How many workers take turns.")] = 8,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of each worker.")] = 1024,
    taus: Annotated[str, typer.Option(metavar="1,64", help="Steps between exchanges.")] = "1,4,16,64",
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Seed of the task.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the records there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw them there.")] = None,
) -> None:
    """Train with EASGD and with Downpour that exchange every tau steps; compare the centre's test loss, and bytes."""
    intervals = _intervals(taus, steps)
    files = writable("--json", json), writable("--plot", plot)
    if plot is not None:
        check_plot()
    task = Task(workers, steps, seed)
    width, colour = terminal()
    console = Console(width=width, force_terminal=colour, highlight=False)
    with console.status("") as status:
        found = asyncio.run(_all(task, intervals, status.update))
    if files[0] is not None:
        write(files[0], found)
    if files[1] is not None:
        _plot(files[1], found)
    console.print(_table(task, found))
    reached = verdict_table(verdicts(found))
    reached.title = "what to reach"
    console.print(reached)


def _intervals(given: str, steps: int) -> list[int]:
    found = []
    for part in dict.fromkeys(part.strip() for part in given.split(",")):
        if not part.isdecimal() or int(part) < 1 or steps % int(part):
            raise ConfigError(f"--taus {part or repr(part)}: expected divisors of --steps {steps}")
        found.append(int(part))
    if len(found) == 1:
        raise ConfigError(f"--taus {given}: expected two of them or more, to compare")
    return sorted(found)
