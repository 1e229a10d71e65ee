"""Which optimizer takes which step, over which batch: arithmetic, against counting."""

from itertools import count, islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.accounting.deal_micro_batches import cut, ends_epoch, steps_per_epoch
from manyhands.accounting.ledger import Book, Ledger, read
from manyhands.accounting.ledger_lines import Committed, Opened, runs_of
from manyhands.accounting.phases import Phases
from manyhands.accounting.proof import check
from manyhands.values.errors import TaskError
from manyhands.values.task import Task


@st.composite
def phased(draw: st.DrawFn) -> Phases:
    every = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    offset = [draw(st.integers(0, e - 1)) for e in every]
    every.append(1)  # somebody is due in every round
    offset.append(0)
    names = tuple("abcd"[: len(every)])
    return Phases(names, tuple(every), tuple(offset), draw(st.booleans()))


def counted(phases: Phases, steps: int) -> list[tuple[int, str]]:
    """(round, phase) of the first steps, by going through them."""
    turns = (
        (round, name)
        for round in count()
        for name, every, offset in zip(phases.names, phases.every, phases.offset, strict=True)
        if round % every == offset
    )
    return list(islice(turns, steps))


@given(phased())
def test_steps_are_dealt_to_phases_as_counting_deals_them(phases: Phases) -> None:
    turns = counted(phases, 150)
    assert [phases.phase(s) for s in range(150)] == [name for _, name in turns]
    batches = [round if phases.shared else s for s, (round, _) in enumerate(turns)]
    assert [phases.batch_of(s) for s in range(150)] == batches
    for step in range(150):
        assert phases.batches_before(step) == len(set(batches[:step]))
    for batch in set(batches[:-10]):
        assert phases.steps_before(batch) == batches.index(batch)


@given(phased(), st.integers(1, 40), st.integers(1, 9), st.integers(0, 60))
def test_an_epoch_ends_with_the_last_step_that_reads_it(
    phases: Phases, records: int, batch: int, step: int
) -> None:
    shape = {"records": records, "batch": batch}
    here, after = (cut(s, **shape, micro_batch=1, phases=phases) for s in (step, step + 1))
    assert ends_epoch(step, **shape, phases=phases) == (after.epoch > here.epoch)
    assert cut(here.fetched, **shape, micro_batch=1, phases=phases).start == here.start


@given(phased(), st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(1, 9), max_size=9))
def test_a_ledger_of_phases_is_proven(
    tmp_path_factory: pytest.TempPathFactory,
    phases: Phases,
    records: int,
    batch: int,
    lengths: list[int],
) -> None:
    opened = Opened(records, batch, 1, 0, phases)
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write(opened)
    book, step = Book(ledger, opened), 0
    for generation, length in enumerate(lengths, 1):
        book.begin(step, generation, [0, 1], [1.0, 1.0])
        step += length
        book.close_at(step, [], 0.5)
    ledger.close()
    entries = read(path)
    proof = check(entries)
    assert proof.ok, proof.problems
    assert sum(e.consumed for e in proof.epochs) == sum(
        stop - start for _, start, stop in runs_of(0, step, **opened.shape)
    )
    sizes = [cut(s, **opened.shape).sizes for s in range(step)]
    assert sum(share.records for share in proof.by_worker.values()) == sum(map(sum, sizes))
    # A line that says something else is found out.
    for k, entry in enumerate(entries):
        if isinstance(entry, Committed):
            moved = [
                *entries[:k],
                msgspec.structs.replace(entry, stop=entry.stop + 1),
                *entries[k + 1 :],
            ]
            assert k == len(entries) - 1 or not check(moved).ok


def test_an_epoch_has_as_many_steps_as_it_takes() -> None:
    phases = Phases(("d", "g"), (1, 2), (0, 0))
    assert steps_per_epoch(12, 4) == 3
    assert [phases.steps_before(3 * epoch) for epoch in range(4)] == [0, 5, 9, 14]
    assert str(phases) == "d, g (every 2 rounds)"


def loss(model: object, batch: object) -> object: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": loss}, "each needs a loss of its own: loss={'d': ..., 'g': ...}"),
        ({"loss": {"d": loss}}, "each needs a loss of its own"),
        ({"schedule": len}, "schedule is a dict"),
        ({"schedule": {"e": len}}, "schedule speaks of 'e'; the optimizers are d, g"),
        ({"every": {"g": 0}}, "every['g'] is 0"),
        ({"every": {"g": 2}, "offset": {"g": 2}}, "offset['g'] is 2; it must be below"),
        ({"every": {"g": 2, "d": 2}}, "in round 1 (and every 2 after it) no optimizer is due"),
        ({"every": {"g": 101, "d": 103}}, "10,403 rounds"),
        ({"optimizer": {}}, "names each optimizer"),
        ({"optimizer": len, "loss": loss, "every": {"g": 2}}, "every is for several optimizers"),
        ({"optimizer": {"d": 3, "g": len}}, "optimizer['d'] is not a function"),
        ({"schedule_every": "epochs"}, "schedule_every is 'epochs'"),
    ],
)
def test_phases_that_make_no_sense_are_refused(given: dict[str, object], said: str) -> None:
    whole = {"optimizer": {"d": len, "g": len}, "loss": {"d": loss, "g": loss}, **given}
    with pytest.raises(TaskError) as refusal:
        Task(model=dict, data={"x": [1]}, **whole)  # type: ignore[arg-type]
    assert said in str(refusal.value)
