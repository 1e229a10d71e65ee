"""The ledger: whatever happened, an honest one passes, and one that was touched does not."""

import json as jsonlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from manyhands.accounting import ledger, ledger_lines
from manyhands.accounting.deal_micro_batches import cut, deal
from manyhands.accounting.ledger import Ledger
from manyhands.accounting.ledger_lines import AnyEntry, Committed, Opened, Rewound, SettingsChanged
from manyhands.accounting.proof import Share, check
from manyhands.monitor.ledger_page import print_proof
from manyhands.values.errors import RunDirError
from manyhands.values.run_folder import RunDir

replace = msgspec.structs.replace


def commit(opened: Opened, first: int, stop: int, **other: Any) -> Committed:
    runs = ledger_lines.runs_of(first, stop, **opened.shape)
    view: dict[str, Any] = {"generation": 1, "workers": [0], "speeds": [1.0]}
    return Committed(first, stop, runs, **{**view, **other}, rates=[0.1], loss=0.5)


@st.composite
def shapes(draw: st.DrawFn) -> Opened:
    records, batch = draw(st.integers(1, 90)), draw(st.integers(1, 40))
    return Opened(records, batch, draw(st.integers(1, batch)), seed=draw(st.integers(0, 9)))


@st.composite
def histories(draw: st.DrawFn) -> list[AnyEntry]:
    """What a supervisor would have written: ranges, new views, changes, deaths and resumes."""
    opened = draw(shapes())
    entries: list[AnyEntry] = [opened]
    done, view = 0, {"generation": 0}
    for what in draw(st.lists(st.sampled_from("cccCCrs"), min_size=1, max_size=9)):
        if what == "C" or view["generation"] == 0:
            workers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
            speeds = [draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in workers]
            generation = view["generation"] + draw(st.integers(1, 2))
            view: dict[str, Any] = dict(generation=generation, workers=workers, speeds=speeds)
        if what in "cC":
            stop = done + draw(st.integers(1, 12))
            entries.append(commit(opened, done, stop, **view))
            done = stop
        elif what == "r":
            done = draw(st.integers(0, done))
            entries.append(Rewound(done))
            view = {"generation": 0}
        else:
            entries.append(
                SettingsChanged(done + draw(st.integers(0, 3)), {"lr": 0.1, "clip_norm": None})
            )
    return entries


def problems(*entries: AnyEntry) -> str:
    return "\n".join(check(entries).problems)


# ---- honest ledgers


@given(shape=shapes(), first=st.integers(0, 40), count=st.integers(0, 40))
def test_runs_are_the_positions_of_the_steps_merged(shape: Opened, first: int, count: int) -> None:
    cuts = [cut(step, **shape.shape) for step in range(first, first + count)]
    positions = [(c.epoch, p) for c in cuts for i in range(len(c.sizes)) for p in c.positions(i)]
    runs = ledger_lines.runs_of(first, first + count, **shape.shape)
    assert [(epoch, p) for epoch, start, stop in runs for p in range(start, stop)] == positions
    assert len({epoch for epoch, _, _ in runs}) == len(runs), "not merged"


@settings(max_examples=100)
@given(entries=histories())
def test_an_honest_ledger_passes_and_counts_what_a_step_by_step_account_counts(
    entries: list[AnyEntry],
) -> None:
    opened, by_step = ledger_lines.opening(entries), dict[int, Committed]()
    for entry in entries:
        if isinstance(entry, Committed):
            by_step |= dict.fromkeys(range(entry.first, entry.stop), entry)
        elif isinstance(entry, Rewound):
            by_step = {step: by_step[step] for step in by_step if step < entry.step}
    consumed, shares = Counter[tuple[int, int]](), dict[int, Share]()
    for step, entry in by_step.items():
        here = cut(step, **opened.shape)
        ranges = deal(len(here.sizes), tuple(entry.speeds))
        for worker, mine in zip(entry.workers, ranges, strict=True):
            mine_positions = [p for i in mine for p in here.positions(i)]
            consumed.update((here.epoch, p) for p in mine_positions)
            old = shares.get(worker, Share())
            done = old.micro_batches + len(mine), old.records + len(mine_positions)
            shares[worker] = Share(old.steps + 1, *done)

    proof = check(entries)
    assert proof.problems == []
    assert proof.steps == len(by_step) and proof.by_worker == shares
    assert set(consumed.values()) <= {1}
    per_epoch = Counter(epoch for epoch, _ in consumed)
    assert [(e.epoch, e.consumed) for e in proof.epochs] == sorted(per_epoch.items())
    assert all(e.consumed == e.of == opened.records for e in proof.epochs[:-1])
    for entry in ledger_lines.surviving(entries):
        assert entry.first < entry.stop
        assert entry.runs == ledger_lines.runs_of(entry.first, entry.stop, **opened.shape)


