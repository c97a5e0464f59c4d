"""The MPIs of the machine, for tests that start jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiodist.errors import BackendUnavailable
from aiodist.testing.seams.mpi import Flavour, find_mpi, probe

__all__ = ["find"]


def find(mpi: str) -> str:
    """Return what `--mpi` is given for this MPI; skip the test, with the reason, where there is none.

    AIODIST_TEST_MPICH names the prefix of an MPICH, the folder with bin/mpirun.
    """
    if mpi == "none":
        return mpi
    prefix = os.environ.get("AIODIST_TEST_MPICH")
    if mpi == "mpich" and prefix:
        mpirun = str(Path(prefix) / "bin" / "mpirun")
        found = probe(mpirun)
        assert found is not None, f"AIODIST_TEST_MPICH={prefix}: {mpirun} does not answer"
        assert found.flavour is Flavour.MPICH
        return mpirun
    try:
        find_mpi(mpi, os.environ.get("PATH", os.defpath))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return mpi
