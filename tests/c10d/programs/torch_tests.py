# A program as others write it, without types.
# mypy: ignore-errors
"""One rank of those that run torch's own tests of process groups: `torch_tests.py RESULTS NAME...`.

The tests come with torch (`torch/testing/_internal/distributed/distributed_test.py`). They are those for
gloo (BACKEND=gloo selects them), over "aiodist". Without names all are run, one after the other. RESULTS
is a folder: each rank writes a line of JSON for each test into its file there.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import traceback
import types
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

import aiodist.c10d  # noqa: F401  - registers the backend
from aiodist import AiodistError

SECONDS = 30
"""How long a test may take."""
LACKING = ("CUDA", "Nccl", "NCCL", "torchvision", "exact world size")
"""Tests are skipped for want of these, but not because gloo fails them: aiodist may pass."""


def loaded():
    """Return the module of the tests; what it needs and is not installed it needs for tests of other kinds."""
    missing = types.ModuleType("expecttest")
    missing.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", missing)
    os.environ.update(BACKEND="gloo", INIT_METHOD=f"file://{sys.argv[1]}/init")
    from torch.testing._internal.distributed import distributed_test as tests

    tests.BACKEND = Name("gloo")
    return tests


class Name(str):
    """Reads as gloo's where a test asks what it may expect, and is ours where torch makes a group."""

    __slots__ = ()

    def upper(self):
        return "AIODIST"

    def lower(self):
        return "aiodist"


def meet(store, key, size):
    """Return when all ranks have come here; process groups play no part.

    After a test that failed, a rank may still be in it for as long as a test may take.
    """
    if store.add(key, 1) == size:
        store.set(f"{key} all", "")
    store.wait([f"{key} all"], timedelta(seconds=2 * SECONDS))


def run(tests, name, rank, size, folder, store):
    """Return how the test ended here: "passed", "skipped" or "failed", and why."""

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        world_size = size

    why = getattr(getattr(Case, name), "__unittest_skip_why__", "")
    if any(lacking in why for lacking in LACKING):
        return "skipped", why
    sys.modules["torch.testing._internal.common_utils"].set_rng_seed(1234)
    case = Case(name)
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # torch's tests of debug levels leave theirs
    dist.set_debug_level_from_env()
    case.rank, case.file_name = rank, str(folder / f"store-{name}")
    meet(store, f"{name} begins", size)
    dist.init_process_group(
        "aiodist",
        init_method=f"file://{case.file_name}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        getattr(case, name)()
        meet(store, f"{name} ends", size)
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        return "skipped", next(skip.message for skip in tests.TEST_SKIPS.values() if skip.exit_code == end.code)
    except BaseException as error:  # noqa: BLE001  - a test may end with any
        store.set(f"{name} ends all", "")  # the others need not wait for this rank
        return "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        with contextlib.suppress(RuntimeError, AiodistError):  # a test that failed may leave ranks at different places
            dist.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()  # the first raised before torch forgot the group
    return "passed", ""


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    warnings.simplefilter("ignore")
    faulthandler.enable()
    tests = loaded()
    os.environ["TEMP_DIR"] = str(folder)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(exist_ok=True)
    tests.Barrier.init()
    names = names or sorted(n for n in dir(tests.DistributedTest._DistTestBase) if n.startswith("test_"))
    with (folder / f"rank{rank}.jsonl").open("w") as out:
        for name in names:
            began = perf_counter()
            watch = threading.Timer(3 * SECONDS, lambda: (faulthandler.dump_traceback(), os._exit(3)))
            watch.daemon = True
            watch.start()
            end, why = run(tests, name, rank, size, folder, store)
            watch.cancel()
            print(json.dumps([name, end, why, round(perf_counter() - began, 2)]), file=out, flush=True)


if __name__ == "__main__":
    main()
