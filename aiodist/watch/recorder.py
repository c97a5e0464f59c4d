"""What this process does, written to a file as it goes on; `merging` makes one timeline of the files of all ranks.

A file has lines of JSON: a dict is what is said of a rank, a list is a batch of spans
`[rank, track, name, began, ended, details]`, in seconds of the process's own clock. It is written several times a
second, so what a killed rank did is there but for the last moments.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from aiodist.errors import ConfigError
from aiodist.handles.tracing import rank_of_task, tracing
from aiodist.watch.clock import Offset

_FLUSH_SECONDS = 0.2
_BATCH = 256  # spans that are encoded at a time: meanwhile no other thread runs


class Recorder:
    """Takes the spans of this process, for one rank or for several that are its tasks, and writes them."""

    running: ClassVar[Recorder | None] = None

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._process = os.getpid()
        self._members: set[int] = set()
        self._spans: deque[tuple[Any, ...]] = deque()
        self._ending = threading.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{rank}.jsonl").open("a")
        except OSError as error:
            raise ConfigError(f"a trace cannot be written to {folder}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="aiodist-trace", daemon=True)
        self._thread.start()

    @classmethod
    def check_free(cls, rank: int) -> None:
        """Raise RuntimeError where `rank` is recorded already."""
        if cls.running is not None and cls.running._process == os.getpid() and rank in cls.running._members:
            raise RuntimeError(f"rank {rank} is traced already: one trace at a time, of the launcher or of a block")

    @classmethod
    def join(cls, folder: Path, rank: int, size: int) -> Recorder:
        """Return that of this process, which records `rank` too from now on; raise `ConfigError` where it cannot."""
        cls.check_free(rank)
        recorder = cls.running
        if recorder is None or recorder._process != os.getpid():  # that of the process that this one was forked from
            recorder = cls.running = tracing.to = cls(folder, rank)
        recorder._members.add(rank)
        recorder.say(rank=rank, size=size, host=socket.gethostname(), process=os.getpid())
        return recorder

    def leave(self, rank: int) -> None:
        """Record `rank` no more; with the last one the file is complete."""
        self._members.remove(rank)
        if not self._members:
            Recorder.running = tracing.to = None
            self._ending.set()
            self._thread.join()
            self._file.close()

    def span(self, name: str, began: float, /, *, track: str = "", of_rank: int | None = None, **details: Any) -> None:  # noqa: ANN401
        """See `Tracer`."""
        if of_rank is None and (of_rank := rank_of_task.get()) is None:
            of_rank = self._rank
        track = track or threading.current_thread().name
        self._spans.append((of_rank, track, name, began, perf_counter(), details))

    def synchronise(self, offsets: Mapping[int, Offset]) -> None:
        """Take note of how far the clocks of the ranks are from that of the first."""
        now = perf_counter()
        self.say(offsets={str(rank): offset for rank, offset in offsets.items() if offset.error < 1e9}, at=now)

    def say(self, **what: Any) -> None:  # noqa: ANN401
        """Write something else than spans, behind those that were recorded before."""
        self._spans.append((what,))

    # --- writing ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.wait(_FLUSH_SECONDS):
                self._write()
            self._write()
        except OSError as error:
            tracing.to = None
            logging.getLogger("aiodist").warning("%s: the trace ends here: %s", self._file.name, error.strerror)

    def _write(self) -> None:
        while self._spans:
            batch = [self._spans.popleft() for _ in range(min(len(self._spans), _BATCH))]
            said = [one[0] for one in batch if len(one) == 1]
            spans = [one for one in batch if len(one) > 1]
            for line in (*said, *([spans] if spans else [])):
                self._file.write(json.dumps(line, default=str, separators=(",", ":")) + "\n")
        self._file.flush()
