"""Run mpi4py's own tests over `aiodist.compat.mpi`: `aiodist run -n 2 mpi4py_tests.py FOLDER MODULE...`.

FOLDER is `test` of mpi4py's source. Rank 0 prints a line for each test that did not pass, and last how many did.
"""

from __future__ import annotations

import importlib
import sys
import types
import unittest
from collections.abc import Iterator

import aiodist.compat.mpi as front

LEFT_OUT = {
    "testAlltoallw testAlltoallw2 testAlltoallwBottom testBcastTypeIndexed testCreateDatatype": "types made of others",
    "testMixed testRecvObjArg testCommLock": "a buffer received as an object, memory given to recv(), mpi4py's locks",
    "testProbe testIProbe testMProbe testProbeCancel testCancel": "looking at a message, withdrawing one that was sent",
    "testTestSomeRecv testWaitSomeRecv": "a receive that counts as over before the loop has seen its message",
    "testReduceLocal testReduceLocalBadCount": "reductions without a communicator",
    "testPersistent testProcNullPersistent testConstructor": "persistent requests",
}
"""Tests of names that are not implemented, by the reason."""


def main() -> None:
    """Run the tests with aiodist.compat.mpi in place of mpi4py."""
    folder, *modules = sys.argv[1:]
    package = types.ModuleType("mpi4py")
    package.MPI = front  # type: ignore[attr-defined]
    sys.modules["mpi4py"], sys.modules["mpi4py.MPI"] = package, front
    sys.path.insert(0, folder)
    rank = front.COMM_WORLD.rank
    loader = unittest.defaultTestLoader
    arrays = importlib.import_module("arrayimpl")  # without arrays that pretend to be on a device, and without DLPack
    arrays.ArrayBackends[:] = [kind for kind in arrays.ArrayBackends if kind.__name__ in ("ArrayArray", "ArrayNumPy")]
    front.Alloc_mem, front.Free_mem = bytearray, bool
    suite = unittest.TestSuite(loader.loadTestsFromModule(importlib.import_module(name)) for name in modules)
    result = unittest.TestResult()
    left_out = set(" ".join(LEFT_OUT).split())
    for test in tests_of(suite):
        if {test.id().rpartition(".")[2], test.id().partition(".")[2]} & left_out:
            continue
        if (comm := getattr(test, "COMM", None)) is not None:
            test.COMM = comm.Dup()  # type: ignore[attr-defined]  # what a test that fails leaves behind meets no other
        test.run(result)
    failed = [("error", *e) for e in result.errors] + [("failure", *e) for e in result.failures]
    for kind, test, text in failed:
        print(f"{kind} {test.id()}: {text.strip().splitlines()[-1]}")
    if rank == 0:
        print(f"{result.testsRun - len(result.skipped) - len(failed)} passed")


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yield its tests one by one."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        else:
            yield test


if __name__ == "__main__":
    main()
