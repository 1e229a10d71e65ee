"""How work on other hosts ends: nobody is still at it when a launcher says that it has stopped."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.launch.engines.fork_agent import WorkerStarted
from manyhands.launch.hosts import join_server
from manyhands.launch.hosts.host_daemon import Offer, serve
from manyhands.launch.hosts.join_protocol import Settled
from manyhands.launch.hosts.join_server import JoinedHost
from manyhands.launch.hosts.joined_hosts import Listening, OtherHost
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.testing.contracts import orders
from tests.launch.hosts.test_nonsense_from_hosts import next_of
from tests.launch.hosts.test_withdrawn_hosts import caller

ENTRY = "manyhands.testing.contracts:contract_worker"


@pytest.fixture
def many() -> Iterator[ManyHosts]:
    """A launcher without workers of its own."""
    fds = os.memfd_create("task"), os.memfd_create("state")
    launcher = ManyHosts(ENTRY, fds, Listening(["127.0.0.1"], here=0))
    yield launcher
    launcher.close()


def settled(many: ManyHosts) -> OtherHost:
    while True:
        many.poll()
        for host in many.hosts.others.values():
            if host.guest.settled is not None:
                return host
        many.selector.select(0.05)


@pytest.mark.timeout(60)
def test_workers_of_other_hosts_are_dead_when_it_has_stopped(
    many: ManyHosts, tmp_path: Path
) -> None:
    token, port = many.hosts.listening.key.token(), many.hosts.server.port
    offer = Offer("127.0.0.1", port, token, slots=2, name="b", entry=ENTRY)
    daemon = threading.Thread(target=serve, args=(offer, lambda text: None))
    daemon.start()
    try:
        for worker in (0, 1):  # one run after the other, with the same host
            many.hosts.load(0, tmp_path, 2.0)
            settled(many)
            many.start(worker, orders(b"stop 0"), tmp_path / "log")
            started = next_of(many, WorkerStarted)
            assert isinstance(started, WorkerStarted)
            many.stop()
            assert not Path(f"/proc/{started.pid}").exists()
    finally:
        many.close()
        daemon.join(30)
    assert not daemon.is_alive(), "it was told that it is over"


@pytest.mark.timeout(60)
def test_a_host_that_does_not_answer_is_not_waited_for_for_ever(
    many: ManyHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_server, "BLANK_S", 0.2)
    with caller(many.hosts.server.port, many.hosts.listening.key.token(), "b"):
        many.hosts.load(0, tmp_path, 60.0)
        while not many.hosts.others:
            many.poll()
        many.stop()
        many.stop()


class Fleeting(JoinedHost):
    """A host that is told to go just after it was looked at."""

    looked = 0

    @property  # type: ignore[override]
    def settled(self) -> Settled | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.looked += 1
        return Settled((3, 4), "/run", True) if self.looked == 1 else None

    @settled.setter
    def settled(self, value: Settled | None) -> None: ...


@pytest.mark.timeout(30)
def test_a_host_that_is_told_to_go_while_a_place_is_chosen(many: ManyHosts) -> None:
    with caller(many.hosts.server.port, many.hosts.listening.key.token(), "b"):
        while not many.hosts.others:
            many.poll()
        ((key, host),) = many.hosts.others.items()
        host.guest = Fleeting(key, host.guest.here)
        assert many.hosts.place(Counter(), (0, 1)).fds == (3, 4)
