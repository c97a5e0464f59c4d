"""P8: what seldom talking costs, shortened; and the command that measures it in full."""

import asyncio
import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import ps_convergence
from benchmarks.ps_convergence import Found, Task, train, verdicts


@pytest.mark.thorough
def test_p8_easgd_bears_talking_seldom_and_downpour_does_not() -> None:
    async def both(method: str, steps: int) -> list[Found]:
        task = Task(workers=8, steps=steps)
        return [await train(task, method, tau) for tau in (1, 64)]

    with ps_convergence.one_thread():
        often, seldom = asyncio.run(both("easgd", 384))
        sums, sums_seldom = asyncio.run(both("downpour", 128))
    assert seldom.value <= 1.05 * often.value
    assert often.nbytes == 64 * seldom.nbytes
    assert seldom.value < 0.5 * seldom.curve[0][1]  # and it learnt something
    assert not sums_seldom.value < 2 * sums.value
    assert all(verdict.reached for verdict in verdicts([often, seldom, sums, sums_seldom]))


def run(impl: str, tau: int, value: float, nbytes: int) -> Found:
    return Found(f"aiodist:{impl}", tau, 8, value, nbytes, ((1, 3.0), (2, value)))


def test_p8_verdicts_say_what_is_not_reached() -> None:
    found = [run("easgd", 2, 1.0, 320), run("easgd", 16, 1.2, 80), run("downpour", 2, 1.0, 320)]
    seen = verdicts([*found, run("downpour", 16, math.nan, 40)])
    assert [(v.value, v.reached) for v in seen] == [(1.2, False), (4.0, False), (math.inf, True)]
    assert not verdicts([*found, run("downpour", 16, 1.9, 40)])[2].reached


@pytest.mark.thorough
def test_p8_bench_command_writes_records_and_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert (
        command.main(["ps-convergence", "--workers", "2", "--steps", "6", "--taus", "1,3", "--seed", "4", *files]) == 0
    )
    records = json.loads((tmp_path / "out.json").read_text())
    assert [(r["impl"], r["tau"]) for r in records] == [
        (f"aiodist:{method}", tau) for method in ("easgd", "downpour") for tau in (1, 3)
    ]
    parameters = 4 * (32 * 64 + 64 + 64 * 10 + 10)
    for record in records:
        assert set(record) == {"op", "impl", "ranks", "tau", "value", "nbytes", "curve"}
        assert (record["op"], record["ranks"]) == ("ps-convergence", 2)
        assert record["nbytes"] == 2 * 2 * 6 // record["tau"] * parameters
        assert record["curve"][-1] == [6, record["value"]]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "EASGD, test loss at tau 3 against 1" in capsys.readouterr().out


def test_p8_a_loss_that_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    ps_convergence.write(tmp_path / "out.json", [run("downpour", 64, math.inf, 1)])
    [record] = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert record["value"] is None
    assert record["curve"] == [[1, 3.0], [2, None]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--taus", "1,5", "--steps", "6"], "--taus 5: expected divisors of --steps 6"),
        (["--taus", "1,x"], "--taus x: expected divisors"),
        (["--taus", "0,1"], "--taus 0: expected divisors"),
        (["--taus", "2"], "--taus 2: expected two of them or more"),
        (["--json", "no/such/folder/out.json"], "--json no/such/folder/out.json: expected a file"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_p8_bench_with_bad_arguments_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert command.main(["ps-convergence", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_p8_bench_plot_needs_matplotlib_before_it_trains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["ps-convergence", "--plot", str(tmp_path / "out.png")]) == 2
    assert "aiodist[plot]" in capsys.readouterr().err
