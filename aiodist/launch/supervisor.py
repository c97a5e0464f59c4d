"""Watches one job from its start to its end: events, their meaning, and the times to stop ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodist.control import name_ranks
from aiodist.elastic.sessions import ElasticSessions
from aiodist.errors import LaunchError
from aiodist.launch.hosts import host_of
from aiodist.launch.processes import ProcessEnded
from aiodist.launch.ranks import Finished, Ranks
from aiodist.launch.verdict import Ending, JobVerdict, Known, Left, describe, how_left
from aiodist.terminal import is_lent

if TYPE_CHECKING:
    from aiodist.launch.commands import Job

START_TIMEOUT = 60.0
_AFTER_KILL = 1.5
"""Time for the end and the last output of killed processes, in seconds."""
_NOTIFIED = 2.5
"""Time in which ranks may end by themselves after the control channel has reported a failure, in seconds."""
_MPIRUN_GRACE = 0.5
"""Time for the exits of ranks after that of their mpirun, in seconds."""
_LENT_SECONDS = 0.1
"""Pause between two looks if a rank uses the terminal, in seconds."""
_TIMED_OUT = 124  # the exit code of timeout(1)
_SIGNALLED = 128  # plus the signal's number, as in shells
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Signalled:
    """The launcher received a signal, or its output has no reader (SIGPIPE)."""

    signum: int


Event = Ending | Finished | ProcessEnded | Signalled


class Supervisor:
    """Takes events until every rank has finished. `code` is then the job's exit code."""

    def __init__(self, job: Job, ranks: Ranks, roster: Known, say: Callable[[str], None]) -> None:
        """`roster` is that of the hub, or the sessions of an elastic job."""
        self._elastic = roster if isinstance(roster, ElasticSessions) else None
        self.code: int | None = None
        self.stopping = False
        self._job = job
        self._ranks = ranks
        self._roster = roster
        self._say = say
        self._verdict = JobVerdict(job, roster)
        self._loop = asyncio.get_running_loop()
        self._left = set(range(job.ranks))
        self._times = {"start": self._loop.time() + START_TIMEOUT}
        """Times of "start", "finish", "mpirun", "stop", "kill" and "end", by the loop's clock."""
        if job.debug is not None:
            say("aiodist run: rank {} waits for a debugger at 127.0.0.1:{}".format(*job.debug))
        elif job.timeout is not None:
            self._times["finish"] = self._loop.time() + job.timeout
        self._has_terminal = os.isatty(0)
        self._ticked = self._loop.time()
        """Time of the last `_tick`, by the loop's clock."""
        self._mpirun_code = 0
        self._asked = 0.0
        """Time at which ranks were asked to stop, by the loop's clock."""

    def started(self, rank: int) -> None:
        """Add one rank of an elastic job."""
        self._left.add(rank)
        self._verdict.started(rank)

    async def watch(self, events: asyncio.Queue[Event]) -> int:
        """Return the exit code when all ranks have finished, or some time after they were killed.

        Raises `LaunchError` if ranks cannot be started.
        """
        while self._left or (not self.stopping and self._verdict.due is not None):
            try:
                async with asyncio.timeout_at(self._next()):
                    self._take(await events.get())
            except TimeoutError:
                pass
            self._tick()
            if self._is_due("end", self._loop.time()):
                break
        return self._verdict.code or 0 if self.code is None else self.code

    def _next(self) -> float | None:
        times = [*self._times.values(), self._verdict.due]
        if "finish" in self._times and self._has_terminal:
            times.append(self._ticked + _LENT_SECONDS)
        return min((time for time in times if time is not None), default=None)

    def _is_due(self, what: str, now: float) -> bool:
        """Return True once, when the time has come."""
        if due := what in self._times and now >= self._times[what]:
            del self._times[what]
        return due

    def _take(self, event: Event) -> None:
        match event:
            case Ending() as ending:
                self._ended(ending)
            case Finished(rank):
                self._left.discard(rank)
            case ProcessEnded(None, code):
                self._mpirun_ended(code)
            case ProcessEnded(int(rank), code) if rank not in self._ranks.came:  # its guard never connected
                if self._job.hosts and not self.stopping and not (self._elastic and self._elastic.begun):
                    raise LaunchError(f"rank {rank} was not started{self._where({rank})}: {describe(code)}")
                self._ended(Ending(rank, code or 1))
                self._left.discard(rank)
            case Signalled(signum) if signum in _PASSED_ON:
                self._ranks.signal(signum)
            case Signalled() if self.stopping:  # a second request
                if "end" not in self._times:
                    self._times["kill"] = self._loop.time()
            case Signalled(signum):
                self.code = _SIGNALLED + signum
                self._stop(signal.SIGTERM if signum == signal.SIGPIPE else signum)

    def _tick(self) -> None:
        before, self._ticked = self._ticked, self._loop.time()
        now = self._ticked
        if "finish" in self._times and is_lent():  # the time at the prompt of a debugger does not count
            self._times["finish"] += now - before
        if len(self._ranks.came) >= self._job.ranks:
            self._times.pop("start", None)
        # New ranks of an elastic job do not belong to the mpirun.
        if self._is_due("mpirun", now) and not (self._elastic and self._left.isdisjoint(range(self._job.ranks))):
            self._judge([] if self.stopping else self._verdict.stopped_by_mpirun(self._mpirun_code))
            self._stop(signal.SIGTERM)
        if not self.stopping:
            self._judge(self._verdict.tick(now))
        if self._is_due("start", now) and not self.stopping:
            never = set(range(self._job.ranks)) - self._ranks.came
            raise LaunchError(f"{name_ranks(never)} did not start within {START_TIMEOUT:g} s{self._where(never)}")
        if self._is_due("finish", now) and not self.stopping:
            working = name_ranks(self._verdict.working)
            self._say(f"aiodist run: not finished within {self._job.timeout:g} s: {working}")
            self.code = _TIMED_OUT
            self._stop(signal.SIGTERM)
        if self._is_due("stop", now):
            self._ranks.signal(signal.SIGTERM)
        if self._is_due("kill", now):
            if self._left and self.code is not None and self.code > _SIGNALLED:
                self._say(
                    f"aiodist run: {name_ranks(self._left)} had not ended {now - self._asked:.1f} s after "
                    f"{signal.Signals(self.code - _SIGNALLED).name}: killed; --kill-after gives them more seconds"
                )
            self._times["end"] = now + _AFTER_KILL
            self._ranks.signal(signal.SIGKILL)

    def _ended(self, ending: Ending) -> None:
        if ending.rank not in self._verdict.working:
            return
        elastic = self._elastic
        if elastic is not None:
            elastic.end(ending.rank, describe(ending.code))
        if elastic is not None and ending.rank in elastic.dismissed:
            self._judge(self._verdict.dismissed(ending.rank))
            return
        lines = self._verdict.ended(ending, self._loop.time(), elastic=elastic is not None and elastic.begun)
        if self.code is None:
            self._judge(lines)

    def _judge(self, lines: list[str]) -> None:
        for line in lines:
            self._say(line)
        if self._verdict.code is not None and not self.stopping and not self._job.keep_going:
            told = any(how_left(self._roster, rank) is Left.OPEN for rank in self._verdict.working)
            self._stop(signal.SIGTERM, _NOTIFIED if told else 0.0)

    def _mpirun_ended(self, code: int) -> None:
        if not self._ranks.came:
            hint = f"; aiodist doctor {self._hosts()} looks for the cause" if self._job.hosts else ""
            raise LaunchError(f"mpirun ended before it had started a rank: {describe(code)}{hint}")
        self._mpirun_code = code
        self._times["mpirun"] = self._loop.time() + (_MPIRUN_GRACE if self._left else 0.0)

    def _hosts(self) -> str:
        return f"--hosts {','.join(map(str, self._job.hosts))}"

    def _where(self, ranks: set[int]) -> str:
        """Return the hosts of these ranks, and the command that diagnoses them."""
        if not self._job.hosts:
            return ""
        names = dict.fromkeys(host_of(self._job.hosts, rank) for rank in sorted(ranks))
        return f" on {', '.join(names)}; aiodist doctor {self._hosts()} looks for the cause"

    def _stop(self, signum: int, patience: float = 0.0) -> None:
        if not self.stopping:
            self.stopping = True
            self._asked = self._loop.time()
            if signum == signal.SIGINT:
                self._say(f"aiodist run: interrupted; stopping {name_ranks(self._left)}")
            now = self._loop.time()
            if patience:
                self._times["stop"] = now + patience
                self._times["kill"] = now + max(patience + _AFTER_KILL, self._job.kill_after)
            else:
                self._ranks.signal(signum)
                self._times["kill"] = now + self._job.kill_after
