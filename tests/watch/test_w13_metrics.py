"""W13: `aiodist run --metrics`: the numbers of all ranks, as Prometheus text and by OTLP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from time import time

import pytest
import torch
from torch import nn

import aiodist
from aiodist import BackendUnavailable, Communicator, ConfigError, DeadlockError, cli
from aiodist.communicator import parts_of
from aiodist.handles import internals
from aiodist.nn import DataParallel
from aiodist.ps import ParameterServer
from aiodist.watch import metrics
from aiodist.watch.exposition import METRICS, Target
from aiodist.watch.metrics import RankNumbers, measured
from tests.support.blocking import blocked_until
from tests.support.nursed import stub

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
pytestmark = pytest.mark.timeout(100)

DOCS = Path(__file__).resolve().parents[2] / "docs"
Until = Callable[[Callable[[], object]], Awaitable[None]]
Labels = tuple[tuple[str, str], ...]
Numbers = dict[tuple[str, Labels], float]


def parsed(text: str) -> Numbers:
    """Return the samples of a text; a series occurs once, and each family has its type and help."""
    found: Numbers = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.name in METRICS
            assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def scrape(port: int) -> Numbers:
    return parsed(fetch(port))


def of(numbers: Numbers, name: str, **labels: object) -> dict[str, float]:
    """Return the values of a metric by kind, of the series with these labels."""
    wanted = {(key, str(value)) for key, value in labels.items()}
    return {dict(key)["kind"]: n for (metric, key), n in numbers.items() if metric == name and wanted <= {*key}}


class Program:
    """Random calls, the same kinds on all ranks, with counts of its own."""

    def __init__(self, coll: Communicator, seed: int) -> None:
        self.coll = coll
        self.random = random.Random(seed)
        self.operations: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def tensor(self, kind: str, count: int) -> torch.Tensor:
        t = torch.rand(count, dtype=self.random.choice([torch.float32, torch.float64]))
        self.operations[kind] += 1
        self.nbytes[kind] += t.nbytes
        return t

    async def run(self, calls: int) -> None:
        coll, choose = self.coll, self.random
        right, left = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
        for _ in range(calls):
            count = choose.randrange(1, 999)
            match choose.randrange(7):
                case 0 | 1:
                    await coll.allreduce(self.tensor("allreduce", count))
                case 2:
                    await coll.broadcast(self.tensor("broadcast", count), root=choose.randrange(coll.size))
                case 3:
                    await coll.allgather(self.tensor("allgather", count))
                case 4:
                    await coll.barrier()
                    self.operations["barrier"] += 1
                case 5:
                    await coll.allreduce(self.tensor("allreduce", count), name=choose.choice(["a", "b"]))
                case 6:
                    longer = [count + rank for rank in range(coll.size)]
                    sent, room = self.tensor("send", longer[coll.rank]), torch.empty(2000, dtype=torch.float64)
                    room = room.to(sent.dtype)
                    self.operations["recv"] += 1
                    self.nbytes["recv"] += longer[left] * sent.element_size()
                    await aiodist.gather(coll.send(sent, right), coll.recv(room, left))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.ranks(2, backend=("gloo", "shm"))
async def test_w13_operations_and_bytes_are_those_of_the_program(coll: Communicator) -> None:
    with measured(coll, "0") as port:
        side = await coll.dup()
        programs = [Program(coll, 1), Program(side, 2)]
        programs[0].operations["allgather"] += 1  # of `dup`
        programs[0].nbytes["allgather"] += 8 * (1 + coll.size)
        before = time()
        for program in programs:
            await program.run(60)
        mine = [[dict(p.operations), dict(p.nbytes)] for p in programs]
        every = await coll.allgather_object(mine)
        if coll.rank == 0:
            numbers = await asyncio.to_thread(scrape, port)
            for rank, told in enumerate(every):
                assert numbers["aiodist_rank_up", (("rank", str(rank)),)] == 1
                for (operations, nbytes), comm in zip(told, ("world", "world/dup1.0"), strict=True):
                    place = {"rank": rank, "communicator": comm}
                    counted = of(numbers, "aiodist_operations_total", **place)
                    assert {kind: counted[kind] for kind in operations} == operations
                    counted = of(numbers, "aiodist_bytes_total", **place)
                    assert {kind: counted[kind] for kind in nbytes} == nbytes
                    last = of(numbers, "aiodist_last_operation_timestamp_seconds", **place)
                    assert all(before - 1 <= last[kind] <= time() for kind in operations)
        await side.aclose()
    if coll.rank == 0:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))


@pytest.mark.ranks(2, backend="shm")
async def test_w13_no_operation_is_lost_when_the_log_is_full(coll: Communicator) -> None:
    dispatcher = parts_of(coll).dispatcher
    await coll.barrier()
    counts = dispatcher.count()
    t, u = torch.ones(3), torch.ones(5, dtype=torch.float64)
    looks = []
    for i in range(3000):
        await coll.allreduce(t)
        await coll.broadcast(u, root=i % coll.size)
        if i % 700 == 0:
            looks.append(counts.read()["allreduce"].operations)
    found = counts.read()
    assert (found["barrier"].operations, found["allreduce"].operations, found["broadcast"].operations) == (
        1,
        3000,
        3000,
    )
    assert (found["allreduce"].nbytes, found["broadcast"].nbytes) == (3000 * 12, 3000 * 40)
    assert looks == [1 + i for i in range(0, 3000, 700)]


@pytest.mark.ranks(2)
async def test_w13_waits_are_counted_where_the_program_waits(coll: Communicator) -> None:
    with measured(coll, "0") as port:
        if coll.rank == 1:  # rank 0 waits until the others have seen that it waits
            await coll.recv_object(0)
            began = time()
            assert blocked_until(lambda: time() > began + 0.05)
            late = time() - began
            await coll.allreduce(torch.ones(1001))
        else:
            await coll.send_object(None, 1)
            await aiodist.gather(coll.allreduce(torch.ones(1001)))  # counts as a wait for its part
            late = 0.0
        late = await coll.allreduce(late, op="max")
        if coll.rank == 0:
            numbers = await asyncio.to_thread(scrape, port)
            waited = [of(numbers, "aiodist_wait_seconds_total", rank=rank) for rank in range(2)]
            assert late / 2 <= waited[0]["allreduce"] <= late + 10
            assert waited[0]["allreduce"] > waited[1]["allreduce"]
        await coll.barrier()


async def test_w13_waits_of_threads_are_counted(until: Until) -> None:
    async with aiodist.init(thread=True) as coll:
        counts = parts_of(coll).dispatcher.count()
        receiving = coll.recv(torch.empty(1))
        waiting = asyncio.create_task(asyncio.to_thread(receiving.wait))
        await until(lambda: internals.is_awaited(receiving))
        began = time()
        assert blocked_until(lambda: time() > began + 0.02)
        await coll.send(torch.ones(1), 0)
        await waiting
        assert counts.read()["recv"].waited >= 0.01


@pytest.mark.ranks(2, backend="shm")
async def test_w13_a_scrape_answers_while_all_loops_are_stuck(coll: Communicator) -> None:
    with measured(coll, "0") as port:
        await coll.allreduce(1)
        handle = coll.broadcast(torch.ones(3), root=0) if coll.rank == 0 else None
        ended = parts_of(coll).registry.channel
        over = threading.Event()
        ended.subscribe("over", lambda *_: over.set())
        await coll.barrier(name="ready")
        if coll.rank == 0:
            numbers: list[Numbers] = []
            thread = threading.Thread(target=lambda: numbers.append(scrape(port)))
            thread.start()
            assert blocked_until(lambda: numbers)  # the loop of this rank does not run
            thread.join()
            ended.broadcast("over", None)
            assert of(numbers[0], "aiodist_in_flight_operations", rank=0)["broadcast"] == 1
            for rank in range(2):
                assert numbers[0]["aiodist_rank_up", (("rank", str(rank)),)] == 1
                assert of(numbers[0], "aiodist_operations_total", rank=rank)["allreduce"] == 1
        else:
            assert blocked_until(over.is_set)
            handle = coll.broadcast(torch.ones(3), root=0)
        assert handle is not None
        await handle
        ended.unsubscribe("over")
        await coll.barrier()


@pytest.mark.ranks(2, backend="shm")
async def test_w13_a_rank_that_does_not_answer_is_down(coll: Communicator) -> None:
    with measured(coll, "0") as port:
        stopped = await coll.broadcast_object(os.getpid(), root=1)
        await coll.barrier()
        if coll.rank == 0:
            os.kill(stopped, signal.SIGSTOP)
            try:
                numbers = await asyncio.to_thread(scrape, port)
            finally:
                os.kill(stopped, signal.SIGCONT)
            up = {dict(labels)["rank"]: value for (name, labels), value in numbers.items() if name == "aiodist_rank_up"}
            assert up == {"0": 1, "1": 0}
            assert not of(numbers, "aiodist_operations_total", rank=1)
        await coll.barrier()
        if coll.rank == 0:
            assert (await asyncio.to_thread(scrape, port))["aiodist_rank_up", (("rank", "1"),)] == 1
        await coll.barrier()


@pytest.mark.thorough
@pytest.mark.ranks(2, backend="shm")
async def test_w13_counters_never_fall_while_ranks_issue(coll: Communicator) -> None:
    over, looks = threading.Event(), list[Numbers]()

    def look(port: int) -> None:
        while not over.is_set():
            looks.append(scrape(port))

    with measured(coll, "0") as port:
        thread = threading.Thread(target=look, args=(port,))
        if coll.rank == 0:
            thread.start()
        t, u = torch.ones(3), torch.ones(4)
        for _ in range(10_000):
            await coll.allreduce(t)
            await coll.broadcast(u)
        await coll.barrier()
        if coll.rank == 0:
            over.set()
            await asyncio.to_thread(thread.join)
            looks.append(await asyncio.to_thread(scrape, port))
            for before, after in pairwise(looks):
                assert all(after[key] >= n for key, n in before.items() if key[0].endswith("_total") and key in after)
            for rank in range(2):
                counted = of(looks[-1], "aiodist_operations_total", rank=rank)
                assert (counted["allreduce"], counted["broadcast"]) == (10_000, 10_000)
        await coll.barrier()


@pytest.mark.ranks(2, backend="shm")
async def test_w13_a_deadlock_is_found_as_before(coll: Communicator) -> None:
    with measured(coll, "0") as port:
        side = await coll.dup()
        if coll.rank == 0:
            await asyncio.to_thread(scrape, port)
        await coll.barrier()
        with pytest.raises(DeadlockError):
            await side.recv(torch.empty(1), 1 - coll.rank)
        await coll.barrier()


async def test_w13_the_lag_of_a_blocked_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    async with aiodist.init() as coll:
        meter = RankNumbers(coll)

        def lag() -> float:
            return next(one.value for one in meter.read() if one.name == "aiodist_event_loop_lag_seconds")

        meter.start()
        try:
            assert blocked_until(lambda: lag() > 0.2)  # read while the loop is blocked
            await asyncio.sleep(0)
            assert lag() > 0.2  # kept for some time
        finally:
            meter.close()


@pytest.mark.ranks(1, 2)
async def test_w13_a_file_for_each_rank(
    coll: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    folder = Path(await coll.broadcast_object(str(tmp_path / "a" / "b")))
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.01)
    with measured(coll, str(folder)):
        mine = folder / f"rank-{coll.rank}.prom"
        await until(mine.exists)
        for n in range(2 + coll.rank):
            await coll.send(torch.ones(n + 1), coll.rank)
            await coll.recv(torch.empty(n + 1), coll.rank)
    numbers = parsed(mine.read_text())
    place = {"rank": coll.rank, "communicator": "world"}
    assert of(numbers, "aiodist_operations_total", **place)["send"] == 2 + coll.rank
    assert of(numbers, "aiodist_bytes_total", **place)["recv"] == 4 * sum(range(1, 3 + coll.rank))
    assert {dict(labels)["rank"] for _, labels in numbers} == {str(coll.rank)}
    assert not [name for name in os.listdir(folder) if not name.endswith(".prom")]
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_w13_steps_pushes_and_staleness(coll: Communicator, tmp_path: Path) -> None:
    folder = Path(await coll.broadcast_object(str(tmp_path)))
    with measured(coll, str(folder)):
        net = await DataParallel.create(nn.Linear(3, 1), coll)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            await net.step(lambda: net(torch.rand(2, 3)).mean(), opt)
        exposed = net.statistics().exposed_seconds
        await net.aclose()
        async with ParameterServer(coll, {"w": torch.zeros(3)}, servers=[0], workers=[0, 1]) as ps:
            for _ in range(coll.rank + 2):
                await ps.push("w", torch.ones(3))
            await ps.pull("w", out=torch.empty(3))
            await coll.barrier()
            told = ps.statistics()
    numbers = {name: value for (name, labels), value in parsed((folder / f"rank-{coll.rank}.prom").read_text()).items()}
    assert numbers["aiodist_steps_total"] == 3
    assert numbers["aiodist_exposed_reduction_seconds_total"] == exposed
    assert 0 < numbers["aiodist_step_seconds_total"] < 90
    assert numbers["aiodist_ps_pushes_total"] == told.pushes == coll.rank + 2
    assert numbers["aiodist_ps_pulls_total"] == told.pulls
    assert numbers["aiodist_ps_push_bytes_total"] == told.push_bytes
    assert numbers["aiodist_ps_applied_pushes_total"] == (0 if coll.rank else 5)
    late = sum(age * count for age, count in told.staleness.items())
    assert numbers["aiodist_ps_staleness_versions_total"] == late
    await coll.barrier()


@pytest.mark.ranks(1)
async def test_w13_without_metrics_nothing_is_counted(coll: Communicator) -> None:
    dispatcher = parts_of(coll).dispatcher
    await coll.allreduce(torch.ones(3))
    assert dispatcher.counts is None
    assert dispatcher.account.waits is None
    assert not dispatcher.progress.counts_waits
    with measured(coll, "0"):
        assert dispatcher.progress.counts_waits
        assert dispatcher.counts is not None


async def test_w13_closed_communicators_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_CLOSED", 2)
    async with aiodist.init() as coll:
        meter = RankNumbers(coll)
        meter.start()
        try:
            for _ in range(4):
                side = await coll.dup()
                await side.barrier()
                await side.aclose()
                meter.read()
            names = {one.communicator for one in meter.read() if one.name == "aiodist_operations_total"}
            assert names == {"world", "world/dup3.0", "world/dup4.0"}
        finally:
            meter.close()


async def test_w13_closed_nets_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.communicator.resources.MOST_CLOSED", 2)
    async with aiodist.init() as coll:
        names = []
        for _ in range(4):
            net = await DataParallel.create(nn.Linear(1, 1), coll)
            names.append(next(reversed(parts_of(coll).registry.resources.tallies)))
            await net.aclose()
        assert list(parts_of(coll).registry.resources.tallies) == names[-2:]


# --- what the user asks for ------------------------------------------------------------------------------------------


def test_w13_places() -> None:
    assert Target.parse("9400", otlp=False) == Target(port=9400)
    assert Target.parse("127.0.0.1:0", otlp=True) == Target("127.0.0.1", 0)
    assert Target.parse("some/folder", otlp=False) == Target(folder=Path("some/folder"))
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the exporter of OTLP is not installed")
    assert Target.parse("otlp", otlp=True) == Target()
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        Target.parse("otlp", otlp=False)
    with pytest.raises(ConfigError, match="up to 65535"):
        Target.parse("70000", otlp=False)


@pytest.mark.ranks(1)
async def test_w13_a_port_in_use_is_an_error(coll: Communicator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be opened"), measured(coll, f"127.0.0.1:{port}"):
            pass
    with measured(coll, f"127.0.0.1:{port}") as mine:
        assert mine == port


@pytest.mark.parametrize(
    ("module", "where", "extra"),
    [("prometheus_client", "0", "metrics"), ("opentelemetry.exporter.otlp.proto.http.metric_exporter", "otlp", "otlp")],
)
def test_w13_a_missing_package_is_an_error_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, where: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "argv", ["aiodist", "run", "-n", "2", "--metrics", where, __file__])
    assert cli.main() == 2
    assert f"pip install 'aiodist[{extra}]'" in capsys.readouterr().err
    with pytest.raises(BackendUnavailable):
        Target.parse(where, otlp=True)


@pytest.mark.thorough
@pytest.mark.ranks(2)
async def test_w13_promtool_finds_nothing_to_improve(coll: Communicator) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, of Prometheus, is not installed")
    with measured(coll, "0") as port:
        async with ParameterServer(coll, {"w": torch.zeros(3)}) as ps:
            await ps.push("w", torch.ones(3))
        if coll.rank == 0:
            text = await asyncio.to_thread(fetch, port)
            words = [promtool, "check", "metrics"]
            done = await asyncio.to_thread(
                subprocess.run, words, input=text, capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        await coll.barrier()


# --- OTLP ------------------------------------------------------------------------------------------------------------


@contextmanager
def receiver(heard: list[bytes]) -> Iterator[int]:
    """An HTTP server that keeps what is posted."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            heard.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("where", ["otlp", "folder"])
