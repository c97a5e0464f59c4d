"""W4: a thread of aiodist's counts as idle only while no job is in its queue or in its hands."""

from __future__ import annotations

import sys
import threading
from queue import Empty

import pytest

from aiodist.threads import JobQueue, is_waiting


def test_w4_a_thread_that_has_taken_a_job_is_not_idle() -> None:
    """The interpreter may switch threads between any two instructions, so also when a job has just been taken."""
    queue: JobQueue[int | None] = JobQueue()
    ended: list[int] = []

    def work() -> None:
        while (job := queue.get()) is not None:
            ended.append(job)

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for job in range(3000):
            queue.put(job)
            while not is_waiting(thread.ident or 0):
                pass
            assert len(ended) == job + 1
    finally:
        sys.setswitchinterval(interval)
        queue.put(None)
        thread.join()


def test_w4_a_queue_has_its_jobs_in_order() -> None:
    queue: JobQueue[int] = JobQueue()
    assert queue.empty()
    with pytest.raises(Empty):
        queue.get_nowait()
    with pytest.raises(Empty):
        queue.get(timeout=0.001)
    for job in range(3):
        queue.put(job)
    assert not queue.empty()
    assert [queue.get(), queue.get_nowait(), queue.get(timeout=1)] == [0, 1, 2]
    assert not is_waiting(threading.get_ident())
