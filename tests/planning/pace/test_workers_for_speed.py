"""A wished speed, or a time to be done by, sets the number of workers."""

import math
import random
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import manyhands as mh
from manyhands.driver.live.command_socket import Scale, ask
from manyhands.driver.supervise import speed_control as tempo_module
from manyhands.driver.supervise.speed_control import SpeedControl
from manyhands.driver.workforce import records_in
from manyhands.launch.engines.launcher import Launcher
from manyhands.monitor.run_status import status
from manyhands.monitor.terminal import describe
from manyhands.planning.pace.deadline import Aim, read_aim, read_finish_by, shown, span
from manyhands.planning.pace.workers_for_speed import MEMORY_S, NEARLY, MeasuredSpeed, workers_for
from manyhands.values import events
from manyhands.values.errors import RequestError
from manyhands.values.run_folder import RunDir
from tests.support.situations import IN, STARTING, now, view
from tests.support.tasks import classify, make

# ---- the choice

EVERY_S = 5.0
World = Callable[[int], float]


def live(
    world: World, wanted: float, least: int, most: int, *, rounds: int, noise: float = 0.0
) -> list[int]:
    """How many workers there were at each measurement, if every choice is done at once."""
    dice, measured, count = random.Random(3), list[MeasuredSpeed](), least
    for k in range(rounds):
        speed = world(count) * (1 + dice.uniform(-noise, noise))
        measured.append(MeasuredSpeed(count, speed, k * EVERY_S))
        choice = workers_for(wanted, measured, k * EVERY_S, least, most)
        assert least <= choice.value <= most and choice.because
        count = choice.value
    return [m.workers for m in measured]


def changes(counts: list[int]) -> int:
    return sum(a != b for a, b in pairwise(counts))


@st.composite
def worlds(draw: st.DrawFn, *, worth: float) -> tuple[World, int, int]:
    """Each worker adds no more than the one before it, but at least `worth` of the first."""
    most = draw(st.integers(1, 8))
    gains = sorted(draw(st.lists(st.floats(worth, 1.0), min_size=most, max_size=most)))[::-1]
    speeds = list(accumulate(1000 * gain / gains[0] for gain in gains))
    return lambda n: speeds[n - 1], draw(st.integers(1, most)), most


@given(worlds(worth=0.4), st.floats(0.3, 10.0), st.floats(0, 0.01))
def test_the_fewest_workers_that_are_fast_enough_are_found_and_kept(
    drawn: tuple[World, int, int], times: float, noise: float
) -> None:
    world, least, most = drawn
    wanted = 1000 * times
    counts = live(world, wanted, least, most, rounds=60, noise=noise)
    settled = counts[2 * (most - least) + 2 :]
    assert len(set(settled)) == 1, "it stays"
    assert changes(counts) <= most - least
    found = settled[0]
    assert found == most or world(found) >= NEARLY * wanted * (1 - noise)
    assert found == least or world(found - 1) < wanted, "one fewer would not have done"


@given(worlds(worth=0.0001), st.floats(0.1, 20.0), st.floats(0, 0.05))
def test_it_comes_to_rest_where_more_workers_hardly_help(
    drawn: tuple[World, int, int], times: float, noise: float
) -> None:
    world, least, most = drawn
    rounds = int(MEMORY_S / EVERY_S)
    counts = live(world, 1000 * times, least, most, rounds=rounds, noise=noise)
    assert changes(counts) <= 2 * (most - least) + 2
    assert changes(counts[rounds // 2 :]) == 0


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.001, 1e9)), max_size=30),
    st.floats(0, 1e9) | st.just(math.inf),
    st.integers(1, 20),
    st.integers(0, 20),
)
def test_whatever_was_measured_the_bounds_are_kept(
    found: list[tuple[int, float]], wanted: float, least: int, more: int
) -> None:
    measured = [MeasuredSpeed(n, speed, float(k)) for k, (n, speed) in enumerate(found)]
    choice = workers_for(wanted, measured, 100.0, least, least + more)
    assert least <= choice.value <= least + more