def test_millions_of_steps_are_counted_at_once() -> None:
    opened = Opened(60_001, 64, 16, seed=0)
    two = {"workers": [4, 7], "speeds": [1.0, 3.0]}
    proof = check([opened, commit(opened, 0, 3_000_000, **two)])
    assert proof.ok and sum(share.records for share in proof.by_worker.values()) == sum(
        epoch.consumed for epoch in proof.epochs
    )
    absurd = replace(commit(opened, 0, 10), stop=10**17)
    assert "but it has 1 runs" in problems(opened, absurd, Rewound(10**16))


def test_a_rewind_voids_what_came_later_and_keeps_a_change_at_that_very_step() -> None:
    opened = Opened(100, 32, 8, seed=0)
    at_4, at_6 = SettingsChanged(4, {"lr": 0.2}), SettingsChanged(6, {"lr": 0.3})
    before = [opened, commit(opened, 0, 4), at_4, commit(opened, 4, 6), at_6, commit(opened, 6, 9)]
    assert ledger_lines.changes_after(before, 4) == [at_4, at_6]
    after = [*before, Rewound(4)]
    assert ledger_lines.changes_after(after, 4) == [at_4]
    assert ledger_lines.changes_after([*after, Rewound(3)], 3) == []
    assert check(after).changes == [at_4] and check(after).rewinds == [4]
    kept = ledger_lines.surviving([*before, Rewound(5)])
    assert [(c.first, c.stop) for c in kept] == [(0, 4), (4, 5)]
    assert kept[1].runs == [(1, 0, 32)]
    assert (kept[1].loss, kept[1].rates) == (None, []), "what held at step 9 says nothing of 5"


# ---- touched ledgers


@settings(max_examples=100)
@given(entries=histories(), data=st.data())
def test_a_range_that_is_lost_doubled_or_moved_is_found(
    entries: list[AnyEntry], data: st.DataObject
) -> None:
    where = [i for i, e in enumerate(entries) if isinstance(e, Committed)]
    assume(where)
    i = data.draw(st.sampled_from(where))
    entry = entries[i]
    assert not check([*entries[: i + 1], *entries[i:]]).ok, "twice"
    following = entries[i + 1 : i + 2]
    if following and isinstance(following[0], Committed):
        assert not check([*entries[:i], *entries[i + 1 :]]).ok, "lost"
        swapped = [*entries[:i], *following, entry, *entries[i + 2 :]]
        assert not check(swapped).ok, "out of order"


@settings(max_examples=120)
@given(entries=histories(), by=st.sampled_from([-7, -1, 1, 2]), data=st.data())
def test_a_number_that_is_changed_is_found(
    entries: list[AnyEntry], by: int, data: st.DataObject
) -> None:
    where = [i for i, e in enumerate(entries) if isinstance(e, Committed)]
    assume(where)
    i = data.draw(st.sampled_from(where))
    entry = entries[i]
    assert isinstance(entry, Committed)
    field = data.draw(st.sampled_from(["first", "stop", "runs"]))
    if field == "runs":
        n, k = data.draw(st.integers(0, len(entry.runs) - 1)), data.draw(st.integers(0, 2))
        run = list(entry.runs[n])
        run[k] += by
        new: Any = [*entry.runs[:n], tuple(run), *entry.runs[n + 1 :]]
    else:
        new = getattr(entry, field) + by
    proof = check([*entries[:i], replace(entry, **{field: new}), *entries[i + 1 :]])
    assert any(problem.startswith(f"line {i + 1}: ") for problem in proof.problems)


@settings(max_examples=60)
@given(entries=histories(), by=st.sampled_from([-3, -1, 1, 5]))
def test_an_epoch_of_another_length_is_found(entries: list[AnyEntry], by: int) -> None:
    opened = ledger_lines.opening(entries)
    # One that ends where an epoch does could be the beginning of a longer epoch.
    assume(any(epoch > 0 for c in ledger_lines.surviving(entries) for epoch, _, _ in c.runs))
    changed = replace(opened, records=opened.records + by)
    assert not check([changed, *entries[1:]]).ok


