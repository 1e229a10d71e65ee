"""What readers are asked for, and when there are some that nobody has asked for."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.reading.read_ahead_plan import (
    MOST_CHOSEN,
    FetchCosts,
    FetchJob,
    Slot,
    choose_readers,
    hangs,
    jobs_to_come,
    next_moves,
)

jobs = st.builds(FetchJob, st.integers(0, 4), st.integers(0, 4))


@given(
    st.integers(0, 9),
    st.integers(0, 5),
    st.lists(st.integers(0, 4), min_size=20, max_size=20),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_jobs_come_in_the_order_in_which_they_are_needed(
    step: int, left: int, counts: list[int], steps: int, most: int
) -> None:
    found = jobs_to_come(step, range(left), lambda s: range(counts[s]), steps=steps, most=most)
    every = [FetchJob(step, k) for k in range(left)]
    for later in range(step + 1, min(steps, step + 1 + most)):
        every += [FetchJob(later, k) for k in range(counts[later])]
    assert found == every[:most]


@st.composite
def readers(draw: st.DrawFn) -> list[list[Slot]]:
    """Any number of them, each job in one slot at the most."""
    free = draw(st.lists(jobs, unique=True, max_size=12))

    def slot() -> Slot:
        state = draw(st.sampled_from(["free", "asked", "ready", "dropped"]))
        if state in ("asked", "ready") and free:
            return Slot(state, free.pop())
        return Slot("dropped" if state == "dropped" else "free")

    return [[slot() for _ in range(3)] for _ in range(draw(st.integers(0, 4)))]


@given(st.lists(jobs, unique=True, max_size=12), readers(), st.frozensets(jobs, max_size=3))
def test_moves(wanted: list[FetchJob], crew: list[list[Slot]], own: frozenset[FetchJob]) -> None:
    moves = next_moves(wanted, crew, own)
    held = {s.job: (r, k) for r, row in enumerate(crew) for k, s in enumerate(row) if s.job}
    assert set(moves.drop) == {at for job, at in held.items() if job not in set(wanted) - own}
    places = [(r, k) for r, k, _ in moves.ask]
    assert len(set(places)) == len(places)
    for r, k in places:  # nobody writes there
        ready = crew[r][k].state == "ready" and (r, k) in moves.drop
        assert crew[r][k].state == "free" or ready
    asked = [job for *_, job in moves.ask]
    missing = [job for job in wanted if job not in held and job not in own]
    assert asked == missing[: len(asked)]  # the first first, none twice
    room = sum(s.state == "free" for row in crew for s in row)
    room += sum(crew[r][k].state == "ready" for r, k in moves.drop)
    assert len(asked) == min(len(missing), room)


def test_who_has_least_to_do_is_asked() -> None:
    busy = [Slot("asked", FetchJob(0, 0)), Slot("free"), Slot("free")]
    idle = [Slot("ready", FetchJob(0, 1)), Slot("free"), Slot("free")]
    wanted = [FetchJob(0, 0), FetchJob(0, 1), FetchJob(1, 0), FetchJob(1, 1)]
    moves = next_moves(wanted, [busy, idle], frozenset())
    assert [r for r, *_ in moves.ask] == [1, 0]


def test_a_reader_hangs_after_a_while_but_before_its_worker_does() -> None:
    assert not hangs(4.0, 0.1, 30.0) and hangs(5.1, 0.1, 30.0)
    assert hangs(1.1, 0.1, 2.0)  # its worker would be killed after two seconds
    assert not hangs(200.0, 60.0, 30.0)  # a worker may take ten times the usual
    assert not hangs(10.0, None, 30.0) and hangs(16.0, None, 30.0)


def costs(fetch: float, cpu: float, rest: float) -> FetchCosts:
    return FetchCosts(20, fetch, cpu, rest)


def test_readers_are_chosen_where_fetching_holds_steps_up() -> None:
    def chosen(found: FetchCosts, cores: int = 8) -> int | None:
        choice = choose_readers(found, cores=cores, workers=2, threads=1)
        return None if choice is None else choice.readers

    assert chosen(costs(1.0, 1.0, 0.1)) is None  # too early to tell
    assert chosen(costs(3.0, 3.0, 100.0)) == 0
    assert chosen(costs(3.0, 3.0, 3.0)) == 1
    assert chosen(costs(30.0, 30.0, 3.0)) == 3  # of eight cores two compute
    assert chosen(costs(30.0, 30.0, 3.0), cores=2) == 0
    assert chosen(costs(30.0, 1.0, 3.0), cores=2) == MOST_CHOSEN  # who waits needs no core