def chosen(wanted: float, *speeds: tuple[int, float], most: int = 8, later_s: float = 0.0) -> str:
    measured = [MeasuredSpeed(n, speed, k * EVERY_S) for k, (n, speed) in enumerate(speeds)]
    at = measured[-1].at + later_s if measured else 0.0
    choice = workers_for(wanted, measured, at, 1, most, by=" by me")
    return f"{choice.value} {choice.because}"


@pytest.mark.parametrize(
    ("wanted", "speeds", "said"),
    [
        (5000, [], "1 the fewest, to begin with"),
        (5000, [(1, 1500)], "2 1,500 samples/s, 5,000 wanted by me"),
        (5000, [(3, 4000)], "4 4,000 samples/s, 5,000 wanted by me"),
        (5000, [(4, 3000)], "7 3,000 samples/s, 5,000 wanted by me"),
        (5000, [(1, 4800)], "1 4,800 samples/s, 5,000 wanted by me"),  # once is not always
        (5000, [(1, 4800), (1, 4700)], "2 4,750 samples/s, 5,000 wanted by me"),
        (5000, [(1, 4950), (1, 4950)], "1 4,950"),  # near enough
        (5000, [(4, 9000), (4, 9000)], "3 3 workers will do: 9,000 samples/s, 5,000 wanted by me"),
        (5000, [(4, 7000), (4, 7000)], "4 7,000"),
        (5000, [(3, 5600), (4, 7000), (4, 7000)], "3 3 workers will do"),  # it is known
        (5000, [(3, 4000), (4, 9000), (4, 9000)], "4 9,000"),  # 3 were too slow
        (5000, [(2, 3000), (4, 3100), (4, 3100)], "2 4 workers were hardly faster: 3,100"),
        (5000, [(2, 3000), (4, 3100), (4, 3100), (2, 3000)], "3 3,000"),
        (5000, [(2, 3000), (3, 2900), (3, 2900), (2, 3000), (2, 3000)], "2 3,000"),
        (math.inf, [(2, 3000)], "4 3,000 samples/s, more wanted"),
        (0, [(4, 3000), (4, 3000)], "1 1 worker will do"),
    ],
)
def test_what_is_chosen(wanted: float, speeds: list[tuple[int, float]], said: str) -> None:
    assert chosen(wanted, *speeds).startswith(said)


def test_what_was_in_vain_is_tried_again_after_a_while() -> None:
    history = [(2, 3000), (3, 2900), (3, 2900), (2, 3000), (2, 3000)]
    assert chosen(5000, *history, later_s=60).startswith("2 ")
    assert chosen(5000, *history, later_s=2 * MEMORY_S).startswith("4 ")


# ---- times as people write them

