"""Who is silent, and who only was not listened to."""

import pytest

from manyhands.driver.supervise import liveness
from manyhands.driver.supervise.liveness import GLANCE_S, Liveness
from manyhands.driver.supervise.worker_states import Situation, WorkerState


class Time:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(liveness, "time", time)
    return time


def watched(kept: Liveness) -> tuple[Situation, WorkerState]:
    worker = WorkerState(7)
    kept.start(7)
    return Situation(wanted=1, workers={7: worker}), worker


def test_silence_is_counted_while_somebody_listens(time: Time) -> None:
    kept = Liveness()
    situation, worker = watched(kept)
    for _ in range(50):
        time.now += 0.1
        kept.write_down(situation)
    assert worker.silent_s == pytest.approx(5.0)
    kept.heard(7)
    kept.write_down(situation)
    assert worker.silent_s == 0.0
    assert worker.phase_s == pytest.approx(5.0)


def test_time_in_which_nobody_listened_does_not_count(time: Time) -> None:
    kept = Liveness()
    situation, worker = watched(kept)
    time.now += 0.1
    kept.write_down(situation)
    time.now += 60.0
    kept.write_down(situation)
    assert worker.silent_s == pytest.approx(0.1 + GLANCE_S)
    assert worker.phase_s == worker.stuck_s == worker.silent_s
    time.now += 0.2
    kept.write_down(situation)
    assert worker.silent_s == pytest.approx(0.1 + GLANCE_S + 0.2)


def test_who_came_while_nobody_listened_is_not_from_the_future(time: Time) -> None:
    kept = Liveness()
    time.now += 60.0
    situation, worker = watched(kept)
    kept.write_down(situation)
    assert worker.silent_s == 0.0