SHAPE = Opened(100, 32, 8, seed=0)
TWO = {"workers": [0, 1], "speeds": [1.0, 1.0]}
LINE = commit(SHAPE, 0, 5, **TWO)
NEXT = commit(SHAPE, 5, 7, **TWO)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "begins with Opened, this one with None"),
        ([LINE], "line 1: a ledger begins with Opened"),
        ([Opened(100, 0, 8, 0), LINE], "must be at least 1"),
        ([SHAPE, LINE, SHAPE, NEXT], "line 3: a second Opened"),
        ([replace(SHAPE, batch=31), LINE], "line 2: steps [0, 5) read positions [0, 31) of epoch"),
        ([SHAPE, NEXT], "line 2: steps [0, 5) are missing before [5, 7)"),
        ([SHAPE, LINE, LINE], "line 3: steps [0, 5) are committed again; 5 were done"),
        ([SHAPE, replace(LINE, stop=0)], "line 2: steps [0, 0) are no range"),
        ([SHAPE, replace(LINE, first=-1)], "line 2: steps [-1, 5) are no range"),
        ([SHAPE, replace(LINE, runs=LINE.runs[:1])], "touch 2 epochs, but it has 1 runs"),
        (
            [SHAPE, replace(LINE, runs=[(0, 0, 99), (1, 0, 32)])],
            "line 2: positions [0, 32) of epoch 1 were consumed too early: position 99 of epoch 0",
        ),
        (
            [SHAPE, LINE, replace(NEXT, runs=[(1, 31, 96)])],
            "line 3: positions [31, 96) of epoch 1 were consumed again: position 32 of epoch 1",
        ),
        ([SHAPE, replace(LINE, runs=[(0, 0, 101), (1, 0, 32)])], "not inside an epoch of 100"),
        ([SHAPE, replace(LINE, generation=0)], "the first view is 1"),
        ([SHAPE, replace(LINE, generation=2), NEXT], "line 3: view 1 comes after view 2"),
        ([SHAPE, LINE, replace(NEXT, workers=[0, 2])], "of view 1 are ([0, 2], [1.0, 1.0])"),
        ([SHAPE, LINE, replace(NEXT, speeds=[1.0, 2.0])], "of view 1 are ([0, 1], [1.0, 2.0])"),
        ([SHAPE, replace(LINE, workers=[1, 1])], "workers [1, 1] are not one distinct number"),
        ([SHAPE, replace(LINE, workers=[], speeds=[])], "workers [] are not one distinct"),
        ([SHAPE, replace(LINE, speeds=[1.0])], "2 workers, but 1 speeds"),
        ([SHAPE, replace(LINE, speeds=[0.0, 0.0])], "one at least is positive"),
        ([SHAPE, replace(LINE, speeds=[1.0, float("nan")])], "one at least is positive"),
        ([SHAPE, replace(LINE, speeds=[5e-324, 1e308])], "cannot be dealt"),
        (
            [SHAPE, LINE, SettingsChanged(4, {"lr": 0.1})],
            "from step 4 on, but 5 steps were done by then",
        ),
        ([SHAPE, LINE, Rewound(6)], "a rewind to step 6, but only 5 steps were done"),
        ([SHAPE, LINE, Rewound(-1)], "a rewind to step -1"),
    ],
)
def test_every_kind_of_lie_is_named(entries: list[AnyEntry], said: str) -> None:
    assert said in problems(*entries)


def test_a_lie_in_a_line_that_was_rewound_is_still_a_lie() -> None:
    assert "line 2" in problems(SHAPE, replace(LINE, runs=[(0, 0, 100), (1, 1, 32)]), Rewound(2))


def test_a_deal_that_leaves_a_micro_batch_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(micro_batches: int, speeds: tuple[float, ...]) -> tuple[range, ...]:
        return (range(1), range(2, micro_batches))

    monkeypatch.setattr("manyhands.accounting.proof.deal", forgetful)
    assert "the deal [0, 1), [2, 4) does not cover 4 micro-batches once" in problems(SHAPE, LINE)


