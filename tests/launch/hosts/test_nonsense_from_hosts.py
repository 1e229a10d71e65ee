"""A host that is hostile or broken: what it may tell of its workers is told, and no more."""

import os
from collections.abc import Iterator

import msgspec
import pytest

from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.launch.engines.launcher import HostNews, LauncherEvent
from manyhands.launch.hosts.join_protocol import (
    HostDropped,
    Load,
    Settled,
    decode_from_host,
    decode_to_host,
    encode,
)
from manyhands.launch.hosts.join_server import ODD_REST_S
from manyhands.launch.hosts.joined_hosts import Listening
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.values import messages
from manyhands.values.messages import ReadFile, decode_from_worker
from manyhands.values.work_in_hand import WorkInHand
from tests.launch.hosts.test_withdrawn_hosts import caller

WORKER = 7


@pytest.fixture
def many() -> Iterator[ManyHosts]:
    fds = os.memfd_create("task"), os.memfd_create("state")
    launcher = ManyHosts("nobody:main", fds, Listening(["127.0.0.1"], here=0))
    yield launcher
    launcher.close()


def next_of(many: ManyHosts, kind: type[LauncherEvent]) -> LauncherEvent:
    while True:
        for event in many.poll():
            if isinstance(event, kind):
                return event
        many.selector.select(1)


@pytest.mark.parametrize("run", ["/home/me/a\tb", "/home/me/two\nlines", "/home/me/\u200eשלום"])
def test_folders_may_be_called_anything(run: str) -> None:
    load = Load(run, 9, ".here-1-a", 2.0)
    assert decode_to_host(encode(load)) == load
    settled = Settled(fds=(3, 4), run=run, shares=True)
    assert decode_from_host(encode(settled)) == settled
    read = ReadFile(worker=1, number=1, path=f"{run}/model.safetensors", offset=0, size=1)
    assert decode_from_worker(messages.encode(read)) == read


@pytest.mark.timeout(30)
def test_how_its_worker_ended_but_not_that_a_host_is_lost(many: ManyHosts) -> None:
    with caller(many.hosts.server.port, many.hosts.listening.key.token(), "b") as socket:
        next_of(many, HostNews)
        (host,) = many.hosts.others.values()
        host.workers[WORKER] = 5
        work = WorkInHand("compute", 3, 1)
        told = WorkerExit(WORKER, 5, -11, work=work, log_tail="last words", out_of_memory=True)
        said = msgspec.structs.replace(
            told, code=-(1 << 40), host="a", lost="host a is gone", why="\x1b[2Jwell"
        )
        socket.send(encode(said))
        expected = msgspec.structs.replace(told, code=-64, why=r"\x1b[2Jwell")
        assert next_of(many, WorkerExit) == expected


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "said",
    [
        b"\xc1",
        encode(WorkerExit(WORKER, -1, 0)),
        encode(WorkerExit(WORKER, 5, 0, work=WorkInHand("compute", -1, 1 << 60))),
        encode(Settled(fds=(-1, 3), run="x", shares=True)),
        encode(Settled(fds=(3, 4), run="x" * 9999, shares=True)),
    ],
)
def test_what_no_host_says_costs_it_its_place(many: ManyHosts, said: bytes) -> None:
    with caller(many.hosts.server.port, many.hosts.listening.key.token(), "b") as socket:
        next_of(many, HostNews)
        (host,) = many.hosts.others.values()
        host.workers[WORKER] = 5
        socket.send(said)
        news = next_of(many, HostNews)
        assert isinstance(news, HostNews) and "host b said what no host says" in news.what
        while not isinstance(message := decode_to_host(socket.recv()), HostDropped):
            pass
        assert message.wait_s == ODD_REST_S and not many.hosts.others
