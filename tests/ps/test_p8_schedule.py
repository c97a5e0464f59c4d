"""P8: when clients pull and integrate, and how hard: plain numbers."""

import pytest

from aiodist.ps import Schedule, elastic_alpha


@pytest.mark.parametrize(
    ("prefetch", "pulls"), [(25, [45, 95, 145]), (0, [70, 120, 170]), (49, [21, 71, 121]), (1, [69, 119, 169])]
)
def test_p8_schedule_with_warmup_and_prefetch(prefetch: int, pulls: list[int]) -> None:
    schedule = Schedule(tau=50, warmup=20, prefetch=prefetch)
    assert [step for step in range(171) if schedule.integrates(step)] == [70, 120, 170]
    assert [step for step in range(171) if schedule.pulls(step)] == pulls


def test_p8_schedule_of_every_step() -> None:
    schedule = Schedule(tau=1)
    assert [step for step in range(4) if schedule.integrates(step)] == [1, 2, 3]
    assert [step for step in range(4) if schedule.pulls(step)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"tau": 0}, ValueError, "tau=0: expected at least 1"),
        ({"tau": 2.0}, TypeError, "tau is float: expected an int"),
        ({"tau": True}, TypeError, "tau is bool"),
        ({"tau": 5, "warmup": -1}, ValueError, "warmup=-1: expected at least 0"),
        ({"tau": 5, "prefetch": -1}, ValueError, "prefetch=-1: expected at least 0"),
        ({"tau": 5, "prefetch": 5}, ValueError, "prefetch=5 with tau=5: expected less than tau"),
    ],
)
def test_p8_senseless_schedules_are_refused(arguments: dict[str, int], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Schedule(**arguments)


def test_p9_alpha_counts_groups() -> None:
    assert elastic_alpha(0.9, 8) == 0.9 / 8
    assert elastic_alpha(0.9, 1) == 0.9
    for beta, groups in ((0.0, 3), (-1.0, 3), (3.1, 3)):
        with pytest.raises(ValueError, match="expected more than 0 and at most 3"):
            elastic_alpha(beta, groups)
    with pytest.raises(ValueError, match="groups=0"):
        elastic_alpha(0.9, 0)
