# A program as others write it, without types.
# mypy: ignore-errors
"""Groups whose ranks are threads of one process, aborted at a bad time: argv[1] says when. All ends in 10 s."""

import faulthandler
import gc
import sys
import threading
from contextlib import ExitStack

import torch
from in_threads import left, made, pool

faulthandler.dump_traceback_later(40, exit=True)
when = sys.argv[1]


def ends(call):
    """Return how `call` ended, as text."""
    try:
        return repr(call())
    except Exception as error:  # noqa: BLE001  - it is printed
        return f"{type(error).__name__}: {error}"


def fall_into_a_cycle(groups):
    for group in groups:
        cycle = [group]
        cycle.append(cycle)
    groups.clear()


closing = threading.Event()
close = ExitStack.close
ExitStack.close = lambda stack: (closing.set(), close(stack))  # what a shutdown calls

for turn in range(3):
    groups = made(f"{turn}")
    first, second = groups
    home = first.home
    waiting = []
    if when == "a group is being made":
        making = [pool.submit(ends, lambda home=home, k=k: home.group(f"part{k}", [0, 1])) for k in range(20)]
        first.abort()
        print(when, "->", {future.result(10)[:40] for future in making}, flush=True)
    elif when == "a collective is in flight":
        waiting = [pool.submit(ends, first.allreduce([torch.ones(3)]).wait)]
        first.abort()
    elif when == "from many threads":
        for future in [pool.submit(ends, first.abort) for _ in range(4)]:
            assert future.result(10) == "None", future.result()
    elif when == "on the loop's own thread":
        home.loop.call_soon_threadsafe(first.abort)
    elif when == "the group is being closed":
        closing.clear()
        waiting = [pool.submit(ends, first.shutdown)]
        assert closing.wait(10)
        first.abort()
    elif when == "after it was closed":
        list(pool.map(lambda group: group.shutdown(), groups))
        first.abort()
    elif when == "as the collector finds it":  # on a loop's thread, in the second turn its own
        gc.disable()
        loops = [group.home.loop for group in groups]
        fall_into_a_cycle(groups)
        del first, second, home
        collected = threading.Event()
        if turn:
            loops[turn - 1].call_soon_threadsafe(lambda event=collected: (gc.collect(), event.set()))
        else:
            gc.collect()
            collected.set()
        assert collected.wait(10)
        gc.enable()
    if groups and when != "after it was closed":
        for group in groups:  # the first serves the control channel of both, for 5 s while the second has not left
            group.abort()
    for future in waiting:
        print(when, "->", future.result(10)[:150], flush=True)
        assert future.result() != "None" or when == "the group is being closed"  # the abort may have come first
    assert not left(10)
print("all ended", flush=True)
