"""Ends of a program: `ending.py NAME`. Each rank prints its observations."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import aiodist
from aiodist.testing.seams.world import Limits, opened
from tests.support.blocking import blocked_until, rounds
from tests.support.forked import still_in
from tests.support.programs import mark, say, until_stopped
from tests.support.until import until


def native(seconds: int) -> None:
    """Spend time in native code that lets the others run."""
    ctypes.CDLL(None).sleep(seconds)


async def clean() -> None:
    """All is well, though much is left lying about."""
    warnings.simplefilter("always")
    threading.Thread(target=native, args=(60,), daemon=True).start()
    async with aiodist.init() as coll:
        t = torch.ones(1 << 16)
        pids = await coll.allgather_object(os.getpid())
        if coll.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # a peer that stops is late, not lost
        else:
            until_stopped(pids[1])
            os.kill(pids[1], signal.SIGCONT)
        coll.allreduce(t)  # unconsumed, and pending when the block is left
        await coll.allreduce(torch.ones(1))
        unmatched = coll.recv(torch.zeros(3), src=1 - coll.rank, tag=9)
        dropped = coll.scan(torch.ones(2))
        await until(dropped.done)
        del dropped
        big = torch.ones(1 << 20)
        handle = coll.allreduce(big)
    say("drained:", handle.done(), big[0].item(), t[0].item())
    say("unmatched:", unmatched.cancelled())
    for call in (lambda: coll.allreduce(1.0), coll.dup, lambda: coll.recv(t)):
        try:
            call()
        except aiodist.CommunicatorClosed as error:
            say("closed:", error)
    await coll.aclose()  # does nothing

    ended = Path("rank 0 ended")

    def later() -> None:
        threading.main_thread().join()
        say("the user's thread has ended")
        if coll.rank == 0:
            ended.touch()

    threading.Thread(target=later).start()
    if coll.rank == 1:
        blocked_until(ended.exists)  # the other waits for it in MPI_Finalize


async def raised() -> None:
    """Rank 1 raises while the others wait for it, compute, and hold something that they must release."""
    async with aiodist.init() as coll:
        side = await coll.dup()
        pending = coll.recv(torch.zeros(1), src=1 - coll.rank)
        if coll.rank == 1:
            await pending  # the other waits then
            mark()
            raise ValueError("boom")
        waiting = asyncio.create_task(awaits(side.allreduce(torch.ones(4))))
        await coll.send(torch.ones(1), 1)
        try:
            await pending
        except aiodist.RemoteError as error:
            say("raised by:", error.raised_by)
            say("boom:", 'raise ValueError("boom")' in error.traceback and "ending.py" in error.traceback)
            say("in a task:", await waiting)
            for name, call in {"world": coll.allreduce, "dup": side.allreduce}.items():
                try:
                    call(torch.ones(1))
                except aiodist.RemoteError:
                    say(f"then {name}: refused")
            raise
        finally:
            await rounds()
            say("released: yes")


async def awaits(handle: aiodist.Handle[Any]) -> str:
    try:
        return str(await handle)
    except aiodist.AiodistError as error:
        return type(error).__name__


async def exit_in_task() -> None:
    """sys.exit in another task than the one that opened the world, while both wait."""
    async with aiodist.init() as coll:
        await coll.barrier()  # the world is open on the other rank too
        if coll.rank == 1:
            exits = asyncio.create_task(exit_with(3))
        try:
            await coll.recv(torch.zeros(1), src=1 - coll.rank)
        except aiodist.RemoteError as error:
            say("told:", error.args[0].splitlines()[0])
            raise
        del exits


async def exit_with(code: int) -> None:
    await rounds()
    mark()
    sys.exit(code)


async def exit_in_group() -> None:
    """sys.exit in a task group, inside the block."""
    async with aiodist.init() as coll, asyncio.TaskGroup() as group:
        group.create_task(awaits(coll.recv(torch.zeros(1), src=1 - coll.rank)))
        if coll.rank == 1:
            group.create_task(exit_with(4))
        else:
            group.create_task(collective(coll))


async def collective(coll: aiodist.Communicator) -> None:
    await coll.allreduce(torch.ones(1))


async def executor_in_native_code() -> None:
    """The block raises while a thread of asyncio's executor is in native code."""
    async with aiodist.init() as coll:
        if coll.rank == 1:
            working = asyncio.create_task(asyncio.to_thread(native, 60))
            await rounds()
            mark()
            raise SystemExit(5)
        await coll.allreduce(torch.ones(1))
        del working


async def user_thread() -> None:
    """The block raises while a thread of the user's, which is no daemon, has a minute to go."""
    async with aiodist.init() as coll:
        if coll.rank == 1:
            threading.Thread(target=threading.Event().wait, args=(60,)).start()
            await rounds()
            mark()
            raise SystemExit(6)
        await coll.allreduce(torch.ones(1))


