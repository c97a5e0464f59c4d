"""T6: drawn calls end by the front as they end by mpi4py: the same elements, or an error of the same class."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aiodist.errors import BackendUnavailable
from aiodist.testing.seams.mpi import find_mpi
from tests.compat.test_t6_mpi import PROGRAMS, run
from tests.support.nursed import stub

CALLS = ("Bcast", "Gather", "Scatter", "Allgather", "Alltoall", "Reduce", "Allreduce", "Scan", "Reduce_scatter_block")
ALL = ("SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "LXOR", "LAND", "MAXLOC", "NO_OP", "OP_NULL")
TAKES = {
    **dict.fromkeys("bhilqBHILQ", ALL[:8]),
    **dict.fromkeys("fdg", ALL[:4]),
    **dict.fromkeys("FD", ALL[:2]),
    "?": ALL[6:8],
}
WRONG = ("", "", "", "", "root", "op", "null", "strided", "longer")


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw one call, correct, or with one mistake on all ranks."""
    call = draw(st.sampled_from((*CALLS, "Sendrecv")))
    dtype = draw(st.sampled_from(sorted(TAKES)))
    wrong = draw(st.sampled_from(WRONG))
    reduces = "educe" in call or call == "Scan"
    rooted = call in ("Bcast", "Gather", "Scatter", "Reduce")
    fits = {"root": rooted, "op": reduces, "longer": call in ("Allreduce", "Scan"), "strided": call != "Scatter"}
    wrong = wrong if fits.get(wrong, call in ("Bcast", "Allgather", "Alltoall", "Sendrecv")) else ""
    others = [op for op in ALL[2:] if op not in TAKES[dtype] and (dtype != "?" or op in ALL[8:])]
    return {
        "call": call if draw(st.booleans()) else f"I{call.lower()}",
        "dtype": dtype,
        "n": draw(st.integers(0 if not wrong else 2, 6)),
        "order": draw(st.sampled_from(("C", "fortran"))),
        "in_place": draw(st.booleans()) and not wrong,
        "root": draw(st.sampled_from((-1, 2, 99) if wrong == "root" else (0, 1))),
        "op": draw(st.sampled_from(others if wrong == "op" else TAKES[dtype])),
        "wrong": wrong,
    }


@pytest.fixture(scope="module")
def calls() -> list[dict[str, Any]]:
    """The calls of one run: as many as hypothesis draws, the same in each run."""
    drawn: list[dict[str, Any]] = []

    @settings(max_examples=500, derandomize=True, deadline=None, phases=[Phase.generate], database=None)
    @given(specs())
    def collect(spec: dict[str, Any]) -> None:
        drawn.append(spec)

    collect()
    return drawn


@pytest.mark.timeout(170)
def test_t6_drawn_calls_end_as_with_mpi4py(nursery: str, tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    try:
        find_mpi("openmpi", os.environ.get("PATH", os.defpath))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    listed = tmp_path / "calls"
    listed.write_text(json.dumps(calls))
    for module, mpi in (("mpi4py.MPI", "openmpi"), ("aiodist.compat.mpi", "none")):
        arguments = (module, str(listed), str(tmp_path / mpi))
        done = run(2, *stub(nursery, PROGRAMS / "differential.py", *arguments), mpi=mpi)
        assert done.returncode == 0, done
    different = []
    for rank in range(2):
        theirs, ours = (json.loads((tmp_path / f"{mpi}-{rank}").read_text()) for mpi in ("openmpi", "none"))
        ends = zip(calls, theirs, ours, strict=True)
        different += [(rank, call, expected, got) for call, expected, got in ends if not alike(expected, got)]
    assert different == []
    ended = [kind for kind, _ in theirs]
    assert min(ended.count("result"), ended.count("error")) > 50


def alike(theirs: list[Any], ours: list[Any]) -> bool:
    """Return True for the same elements, or errors of one class; of an error that is not MPI's any kind will do."""
    if theirs[0] != ours[0] or theirs[0] == "result":
        return theirs == ours
    return theirs[1] == ours[1] or not theirs[1].startswith("ERR_")
