"""A simulated CUDA device, on which a missing synchronisation shows as wrong data.

    with simulated_cuda(devices=2, seed=0) as device:
        t = torch.ones(1000, device="cuda")
        with device.paused():                       # nothing on any stream ends until this block does
            host = t.to("cpu", non_blocking=True)   # in pinned memory, as torch does it, and not there yet
            assert host.isnan().all()
        torch.cuda.synchronize()
        assert host.eq(1).all()

The simulation proves ordering, not speed, and nothing about drivers, kernels or memory limits.

Behaviour
    `torch.cuda` reports devices, and gives streams and events. Each stream is a thread that runs its jobs in order,
    each at a random moment after its call; streams wait for each other only through events. Tensors on "cuda:0" and
    so on are CPU tensors that report this device. Their operators are queued on the calling thread's current stream of
    the device, and return immediately; autograd, `nn.Module.to`, optimizers and hooks work as always. Operators that
    need the data on the host wait for the stream, as do copies, unless they are `non_blocking` with pinned memory.
    Tensors of different devices do not mix. The next call that asks the device raises an error of a queued job, and so
    does every later call.

How mistakes show
    New memory holds poison (NaN, or a number far off) until the job that fills it has run. So does the target of a
    copy from the moment when the copy is next in its stream: code that reads without waiting for the right event reads
    poison. Freed memory is poisoned when the stream of its allocation, and each stream of `record_stream`, reaches the
    free. A job of another stream then reads poison, and `device.hazards` lists the job. The list also has memory that
    is freed after `device.fail()`, which ends the process in torch. `device.paused(stream)` and `stream.hold()` make
    a race show for certain. `device.synchronisations` and `device.launches` count the waits of the host and the jobs.

Limits
    - Memory is not reused while a test can see it, and does not run out.
    - On a GPU each step of backward runs in a thread of autograd, on the stream of its forward. Here every step runs
      in the calling thread on its current stream, after all jobs of the forward on any stream; hooks see that stream.
    - The numbers come from the CPU's kernels and generator. If several streams draw random numbers, these depend on
      more than the seed. Autocast for "cuda", graphs (but for `device.capturing()`), sparse tensors and
      `storage.resize_` are not simulated; `t.untyped_storage().device` is the CPU.
    - Operators that torch composes in C++ with constants of their own (`one_hot`, `quantile`) have these constants on
      the host, and raise an error of different devices.
    - A name that was imported from torch before (`from torch import zeros`) is not patched, and "cuda" as the default
      device (`torch.set_default_device`, `with torch.device("cuda")`) has no effect.
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