NOON = datetime(2026, 11, 19, 12, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", NOON + 7200),
        ("1h30m", NOON + 5400),
        ("1h 30min", NOON + 5400),
        ("90s", NOON + 90),
        ("1.5d", NOON + 36 * 3600),
        ("18:30", datetime(2026, 11, 19, 18, 30).timestamp()),
        ("8:05", datetime(2026, 11, 20, 8, 5).timestamp()),
        ("12:00", datetime(2026, 11, 20, 12, 0).timestamp()),
        (" 18:30:15 ", datetime(2026, 11, 19, 18, 30, 15).timestamp()),
        ("2026-11-20T08:00", datetime(2026, 11, 20, 8, 0).timestamp()),
        ("2026-11-20 08:00", datetime(2026, 11, 20, 8, 0).timestamp()),
        ("2026-11-20T08:00+00:00", 1795161600.0),
        (timedelta(hours=2), NOON + 7200),
        (datetime(2026, 11, 20, 8, 0), datetime(2026, 11, 20, 8, 0).timestamp()),
    ],
)
def test_times(text: Any, expected: float) -> None:
    assert read_finish_by(text, NOON) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2026-11-18T08:00", "--finish-by 2026-11-18T08:00 is in the past; it is 12:00 here now"),
        (timedelta(hours=-1), "is in the past"),
        ("0s", "that is now"),
        ("soon", "not a time. Write how long"),
        ("", "not a time"),
        ("5", "not a time"),
        ("-2h", "not a time"),
        ("2h later", "not a time"),
        ("25:00", "not a time"),
        ("12:60", "not a time"),
        ("2026-11-20", "not a time"),
        ("2026-13-20T08:00", "not a time"),
        ("1e400h", "not a time"),
        ("9" * 400 + "h", "not a time"),
    ],
)
def test_times_that_are_none(text: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        read_finish_by(text, NOON)


@given(st.text(max_size=12) | st.from_regex(r"[0-9:hmsdT.+ -]{0,12}", fullmatch=True))
def test_any_text_is_a_time_to_come_or_a_wrong_request(text: str) -> None:
    try:
        assert NOON < read_finish_by(text, NOON) < math.inf
    except RequestError as error:
        assert "--finish-by" in str(error)


@pytest.mark.parametrize("speed", [0, -1.0, math.inf, math.nan])
def test_speeds_that_are_none(speed: float) -> None:
    with pytest.raises(RequestError, match="must be above 0"):
        read_aim(speed, None, NOON)


def test_words_about_time() -> None:
    assert shown(NOON, NOON) == "12:00"
    assert shown(NOON + 86400, NOON) == "2026-11-20 12:00"
    assert [span(s) for s in (5, 60, 2400, 7100, 7200, 200000)] == [
        "1 minute",
        "1 minute",
        "40 minutes",
        "118 minutes",
        "2 hours",
        "2 days",
    ]
    late = Aim(finish_by=NOON + 3600)
    assert late.speed(3420_000, NOON) == 1000, "5 % of the time are kept"
    assert late.speed(10, NOON + 3600) == math.inf
    assert late.speed(0, NOON + 3600) == 0
    assert late.forecast(95 * 6000, 100, NOON) == "will finish about 13:40, 40 minutes late"
    assert late.forecast(95 * 3000, 100, NOON) == "will finish about 12:50, 10 minutes early"
    assert late.forecast(95 * 3600, 100, NOON) == "will finish about 13:00, just in time"
    assert late.forecast(95 * 3630, 100, NOON) == "will finish about 13:00, 30 seconds late"
    assert Aim(samples_per_s=5000).forecast(95 * 3600, 100, NOON) == "will finish about 13:00"


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 40))
def test_records_are_counted_as_they_are_cut(records: int, batch: int, steps: int) -> None:
    from manyhands.accounting.deal_micro_batches import cut

    sizes = [sum(cut(s, records=records, batch=batch, micro_batch=1).sizes) for s in range(steps)]
    assert records_in(steps, records, batch) == sum(sizes)


# ---- measuring and choosing, on a clock of our own


class Stage:
    """A run that is so fast with so many workers, seen through a `SpeedControl`."""

    def __init__(self, aim: Aim, world: World, monkeypatch: pytest.MonkeyPatch, **facts: Any):
        self.at, self.world, self.told = 0.0, world, list[events.AnyEvent]()
        monkeypatch.setattr(tempo_module, "time", self)
        self.now = now(IN, wanted=1, of=view(0))
        self.wants: list[int] = []
        self.steps = facts.pop("steps", 100_000)
        self.tempo = SpeedControl(
            aim,
            self.now,
            self.told.append,
            left=lambda step: 100 * (self.steps - step),
            most=facts.pop("most", 8),
            want=self.wants.append,
        )
        self.done = 0.0

    def monotonic(self) -> float:
        return self.at

    def time(self) -> float:
        return NOON + self.at

    def go(self, seconds: float, room: int = 8) -> int:
        """Workers come at once when they are wanted."""
        for _ in range(int(seconds * 4)):
            self.at += 0.25
            self.tempo.observe()
            self.now.wanted = self.tempo.choose(room)
            if self.now.wanted != len(self.now.members()):
                self.join(self.now.wanted)
            self.done += 0.25 * self.world(len(self.now.members())) / 100
            self.now.step = min(self.steps, int(self.done))
        return self.now.wanted

    def join(self, count: int) -> None:
        generation = self.now.view.generation + 1 if self.now.view else 1
        self.now.workers = {n: IN(n) for n in range(count)}
        self.now.view = view(*range(count), generation=generation)

    def lines(self) -> list[str]:
        return [describe(e) or "" for e in self.told]


