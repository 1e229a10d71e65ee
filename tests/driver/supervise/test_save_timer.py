"""When a run saves by the clock."""

import pytest

from manyhands.driver.supervise.save_timer import SaveTimer, interval_s


@pytest.mark.parametrize(
    ("blocked_s", "writing_s", "wait_s"),
    [(0.0, 0.0, 300), (0.1, 2.0, 300), (6.0, 2.0, 600), (0.1, 60.0, 1200)],
)
def test_saving_stays_cheap(blocked_s: float, writing_s: float, wait_s: float) -> None:
    assert interval_s(300, blocked_s, writing_s) == pytest.approx(wait_s)


def test_a_save_is_asked_for_when_it_is_time_and_not_before() -> None:
    now, every = [1000.0], [300.0]
    timer = SaveTimer(lambda: every[0], lambda: now[0])

    def due(after: float) -> bool:
        now[0] += after
        return timer.due()

    assert not due(299) and due(1)
    assert not due(299), "it was asked for, and nobody knows yet whether it will be saved"
    assert due(1), "nobody has: it is asked for again"
    now[0] += 250
    timer.saved(0.01, 0.5)  # another reason to save: a step that is a multiple
    assert not due(250) and due(50)
    timer.saved(9.0, 0.5)
    assert not due(899) and due(1), "it stood still for 9 s, which is 1 % of 900"
    every[0] = 0.0
    assert not due(1e9), "never"


@pytest.mark.parametrize(
    ("every_steps", "saved", "step", "owed"),
    [
        (20, -1, 23, True),
        (20, 20, 23, False),
        (20, 20, 43, True),
        (20, 31, 39, False),
        (20, -1, 19, False),
        (20, -1, 20, False),  # which is saved as the view begins
        (None, -1, 99, False),
    ],
)
def test_what_was_lost_with_somebody_is_asked_for_once(
    every_steps: int | None, saved: int, step: int, owed: bool
) -> None:
    timer = SaveTimer(lambda: 0.0, lambda: 1000.0)
    timer.recovered(every_steps, saved, step)
    assert timer.due() == owed and not timer.due()


def test_a_save_by_the_clock_that_came_to_nothing_is_asked_for_again() -> None:
    now = [1000.0]
    timer = SaveTimer(lambda: 300.0, lambda: now[0])
    now[0] += 300
    assert timer.due() and not timer.due()
    timer.recovered(None, -1, 12)
    assert timer.due(), "whoever was to write it died"
    timer.saved(0.01, 0.5)
    timer.recovered(None, 13, 14)
    assert not timer.due()