# ---- the file


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    entries = [
        SHAPE,
        LINE,
        SettingsChanged(5, {"lr": 3e-4, "steps": 7, "clip_norm": None}),
        Rewound(3),
    ]
    log = Ledger(path)
    log.write(entries[0])
    log.write(entries[1], durable=True)
    log.close()
    log = Ledger(path)
    log.write(entries[2])
    log.write(entries[3])
    log.sync()
    log.close()
    assert ledger.read(path) == entries
    odd = Ledger(path)
    odd.write(replace(LINE, loss=float("nan"), rates=[float("inf")]))
    odd.close()
    assert ledger.read(path)[-1] == replace(LINE, loss=None, rates=[None])


def test_a_crash_anywhere_in_the_last_line_costs_that_line_only(tmp_path: Path) -> None:
    whole = b"".join(msgspec.json.encode(e) + b"\n" for e in (SHAPE, LINE))
    last = msgspec.json.encode(NEXT) + b"\n"
    path = tmp_path / "ledger.jsonl"
    for kept in range(len(last)):
        path.write_bytes(whole + last[:kept])
        assert ledger.read(path) == [SHAPE, LINE]
        log = Ledger(path)
        log.write(NEXT)
        log.close()
        assert path.read_bytes() == whole + last
    path.write_bytes(whole[:5])
    Ledger(path).close()
    assert path.read_bytes() == b""


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    good = [msgspec.json.encode(e) for e in (SHAPE, LINE, NEXT)]
    for bad in (good[1][:-9], b"", b"\0" * 80, b'{"entry":"Rewound"}', b'{"entry":"\xff"}'):
        path.write_bytes(b"\n".join([good[0], bad, good[2], b""]))
        with pytest.raises(RunDirError, match=r"ledger\.jsonl, line 2 is damaged"):
            ledger.read(path)
    path.write_bytes(b"\n".join([*good[:2], good[2][:-9], b""]))
    with pytest.raises(RunDirError, match="line 3 is damaged"):
        ledger.read(path)
    with pytest.raises(RunDirError, match="has not kept a ledger"):
        ledger.read(tmp_path / "none")


def test_a_write_that_fails_is_raised_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A disk with room for ten more bytes."""

        def __init__(self, path: Path) -> None:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self.truncate, self.close = self.file.truncate, self.file.close

        def write(self, data: bytes) -> int:
            return self.file.write(data[:10])

    log = Ledger(tmp_path / "ledger.jsonl")
    log.write(SHAPE)
    with monkeypatch.context() as patched:
        full = Full(log.path)
        patched.setattr(log, "file", full)
        with pytest.raises(OSError, match="No space left"):
            log.write(LINE)
        full.close()
    assert ledger.read(log.path) == [SHAPE]
    log.write(LINE)
    log.close()
    assert ledger.read(log.path) == [SHAPE, LINE]


# ---- for people


def told(
    folder: Path, capsys: pytest.CaptureFixture[str], entries: list[AnyEntry], json: bool = False
) -> tuple[bool, str]:
    run = RunDir(folder)
    run.ledger.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in entries))
    ok = print_proof(run, json=json)
    return ok, capsys.readouterr().out


def test_the_proof_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = commit(SHAPE, 6, 14, generation=2, workers=[1, 2, 5], speeds=[1.0] * 3)
    entries = [SHAPE, LINE, NEXT, SettingsChanged(7, {"lr": 0.1}), Rewound(6), later]
    ok, text = told(tmp_path, capsys, entries)
    assert ok and "every position of 3 epochs was consumed exactly once; epoch 4: 64 of 100" in text
    assert "14 steps, 4 workers, 1 rewind (to 6)" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "14", "24", "184", "50.5", "%"] in rows
    assert ["0", "–", "5", "1", "0,", "1"] in rows
    assert ["6", "–", "13", "2", "1,", "2,", "5"] in rows
    ok, text = told(tmp_path, capsys, entries, json=True)
    answer = jsonlib.loads(text)
    assert ok and answer["ok"] and answer["steps"] == 14 and answer["rewinds"] == [6]
    assert answer["by_worker"]["0"] == {"steps": 6, "micro_batches": 11, "records": 84}
    assert told(tmp_path, capsys, [SHAPE])[1].startswith("no step was committed yet")


def test_the_refusal_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ok, text = told(tmp_path, capsys, [SHAPE, NEXT, *[LINE] * 40])
    assert not ok and "does NOT prove" in text and "line 2: steps [0, 5) are missing" in text
    assert "more" in text and len(text.splitlines()) < 60
    assert max(len(line) for line in text.splitlines()) <= 100
    ok, text = told(tmp_path, capsys, [SHAPE, NEXT], json=True)
    assert not ok and jsonlib.loads(text)["ok"] is False
