"""S1: `Worker`, one thread or several with a queue of jobs: order, close, abort, fork, errors and exit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from weakref import ref

import pytest

from aiodist.threads import Worker, is_waiting

pytestmark = pytest.mark.timeout(30)


class Block:
    """A job that runs until the test releases it."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(20)


def call(job: Callable[[], object]) -> None:
    job()


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """The types of the errors that `threading.excepthook` got."""
    caught: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(args.exc_type))
    return caught


def test_s1_jobs_run_in_order_on_one_thread() -> None:
    seen: list[tuple[int, int]] = []
    worker: Worker[int] = Worker("one", lambda job: seen.append((job, threading.get_ident())))
    for job in range(1000):
        worker.submit(job)
    worker.close()
    worker.ended.result(10)
    assert [job for job, _ in seen] == list(range(1000))
    assert {thread for _, thread in seen} == {worker.threads[0].ident}
    assert worker.join(10)


def test_s1_several_threads_take_jobs_from_one_queue() -> None:
    together = threading.Barrier(3)
    names: set[str] = set()

    def meet(_: int) -> None:
        names.add(threading.current_thread().name)
        together.wait(10)

    worker: Worker[int] = Worker("three", meet, threads=3)
    for job in range(6):
        worker.submit(job)
    worker.close()
    worker.ended.result(10)
    assert names == {"three-0", "three-1", "three-2"}


def test_s1_close_while_a_call_runs_runs_the_queued_jobs() -> None:
    block, ran = Block(), list[str]()
    worker: Worker[Callable[[], object]] = Worker("closed", call, finish=lambda: ran.append("finish"))
    worker.submit(block)
    worker.submit(lambda: ran.append("queued"))
    assert block.begun.wait(10)
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="closed is closed"):
        worker.submit(block)
    assert not worker.ended.done()
    assert not worker.join(0.01)
    block.go.set()
    worker.ended.result(10)
    assert ran == ["queued", "finish"]


@pytest.mark.parametrize("threads", [1, 3])
def test_s1_abort_drops_the_queued_jobs_after_the_running_calls(threads: int) -> None:
    blocks, log = [Block() for _ in range(threads)], list[object]()

    def run(job: object) -> None:
        if isinstance(job, Block):
            job()
        log.append(("ran", job))

    worker: Worker[object] = Worker(
        "aborted",
        run,
        drop=lambda job: log.append(("dropped", job)),
        finish=lambda: log.append("finish"),
        threads=threads,
    )
    for block in blocks:
        worker.submit(block)
    for i in range(3):
        worker.submit(i)
    assert all(block.begun.wait(10) for block in blocks)
    worker.abort()
    worker.abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        worker.submit(3)
    assert not log
    for block in blocks:
        block.go.set()
    worker.ended.result(10)
    assert {("ran", block) for block in blocks} < set(log)
    assert [entry for entry in log if entry not in {("ran", block) for block in blocks}] == [
        *(("dropped", i) for i in range(3)),
        "finish",
    ]


def test_s1_an_abort_after_a_close_drops_what_is_queued() -> None:
    block, dropped = Block(), list[object]()
    worker: Worker[Callable[[], object]] = Worker("both", call, drop=dropped.append)
    worker.submit(block)
    worker.submit(dropped.clear)
    assert block.begun.wait(10)
    worker.close()
    worker.abort()
    block.go.set()
    worker.ended.result(10)
    assert dropped == [dropped.clear]


def test_s1_each_job_runs_or_is_dropped_or_refused_when_other_threads_submit_during_an_abort() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            ends: list[int] = []
            worker: Worker[int] = Worker("raced", ends.append, drop=ends.append, threads=2)
            submitted: list[int] = []

            def submit(first: int, worker: Worker[int] = worker, submitted: list[int] = submitted) -> None:
                for job in range(first, first + 1000):
                    try:
                        worker.submit(job)
                    except RuntimeError:
                        return
                    submitted.append(job)

            threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 1000)]
            for thread in threads:
                thread.start()
            while len(ends) < 20:
                pass
            worker.abort()
            for thread in threads:
                thread.join()
            worker.ended.result(10)
            assert worker.join(10)
            assert sorted(ends) == sorted(submitted)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_s1_an_error_of_a_job_is_reported_and_the_next_job_runs(
    kind: type[BaseException], hooked: list[type[BaseException]]
) -> None:
    def fail() -> None:
        raise kind

    ran: list[int] = []
    worker: Worker[Callable[[], object]] = Worker("fails", call)
    worker.submit(fail)
    worker.submit(lambda: ran.append(1))
    worker.close()
    worker.ended.result(10)
    assert ran == [1]
    assert hooked == [kind]


