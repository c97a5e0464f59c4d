"""A CUDA device where there is none, on which a missing synchronisation shows up as wrong data.

    with simulated_cuda(devices=2, seed=0) as device:
        t = torch.ones(1000, device="cuda")
        with device.paused():                       # nothing on any stream ends until this block does
            host = t.to("cpu", non_blocking=True)   # in pinned memory, as torch does it, and not there yet
            assert host.isnan().all()
        torch.cuda.synchronize()
        assert host.eq(1).all()

It is no GPU: it proves ordering, not speed, and nothing about drivers, kernels or memory limits.

What it is
    `torch.cuda` says that it has devices, and gives streams and events. Each stream is a thread that does its work in
    order, a random moment after it was queued; streams wait for each other only where an event says so. Tensors on
    "cuda:0" and so on are CPU tensors that say otherwise. What is computed with them is queued on the calling thread's
    current stream of their device, and returns at once; autograd, `nn.Module.to`, optimizers and hooks work as always.
    Operators that need the data on the host wait for the stream, as do copies, unless they are `non_blocking` with
    pinned memory. Tensors of different devices do not mix. An error in queued work is raised by the next call
    that asks the device, and by every one after that.

How mistakes show
    New memory holds poison (NaN, or a number far off) until the work that fills it is done, and so does the target of
    a copy from the moment when the copy is next in its stream: who reads without waiting for the right event reads
    that. Freed memory is poisoned when the stream that it was allocated on gets there, and those named to
    `record_stream`: work that another stream still does on it reads poison, and `device.hazards` names it, as it does
    what is freed after `device.fail()` and with torch would end the process. A race is
    seen where it is lost: `device.paused(stream)` and `stream.hold()` make sure of it. `device.synchronisations` and
    `device.launches` count what the host waited for and what was queued.

What it is not
    - Memory is not given to other tensors while a test could see it, nor does it run out.
    - On a GPU each step of backward runs in a thread of the engine, on the stream of its forward. Here all of it runs
      in the calling thread on its current stream, after all that the forward queued on any; hooks see that stream.
    - The numbers come from the CPU's kernels and its generator: random ones do not depend on the seed alone where
      several streams draw. Autocast for "cuda", graphs (but for `device.capturing()`), sparse tensors and
      `storage.resize_` are not simulated; `t.untyped_storage().device` tells the truth.
    - Operators that torch composes of others in C++ with constants of their own (`one_hot`, `quantile`) find those
      on the host, and raise that the devices differ.
    - A name that was imported from torch by itself before (`from torch import zeros`) is not patched, and "cuda" as
      the default device (`torch.set_default_device`, `with torch.device("cuda")`) is not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.simulated_cuda.device import SimulatedCuda, opened
from tests.support.simulated_cuda.patches import patched


@contextlib.contextmanager
def simulated_cuda(devices: int = 1, seed: int = 0, delay: float = 2e-4) -> Iterator[SimulatedCuda]:
    """Simulate CUDA devices, in all threads of this process, until the context ends.

    `delay` is the longest time in seconds that each piece of work waits before it is done; how long each one does,
    the seed fixes for each stream. At the end all that is queued is done, and torch has its own functions back, also
    after an exception. RuntimeError at the call where a simulation is open, and at the end where a stream is stuck.
    """
    with opened(devices, seed, delay) as world, patched(world):
        yield world
