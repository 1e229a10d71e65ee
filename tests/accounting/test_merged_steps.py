"""Steps that came in out of order: the ledger says which, and the proof finds what is wrong."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.accounting import ledger
from manyhands.accounting.ledger_lines import AnyEntry, Committed, Opened, Rewound
from manyhands.accounting.merged_steps import added, problem_with, steps_in, words_of
from manyhands.accounting.proof import check

OPENED = Opened(20, 4, 2, 0)  # 5 steps an epoch, of 2 micro-batches


def written(path: Path) -> list[AnyEntry]:
    """View 1 leaves step 2 undone; view 2 makes up for it."""
    book = ledger.new_book(path / "ledger.jsonl", OPENED, {})
    book.begin(0, 1, [0, 1, 2], [0.0, 1.0, 1.0])
    book.merge(4, 1, [2, 3, 5], [(0, 0, 0), (3, 6, 12), (1, 2, 4)])
    book.begin(4, 2, [0, 1, 3], [0.0, 1.0, 1.0])
    book.merge(7, 2, [7], [(0, 0, 0), (1, 2, 4), (2, 4, 8)])
    book.close_at(7, [0.1], 0.5)
    book.merge(9, 2, [9], [(0, 0, 0), (2, 4, 8), (3, 6, 12)])
    book.close_at(9, [0.1], 0.5, durable=True)
    book.ledger.close()
    return ledger.read(path / "ledger.jsonl")


def test_it_is_proven_and_says_who_computed(tmp_path: Path) -> None:
    entries = written(tmp_path)
    proof = check(entries)
    assert proof.ok, proof.problems
    assert proof.steps == 9
    assert [(e.epoch, e.consumed) for e in proof.epochs] == [(0, 20), (1, 16)]
    assert {w: s.records for w, s in proof.by_worker.items()} == {0: 0, 1: 20, 2: 4, 3: 12}
    first = entries[1]
    assert isinstance(first, Committed)
    assert first.runs == [(0, 0, 8), (0, 12, 20)]


def test_a_rewind_to_a_meeting_between(tmp_path: Path) -> None:
    """The line that reached beyond it had all steps below it."""
    entries: list[AnyEntry] = [*written(tmp_path), Rewound(6)]
    proof = check(entries)
    assert proof.ok, proof.problems
    assert proof.steps == 6


@pytest.mark.parametrize(
    ("line", "changes", "said"),
    [
        (2, {"has": [2, 3, 6]}, "4 pushes, but 5 different steps"),
        (2, {"has": [1, 2, 5]}, "did not read"),
        (2, {"has": [3, 2]}, "no set of steps"),
        (2, {"computed": [(0, 0, 0), (3, 6, 12), (2, 2, 4)]}, "were computed"),
        (2, {"runs": [(0, 0, 16)]}, "did not read"),
        (3, {"had": []}, "were in before it, it says"),
        (3, {"has": [2, 3, 8]}, "touch 1 epochs"),
    ],
)
def test_what_is_wrong_is_found(
    tmp_path: Path, line: int, changes: dict[str, Any], said: str
) -> None:
    entries = written(tmp_path)
    entries[line - 1] = msgspec.structs.replace(entries[line - 1], **changes)
    problems = check(entries).problems
    assert any(said in text for text in problems), problems


def test_lines_of_members_who_took_each_step_together_are_as_they_were() -> None:
    line = Committed(0, 1, [(0, 0, 4)], 1, [0], [1.0], [], None)
    assert set(msgspec.json.decode(msgspec.json.encode(line))) == {
        "entry", "first", "stop", "runs", "generation", "workers", "speeds", "rates", "loss"
    }  # fmt: skip


@settings(max_examples=100)
@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_sets_of_steps(before: set[int], more: set[int]) -> None:
    after = before | more
    had, has = as_words(before), as_words(after)
    assert problem_with(had, len(before)) is None and problem_with(has, len(after)) is None
    came = [s for a, b in added(had, len(before), has, len(after)) for s in range(a, b)]
    assert came == sorted(after - before)
    assert added(has, len(after), had, len(before)) == []
    assert [s for a, b in steps_in(has, len(after)) for s in range(a, b)] == sorted(after)


def as_words(steps: set[int]) -> list[int]:
    edges = [s for s in range(33) if (s in steps) != (s - 1 in steps)]
    return words_of(edges[1:] if 0 in steps else [0, *edges])