def test_workers_for_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Aim(samples_per_s=5000), lambda n: 1800.0 * n, monkeypatch)
    assert stage.tempo.outlook() == {"wish": "5,000 samples/s", "forecast": "not measured yet"}
    assert stage.go(2) == 1, "nothing is decided before it is measured"
    assert stage.go(60) == 3
    first, second = stage.lines()
    assert "1 → 2 workers: 1,8" in first and "2 → 3 workers: 3,6" in second
    assert first.endswith("samples/s, 5,000 wanted by --samples-per-second")
    assert stage.wants == [1, 2, 3]
    assert "will finish about 12:3" in stage.tempo.outlook()["forecast"]


def test_a_wish_that_cannot_be_met_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that could bring more room is told what would be needed."""
    aim = Aim(finish_by=NOON + 1800)
    stage = Stage(aim, lambda n: 1000.0 * n, monkeypatch)
    assert stage.go(300, room=2) == 2
    grown, warned = stage.lines()
    assert "1 → 2 workers: " in grown and grown.endswith("wanted to finish by 12:30")
    assert "2,000 samples/s with 2 workers, and there is room for no more, where 5," in warned
    assert ": will finish about 13:2" in warned and " minutes late." in warned
    assert stage.wants == [1, 2, 4]
    assert stage.go(1, room=3) == 3 and stage.go(300, room=8) > 5
    assert stage.lines()[2].endswith("2 → 3 workers: there is room for 3")
    assert sum(isinstance(e, events.Warned) for e in stage.told) == 1
    assert stage.go(30, room=1) == 1
    stage = Stage(aim, lambda n: 1000.0 * n, monkeypatch)
    stage.go(60, room=3)
    assert "to finish by 12:30; there is room for 3" in stage.lines()[1]


def test_a_deadline_is_a_speed_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    aim = Aim(finish_by=NOON + 7200)
    stage = Stage(aim, lambda n: 1000.0 * n, monkeypatch)
    counts = [stage.go(60) for _ in range(116)]
    assert changes(counts) <= 4 and stage.now.step == stage.steps, "all is done by then"
    assert all(isinstance(e, events.Scaled) for e in stage.told)


def test_more_workers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    two_cores: World = lambda n: 1000.0 * min(n, 2) - 10 * n  # noqa: E731
    stage = Stage(Aim(samples_per_s=5000), two_cores, monkeypatch)
    assert stage.go(400) == 2
    changed = [(e.before, e.workers) for e in stage.told if isinstance(e, events.Scaled)]
    assert changed == [(1, 2), (2, 4), (4, 2), (2, 3), (3, 2)]
    assert "3 workers were hardly faster: 1,9" in stage.lines()[4]
    assert "with 2 workers, and more were hardly faster, where 5,000 are wanted" in stage.lines()[5]


def test_nobody_is_sent_away_before_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Aim(samples_per_s=1500), lambda n: 1000.0 * n, monkeypatch)
    stage.join = lambda count: None  # type: ignore[method-assign]
    assert stage.go(12) == 2
    stage.world = lambda n: 3000.0
    stage.now.workers[1] = STARTING(1)
    assert stage.go(60) == 2
    stage.now.workers[1].phase = "gone"
    assert stage.go(60) == 1, "one is fast enough now"


def test_evaluations_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Aim(samples_per_s=900), lambda n: 1000.0 * n, monkeypatch)
    for scored in range(40):
        stage.go(3)
        stage.at += 4.0  # the evaluation
        stage.now.scored = scored
    assert stage.tempo.measured and stage.now.wanted == 1
    assert all(950 < m.samples_per_s < 1050 for m in stage.tempo.measured)


# ---- real workers

SETTINGS = ["train.batch=32", "train.micro_batch=16"]
SLEEP_S = 0.008
"""For each record: one worker trains on 125 a second at the most, two on 250."""


def slowly(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(SLEEP_S * len(batch["y"]))
    return classify(model, batch)


def slow_task() -> mh.Task:
    calm = make("cnn")
    return mh.Task(model=calm.model, loss=slowly, optimizer=calm.optimizer, data=calm.data)


@pytest.fixture(scope="module")
def reference(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The fingerprint after so many steps with one worker who does not sleep."""

    def of(steps: int) -> str:
        to = tmp_path_factory.mktemp("reference") / "run"
        settings = [*SETTINGS, f"train.steps={steps}"]
        return mh.train(
            make("cnn"), to=to, workers=1, settings=settings, quiet=True, launcher=launcher
        ).fingerprint

    return of