def test_w13_otlp_sends_the_same_numbers(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = pytest.importorskip(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason="the exporter of OTLP is not installed"
    )
    heard: list[bytes] = []

    async def main() -> None:
        async with aiodist.init() as coll:
            while not heard:
                await coll.allreduce(torch.ones(5))
            for _ in range(3):
                await coll.broadcast(torch.ones(7))

    with receiver(heard) as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
        monkeypatch.setenv("AIODIST_METRICS", "otlp" if where == "otlp" else str(tmp_path))
        aiodist.run(main)
    numbers: Numbers = {}
    for resource in messages.ExportMetricsServiceRequest.FromString(heard[-1]).resource_metrics:
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            points = metric.sum.data_points or metric.gauge.data_points
            assert metric.sum.is_monotonic == bool(metric.sum.data_points)
            name = metric.name + "_total" * metric.sum.is_monotonic
            for point in points:
                labels = tuple(sorted((each.key, each.value.string_value) for each in point.attributes))
                numbers[name, labels] = point.as_int if point.HasField("as_int") else point.as_double
    assert {name for name, _ in numbers} <= METRICS.keys()
    place = {"rank": 0, "communicator": "world"}
    assert of(numbers, "aiodist_operations_total", **place)["broadcast"] == 3
    assert of(numbers, "aiodist_bytes_total", **place)["broadcast"] == 84
    if where == "folder":
        written = parsed((tmp_path / "rank-0.prom").read_text())
        assert of(written, "aiodist_operations_total", **place) == of(numbers, "aiodist_operations_total", **place)


# --- jobs ------------------------------------------------------------------------------------------------------------

TRAINING = """
import sys, torch, torch.distributed as dist, urllib.request
import aiodist.c10d
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("aiodist")
net = DistributedDataParallel(torch.nn.Linear(3, 1))
for _ in range(4):
    net(torch.rand(2, 3)).mean().backward()
print("ready", flush=True)
sys.stdin.read() if dist.get_rank() == 0 else None
dist.barrier()
dist.destroy_process_group()
"""


def test_w13_a_job_of_torch_distributed(nursery: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TRAINING)
    words = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", "--metrics", "127.0.0.1:0"]
    with subprocess.Popen(
        [*words, *stub(nursery, program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert job.stdin is not None
        seen = ""
        while seen.count("ready") < 2:
            line = job.stdout.readline()
            assert line, seen
            seen += line
        found = re.search(r"metrics: http://127.0.0.1:(\d+)/metrics", seen)
        assert found, seen
        numbers = scrape(int(found[1]))
        for rank in range(2):
            kinds = [
                of(numbers, "aiodist_operations_total", rank=rank, communicator=comm) for comm in communicators(numbers)
            ]
            assert sum(counted.get("allreduce", 0) for counted in kinds) >= 4, numbers
        job.stdin.close()
        assert job.wait(60) == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(found[1])))


def communicators(numbers: Numbers) -> set[str]:
    return {dict(labels)["communicator"] for name, labels in numbers if name == "aiodist_operations_total"}


# --- the documentation -----------------------------------------------------------------------------------------------


def test_w13_the_dashboard_and_the_page_name_metrics_that_exist() -> None:
    dashboard = json.loads((DOCS / "metrics" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(queries) >= 8
    for query in queries:
        named = re.findall(r"\baiodist_\w+", query)
        assert named, query
        assert {*named} <= METRICS.keys(), query
    page = (DOCS / "metrics.md").read_text()
    assert {*re.findall(r"\baiodist_\w+", page)} == METRICS.keys()