async def interrupted() -> None:
    """Waits for Ctrl-C."""
    async with aiodist.init() as coll:
        try:
            await coll.barrier()  # now all are in this block
            if coll.rank == 0:
                say("ready")
            await coll.recv(torch.zeros(1), src=1 - coll.rank)
        finally:
            say("released: yes")


async def caught() -> None:
    """The program catches the failure and continues, for longer than a leaving process may take."""
    try:
        async with opened(Limits(leave=0.3, abort=0.5)):
            raise ValueError("caught")
    except ValueError:
        await asyncio.sleep(1.0)  # a promise of seconds: L2
        say("went on: yes")


async def forked() -> None:
    """A child that `os.fork` made leaves through the block and the loop, while a reduction is in flight."""
    async with aiodist.init() as coll:
        # The first operation loads more of the MPI library; a fork meanwhile may copy a lock of the C library that is
        # taken, which no fork is safe from.
        await coll.allreduce(torch.ones(1 << 20))
        await coll.allreduce(1)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        reduced = Path(f"reduced {coll.rank}")
        for issue in (True, False):
            big = torch.ones(1 << 20)
            pending = coll.allreduce(big)
            child = os.fork()
            if child == 0:
                still_in(loop, task)
                if issue:
                    in_child(coll)
                    blocked_until(reduced.exists)  # what the loop was to look at meanwhile is the parent's
                    sys.exit(7)
                return
            await pending
            await asyncio.to_thread(reduced.touch)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            say("child:", os.waitstatus_to_exitcode(status))
            say("sums:", big[0].item(), await coll.allreduce(1))
    say("end:", await asyncio.to_thread(int, 8))


FULL = 8 << 20  # bytes, more than a socket takes


class EndsLate(ThreadPoolExecutor):
    """The loop waits for its end, which a thread reports."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        time.sleep(0.1)
        super().shutdown(wait, cancel_futures=cancel_futures)


async def forked_with_a_connection() -> None:
    """A child uses its copy of a connection and of the loop's threads; those of the parent still work."""
    warnings.simplefilter("ignore", DeprecationWarning)
    async with aiodist.init():
        here, there = socket.socketpair()
        there.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=here)
        reading = asyncio.ensure_future(reader.read(1))
        await asyncio.to_thread(int, 8)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        child = os.fork()
        if child == 0:
            still_in(loop, task)
            writer.write(b"x" * FULL)  # the loop waits until there is room
            writer.transport.abort()
            loop.set_default_executor(EndsLate())
            sys.exit(7)
        say("child:", os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]))
        with contextlib.suppress(BlockingIOError):
            while there.recv(FULL):  # what the child has written
                pass
        writer.write(b"x" * FULL)
        left = FULL
        while left:
            left -= len(await loop.sock_recv(there, left))
        await loop.sock_sendall(there, b"!")
        say("read:", await reading)
        writer.transport.abort()
        there.close()
    say("end:", await asyncio.to_thread(int, 8))


def in_child(coll: aiodist.Communicator) -> None:
    for call in (lambda: coll.allreduce(1), coll.barrier, coll.dup, lambda: coll.send(torch.ones(1), 0)):
        try:
            call()
        except RuntimeError as error:
            say("in the child:", error)


async def not_drained() -> None:
    """Rank 0 leaves with an operation in flight that rank 1 never issues."""
    async with opened(Limits(drain=0.5)) as coll:
        if coll.rank == 1:
            await coll.recv(torch.zeros(1), src=0)
        mark()
        coll.allreduce(torch.ones(4))


async def killed() -> None:
    """The last rank is killed; one waits for it, one is idle."""
    async with aiodist.init() as coll:
        last = coll.size - 1
        await coll.barrier()
        if coll.rank == last:
            await rounds()
            mark()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if coll.rank == 0:
                await coll.allreduce(torch.ones(1 << 10))
            while True:  # idle, save for a call now and then
                await rounds()
                coll.send(torch.ones(1), coll.rank)
        except aiodist.PeerLost as error:
            say("lost:", error.lost, time.monotonic())
        try:
            coll.allreduce(torch.ones(1))
        except aiodist.PeerLost as error:
            say("then:", error.lost)
            raise


PROGRAMS: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    program.__name__: program
    for program in (
        clean,
        raised,
        exit_in_task,
        exit_in_group,
        executor_in_native_code,
        user_thread,
        interrupted,
        caught,
        forked,
        forked_with_a_connection,
        not_drained,
        killed,
    )
}

if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    main = PROGRAMS[sys.argv[1]]
    if "asyncio" in sys.argv:
        asyncio.run(main())
    else:
        aiodist.run(main)