@pytest.mark.parametrize(
    ("wish", "workers", "warned"),
    [
        pytest.param({"samples_per_second": 30}, 1, False, marks=pytest.mark.slow),
        pytest.param({"samples_per_second": 150}, 2, False, marks=pytest.mark.slow),
        pytest.param({"finish_by": "4s"}, 2, True, marks=pytest.mark.slow),
    ],
    ids=["one is enough", "two are needed", "two are not enough"],
)
def test_a_real_run_gets_the_workers_it_needs(
    wish: dict[str, Any],
    workers: int,
    warned: bool,
    launcher: Launcher,
    reference: Callable[[int], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempo_module, "MEASURE_S", 2.5)
    monkeypatch.setattr(tempo_module, "QUICK_S", 1.5)
    monkeypatch.setattr(tempo_module, "SOON_S", 1.0)
    to, steps = tmp_path / "run", 30 * workers**2
    seen: list[dict[str, Any]] = []

    def look(event: events.Stepped) -> None:
        if event.step % 20 == 0:
            seen.append(status(RunDir(to)))

    report = mh.train(
        slow_task(),
        to=to,
        workers="1:2",
        settings=[*SETTINGS, f"train.steps={steps}"],
        quiet=True,
        launcher=launcher,
        on_step=look,
        **wish,
    )
    told = list(events.read_events(to / "events.jsonl"))
    scaled = [e for e in told if isinstance(e, events.Scaled)]
    assert report.workers == workers, [(e.before, e.workers, e.because) for e in scaled]
    assert report.fingerprint == reference(steps)
    assert [(e.before, e.workers) for e in scaled] == [(1, 2)] * (workers == 2)
    said = [e.text for e in told if isinstance(e, events.Warned) and " are wanted" in e.text]
    assert len(said) == 1 if warned else len(said) <= 1, "a busy machine may disappoint us"
    assert "will finish about" in seen[-1]["forecast"]
    assert seen[-1]["wish"].startswith(
        "to finish by" if warned else "150 " if workers == 2 else "30 "
    )
    assert "wish" not in status(RunDir(to)), "it is over"


@pytest.mark.slow
def test_a_person_wins_over_the_choice_and_a_resume_may_wish_anew(
    launcher: Launcher, reference: Callable[[int], str], tmp_path: Path
) -> None:
    to = tmp_path / "run"
    asked: list[str] = []

    def first(event: events.Stepped) -> None:
        if event.step == 1 and not asked:
            import threading

            asked.append("")
            threading.Thread(
                target=lambda: asked.append(ask(RunDir(to).control, Scale(2))), daemon=True
            ).start()

    half = ["train.steps=60", "checkpoint.every_steps=30"]
    arguments: dict[str, Any] = {"quiet": True, "launcher": launcher}
    one = mh.train(
        slow_task(),
        to=to,
        samples_per_second=20,
        settings=[*SETTINGS, *half],
        on_step=first,
        **arguments,
    )
    assert one.workers == 2 and asked[1].startswith("2 workers since")
    more = ["train.steps=70"]
    two = mh.resume(to, slow_task(), finish_by="1h", settings=more, **arguments)
    assert two.workers == 1 and two.fingerprint == reference(70)


def test_wishes_that_leave_no_choice(launcher: Launcher, tmp_path: Path) -> None:
    def wish(**arguments: Any) -> None:
        mh.train(make("cnn"), to=tmp_path / "x", launcher=launcher, quiet=True, **arguments)

    with pytest.raises(RequestError, match="--workers 4 leaves nothing to choose"):
        wish(workers=4, samples_per_second=10)
    with pytest.raises(RequestError, match="give one of them"):
        wish(finish_by="2h", samples_per_second=10)
    with pytest.raises(RequestError, match="not a time"):
        wish(finish_by="tea time")
    assert not (tmp_path / "x").exists()
