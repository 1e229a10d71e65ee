"""Who serves: pure."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from manyhands.driver.supervise.decisions import HaltView, IssueView, StartWorkers, Wait
from manyhands.driver.supervise.membership import decide, make_view
from manyhands.driver.supervise.room_to_compute import RoomToCompute, room_that_lacks
from manyhands.driver.supervise.servers import (
    choose_servers,
    computing_among,
    dealt_nothing,
    servers_among,
    servers_in,
)
from manyhands.driver.supervise.worker_states import Situation, WorkerState
from tests.support.situations import IN, READY, STARTING, WAITING, killed, view


def situation(**facts: Any) -> Situation:
    return Situation(**{"wanted": 2, "servers": 2, "micro_batches": 8, "most": 8, **facts})


def here(count: int, place: Any = READY, hosts: int = 1) -> dict[int, WorkerState]:
    workers = {n: place(n) for n in range(count)}
    for n, worker in workers.items():
        worker.at = "" if hosts == 1 else f"h{n * hosts // count}"
    return workers


@given(st.integers(1, 12), st.integers(0, 6), st.integers(1, 20), st.integers(1, 4))
def test_somebody_computes_and_somebody_serves(
    wanted: int, servers: int, members: int, hosts: int
) -> None:
    workers = here(members, hosts=min(hosts, members))
    now = situation(wanted=wanted, servers=servers, workers=workers)
    found = choose_servers(now, list(workers.values()))
    assert len(found) == servers_among(now, members) <= servers
    assert 0 not in found and len(found) < members
    assert (len(found) > 0) == (servers > 0 and members > 1)
    per_host = [sum(workers[n].at == at for n in found) for at in {w.at for w in workers.values()}]
    rest = [n for n in range(1, members) if n not in found]
    for n in rest:  # nobody was left out on a host that has fewer servers than another has
        mine = sum(workers[k].at == workers[n].at for k in found)
        assert mine >= max(per_host) - 1


@given(st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_where_steps_are_merged_the_first_of_every_host_serves(
    wanted: int, servers: int, hosts: list[int]
) -> None:
    places = [f"h{host}" for host, count in enumerate(hosts) for _ in range(count)]
    workers = {n: READY(n) for n in range(len(places))}
    for n, at in enumerate(places):
        workers[n].at = at
    chosen = list(workers.values())
    now = situation(wanted=wanted, servers=servers, merges=True, hosts=len(hosts), workers=workers)
    found, first = choose_servers(now, chosen), {places.index(at) for at in places}
    assert len(found) == dealt_nothing(now, chosen)
    if max(hosts) == 1:  # nobody can compute
        assert computing_among(now, chosen) == 0 and len(found) == len(places) - 1
        return
    assert first <= found and computing_among(now, chosen) == len(places) - len(found) > 0
    if len(places) >= wanted + max(servers, len(hosts)):
        assert len(found) == max(servers, len(hosts))


def test_where_steps_are_merged_there_is_a_process_more_for_each_host() -> None:
    now = situation(wanted=3, servers=1, merges=True, hosts=3, capacity=9)
    assert decide(now) == StartWorkers(6)


def test_hosts_with_one_process_each_wait_for_another() -> None:
    workers = here(2, hosts=2)
    now = situation(wanted=1, servers=1, merges=True, hosts=2, capacity=2, workers=workers)
    assert decide(now) == Wait()
    said, clock = list[Any](), [100.0]
    room = RoomToCompute(now, said.append, lambda: clock[0])
    for seconds in (0, 1, 1.5, 60):
        clock[0] += seconds
        room.look()
        assert len(said) == (clock[0] >= 102), "after a moment, and once"
    assert "2 hosts with room for 2 in all" in said[0].text and "--slots 2" in said[0].text
    workers[2] = READY(2)
    workers[2].at = "h1"
    now.capacity = 3
    assert room_that_lacks(now) is None
    decision = decide(now)
    assert isinstance(decision, IssueView) and servers_in(decision.view) == 2


def test_room_is_not_said_to_lack_where_it_does_not() -> None:
    def lacks(workers: dict[int, WorkerState], **facts: Any) -> bool:
        usual = {"wanted": 1, "servers": 1, "merges": True, "hosts": 2, "capacity": 2}
        return room_that_lacks(situation(**{**usual, "workers": workers, **facts})) is not None

    assert lacks(here(2, hosts=2)) and lacks(here(1), capacity=1)
    assert not lacks({}) and not lacks(here(2))
    assert not lacks(here(2, hosts=2), merges=False)
    assert not lacks(here(2, hosts=2), capacity=3), "somebody else is coming"
    assert not lacks(here(2, STARTING, hosts=2))
    assert not lacks(here(3, hosts=2), capacity=3)
    assert lacks(here(3, hosts=2), capacity=3, least=2, wanted=2)
    assert not lacks(here(2), capacity=None)


def test_what_was_stopped_can_still_be_made_up_for() -> None:
    """The only one who computes died as a stop was asked for: another is started."""
    old = view(0, 1, speeds=[0.0, 1.0])
    now = situation(
        wanted=1,
        servers=1,
        merges=True,
        workers={0: READY(0), 1: killed()(1)},
        view=old,
        begun=True,
        stop=True,
        broken="rank 1 is gone",
    )
    assert decide(now) == StartWorkers(1)


def test_those_who_served_go_on_with_it() -> None:
    """Worker 1 died, who computed; worker 4 takes its place."""
    old = view(0, 1, 2, 3, speeds=[1.0, 1.0, 0.0, 0.0])
    workers = {n: READY(n) for n in (0, 2, 3, 4)}
    now = situation(workers=workers, view=old, begun=True, broken="rank 1 is gone")
    made = make_view(now, list(workers.values()))
    serving = {m.worker for m, speed in zip(made.members, made.speeds, strict=True) if speed == 0}
    assert serving == {2, 3}


def test_as_many_processes_are_started_as_compute_and_serve() -> None:
    assert decide(situation()) == StartWorkers(4)


def test_of_many_servers_one_process_finds_out_first_how_many_there_can_be() -> None:
    now = situation(wanted=2, servers=99)
    assert decide(now) == StartWorkers(1)
    now.workers[0] = STARTING(0)
    assert decide(now) == Wait()
    now.workers[0] = killed()(0)
    assert decide(now) == StartWorkers(1), "another one tries"
    now.workers[1] = WAITING(1)
    assert decide(now) == StartWorkers(100)


def test_another_number_of_servers_is_a_reason_to_halt() -> None:
    served = view(0, 1, 2, 3, speeds=[1.0, 1.0, 0.0, 0.0])
    now = situation(wanted=3, servers=1, workers=here(4, IN), view=served, begun=True, running=True)
    assert decide(now) == HaltView("3 workers and 1 server are wanted")
    now = situation(workers=here(4, IN), view=served, begun=True, running=True)
    assert not isinstance(decide(now), HaltView)


def test_one_survivor_does_both() -> None:
    old = view(0, 1, speeds=[1.0, 0.0])
    now = situation(
        wanted=1, servers=1, workers={0: READY(0)}, view=old, begun=True, broken="rank 1 is gone"
    )
    assert servers_in(make_view(now, [now.workers[0]])) == 0
