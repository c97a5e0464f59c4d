"""`aiodist run --trace`: the timeline of ranks that are processes, also of one that is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.trace_events import overlap, read, spans

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Jobs, Run

pytestmark = pytest.mark.drawn(1)
NONE = pytest.mark.parametrize("run", ["none"], indirect=True)


def test_w7_reductions_go_on_while_backward_does(run: Run) -> None:
    folder = run.folder / "out"
    ended = run("traced.py", "trained", options=("--trace", str(folder)))
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert f"trace: {folder}/trace.json: 2 ranks, clocks to " in ended.errors
    events = read(folder)
    for rank in range(2):
        backwards = spans(events, "backward", rank)
        reductions = spans(events, rank=rank, track="reductions")
        assert len(backwards) == 6
        assert len(reductions) >= 6 * 3
        # The order of the gradients is learnt in the first step, which sends all at its end.
        for backward in backwards[2:]:
            assert sum(overlap(backward, one) > 0 for one in reductions) >= 2
        for forward, backward, optimizer in zip(
            *(spans(events, name, rank) for name in ("forward", "backward", "optimizer")), strict=True
        ):
            assert forward["ts"] + forward["dur"] <= backward["ts"] <= optimizer["ts"]
        assert len(spans(events, "step", rank)) == 6
        assert len(spans(events, "read", rank)) == 7
    steps = [e for e in spans(events, "allreduce") if e["args"]["bytes"] > 1e5]
    assert steps
    assert all({"last_rank", "waited_us", "implementation"} <= e["args"].keys() for e in steps)


@NONE
def test_w7_clocks_of_one_host_are_found_alike(run: Run) -> None:
    folder = run.folder / "out"
    run("traced.py", "raised", n=3, options=("--trace", str(folder)))
    said = [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]
    (measured,) = [one["offsets"] for one in said if "offsets" in one]
    assert measured.keys() == {"0", "1", "2"}
    for offset, error in measured.values():  # it is one and the same
        assert abs(offset) <= error < 0.05


@NONE
@pytest.mark.parametrize(("program", "codes"), [("killed", [1, -9]), ("raised", [1, 1])])
def test_w7_what_a_rank_did_before_its_end_is_there(run: Run, program: str, codes: list[int]) -> None:
    folder = run.folder / "out"
    ended = run("traced.py", program, options=("--trace", str(folder)))
    assert ended.codes() == codes
    events = read(folder)
    counts = [len(spans(events, "allreduce", rank)) for rank in range(2)]
    assert counts == ([4, 3] if program == "killed" else [2, 1])  # that of rank 0 which failed too
    if program == "raised":
        assert len(spans(events, "last")) == 2


@NONE
def test_w7_a_folder_that_cannot_be_written_is_an_error_before_ranks_start(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run("traced.py", "trained", options=("--trace", str(tmp_path / "file" / "out")))
    assert (ended.code, ended.exits, ended.text) == (2, {}, "")
    problem = f"a trace cannot be written to {tmp_path}/file/out: Not a directory"
    assert ended.errors.strip() == f"aiodist: {problem} (see: aiodist explain configerror)"


@pytest.mark.thorough
def test_w7_without_a_launcher_the_first_rank_merges(jobs: Jobs) -> None:
    folder = jobs.folder / "out"
    ended = jobs.alone("traced.py", "trained", AIODIST_TRACE=str(folder))
    assert (ended.code, ended.errors) == (0, ""), ended
    assert len(spans(read(folder), "backward", 0)) == 6
    assert jobs.alone("-m", "aiodist.cli", "trace", str(folder)).code == 0  # once more