def test_s1_an_error_of_drop_is_reported_and_the_next_job_is_dropped(hooked: list[type[BaseException]]) -> None:
    block, dropped = Block(), list[object]()

    def drop(job: object) -> None:
        dropped.append(job)
        raise KeyboardInterrupt

    worker: Worker[Callable[[], object]] = Worker("drops", call, drop=drop)
    worker.submit(block)
    worker.submit(int)
    worker.submit(str)
    assert block.begun.wait(10)
    worker.abort()
    block.go.set()
    worker.ended.result(10)
    assert dropped == [int, str]
    assert hooked == [KeyboardInterrupt] * 2


def test_s1_a_broken_hook_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise LookupError

    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", broken)
    monkeypatch.setattr(threading, "__excepthook__", lambda args: shown.append(args.exc_type))
    worker: Worker[Callable[[], object]] = Worker("hook", call)
    worker.submit(lambda: [][0])
    worker.close()
    worker.ended.result(10)
    assert shown == [IndexError]


def test_s1_an_error_of_finish_is_raised_by_the_wait_for_the_end() -> None:
    def finish() -> None:
        raise SystemExit(3)

    worker: Worker[int] = Worker("finishes", id, finish=finish)
    assert not worker.ended.cancel()
    worker.close()
    assert isinstance(worker.ended.exception(10), SystemExit)
    assert worker.join(10)


def test_s1_a_worker_ends_itself_when_its_jobs_are_not_needed() -> None:
    gone, block, dropped = threading.Event(), Block(), list[object]()
    idle: Worker[int] = Worker("idle", id, gone=gone.is_set, threads=2)
    busy: Worker[Callable[[], object]] = Worker("busy", call, drop=dropped.append, gone=gone.is_set)
    busy.submit(block)
    busy.submit(int)
    assert block.begun.wait(10)
    assert busy.is_needed()
    gone.set()
    block.go.set()
    for worker in (idle, busy):
        worker.ended.result(10)
        assert worker.aborted
        assert not worker.is_needed()
        assert worker.join(10)
    assert dropped == [int]


def test_s1_a_thread_counts_as_idle_between_jobs_and_keeps_none() -> None:
    computing: set[int] = set()
    block = Block()
    worker: Worker[Callable[[], object]] = Worker("counted", call, computing=computing)
    me = worker.threads[0].ident or 0
    worker.submit(block)
    assert block.begun.wait(10)
    assert computing == {me}
    assert not is_waiting(me)
    block.go.set()
    gone = ref(block)
    del block
    while not is_waiting(me):
        pass
    assert not computing
    assert gone() is None
    worker.close()
    assert worker.join(10)


def test_s1_threads_end_if_one_of_them_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        begin(thread)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        Worker("full", id, threads=2)
    started[0].join(10)
    assert not started[0].is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_s1_a_forked_child_refuses_jobs_and_waits_for_nothing() -> None:
    block = Block()
    worker: Worker[Callable[[], object]] = Worker("forked", call)
    ended: Worker[int] = Worker("ended", id)
    ended.close()
    ended.ended.result(10)
    worker.submit(block)
    assert block.begun.wait(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(RuntimeError, match="forked from"):
                worker.submit(block)
            with pytest.raises(RuntimeError, match="forked from"):
                worker.ended.result(0)
            worker.abort()
            worker.close()
            assert worker.join()
            assert ended.ended.result(0) is None
            own: Worker[Future[int]] = Worker("own", lambda future: future.set_result(1))
            asked: Future[int] = Future()
            own.submit(asked)
            assert asked.result(10) == 1
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    block.go.set()
    worker.submit(int)
    worker.close()
    worker.ended.result(10)


def test_s1_the_exit_of_the_interpreter_waits_for_running_calls_only(tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text(
        textwrap.dedent(
            """
            import threading
            from aiodist import handles
            from aiodist.threads import Worker

            begun, exiting = threading.Event(), threading.Event()

            def work(job):
                begun.set()
                assert exiting.wait(20)
                print(job, flush=True)

            def watch():
                while not worker.aborted:
                    exiting.wait(0.001)
                exiting.set()

            worker = Worker("unclosed", work, drop=lambda job: print("dropped", job, flush=True))
            stuck = Worker("stuck", lambda job: threading.Event().wait(), exit_seconds=0.1)
            worker.submit("ran")
            worker.submit("late")
            stuck.submit(None)
            begun.wait(20)
            threading.Thread(target=watch, daemon=True).start()
            """
        )
    )
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        timeout=25,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout.decode().splitlines() == ["ran", "dropped late"]


def test_s1_an_error_of_gone_ends_the_worker(hooked: list[type[BaseException]]) -> None:
    def gone() -> bool:
        raise ZeroDivisionError

    finished = threading.Event()
    worker: Worker[int] = Worker("gone", lambda _: None, finish=finished.set, gone=gone)
    worker.ended.result(10)
    assert finished.is_set()
    assert worker.aborted
    assert ZeroDivisionError in hooked


def test_s1_a_worker_whose_second_thread_cannot_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == 1:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    finished = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="start new thread"):
            Worker[int]("limited", lambda _: None, finish=finished.set, threads=3)
    assert finished.wait(10)
