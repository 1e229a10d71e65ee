"""What workers of other hosts print: sent as it comes, and bounded on the driver's disk."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.launch.engines.launcher import HostNews, LauncherEvent, LauncherWarning
from manyhands.launch.hosts import carried_logs
from manyhands.launch.hosts.carried_logs import LAST_BYTES, CarriedLogs, LogsToSend, next_stretch
from manyhands.launch.hosts.join_protocol import Logged, encode
from manyhands.launch.hosts.joined_hosts import Listening
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.launch.wire.bulk_window import MOST
from tests.launch.hosts.test_nonsense_from_hosts import next_of
from tests.launch.hosts.test_withdrawn_hosts import caller

WORKER, KEPT = 3, 1 << 20
ENDED = WorkerExit(WORKER, 5, 0)


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_logs, "KEPT_BYTES", KEPT)


@pytest.fixture
def many() -> Iterator[ManyHosts]:
    fds = os.memfd_create("task"), os.memfd_create("state")
    launcher = ManyHosts("nobody:main", fds, Listening(["127.0.0.1"], here=0))
    yield launcher
    launcher.close()


@pytest.mark.timeout(60)
def test_a_host_that_sends_too_much_does_not_fill_the_disk(many: ManyHosts, tmp_path: Path) -> None:
    log = tmp_path / "worker-03.log"
    with caller(many.hosts.server.port, many.hosts.listening.key.token(), "b") as socket:
        next_of(many, HostNews)
        (host,) = many.hosts.others.values()
        host.workers[WORKER] = 5
        many.logs.begin(WORKER, log)
        lines = [b"%07d" % n + b"." * 9_992 + b"\n" for n in range(500)]  # five times as much
        told: list[LauncherEvent] = []
        for line in lines:
            socket.send(encode(Logged(WORKER, line)))
            told += many.poll()
        socket.send(encode(Logged(WORKER + 1, b"of a worker that is not there")))
        socket.send(encode(WorkerExit(WORKER, 5, 0)))
        while not any(isinstance(event, WorkerExit) for event in told):
            told += many.poll()
    (warned,) = [event.text for event in told if isinstance(event, LauncherWarning)]
    assert "worker 3 prints much" in warned and "are kept" in warned
    before = log.with_name("worker-03.log.before")
    assert sorted(tmp_path.iterdir()) == [log, before]
    assert max(log.stat().st_size, before.stat().st_size) < KEPT + 100
    kept = before.read_bytes() + log.read_bytes()
    assert kept.endswith(lines[-1]) and lines[0] not in kept
    assert b"before is in worker-03.log.before" in kept


def test_all_of_a_log_arrives_as_it_grows(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    sending, taking = LogsToSend(), CarriedLogs()
    sending.begin(WORKER, there)
    taking.begin(WORKER, here)
    assert not list(sending.more()), "it has written nothing yet"
    for _ in range(20):
        with there.open("ab") as file:
            file.write(os.urandom(30_000))
        for piece in sending.more():
            taking.add(piece.worker, piece.data)
            sending.taken()
    with there.open("ab") as file:
        file.write(os.urandom(LAST_BYTES))
    sending.end(ENDED)
    *pieces, news = sending.ends()
    for piece in pieces:
        assert isinstance(piece, Logged)
        taking.add(piece.worker, piece.data)
    assert here.read_bytes() == there.read_bytes() and news == ENDED
    assert not list(sending.ends()) and not list(sending.more())


def test_all_of_a_log_goes_before_the_news_of_its_end(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.write_bytes(os.urandom(3 * LAST_BYTES))  # it ended before anything of it was sent
    sending, taking = LogsToSend(), CarriedLogs()
    sending.begin(WORKER, there)
    taking.begin(WORKER, here)
    sending.end(ENDED)
    assert not list(sending.ends()), "there is more of it than goes at once"
    news: list[Logged | WorkerExit] = []
    while ENDED not in news:
        news = [*sending.more(), *sending.ends()]
        for piece in news:
            if isinstance(piece, Logged):
                taking.add(piece.worker, piece.data)
                sending.taken()
    assert here.read_bytes() == there.read_bytes()


def test_the_news_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_bytes(bytes(3 * LAST_BYTES))
    for wait_s, at_once in ((-1.0, False), (1e9, True)):
        monkeypatch.setattr(carried_logs, "LAST_WORDS_S", wait_s)
        sending = LogsToSend()
        sending.begin(WORKER, log)
        sending.end(ENDED)
        *pieces, news = sending.ends(at_once=at_once)
        assert news == ENDED and len(pieces) == LAST_BYTES // carried_logs.PIECE_BYTES
        assert isinstance(pieces[0], Logged) and b"bytes were left out here" in pieces[0].data


def test_one_that_prints_much_does_not_silence_the_others(tmp_path: Path) -> None:
    sending = LogsToSend()
    for worker, data in enumerate((bytes(KEPT), b"important", bytes(KEPT))):
        (tmp_path / f"{worker}").write_bytes(data)
        sending.begin(worker, tmp_path / f"{worker}")
    said: list[int] = []
    for _ in range(4):
        for piece in sending.more():
            said.append(piece.worker)
        sending.taken()
    assert said[:3] == [0, 1, 2] and abs(said.count(0) - said.count(2)) <= 1


def test_lost_answers_and_full_sockets_do_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_bytes(os.urandom(KEPT))
    sending = LogsToSend()
    sending.begin(WORKER, log)
    first = next(sending.more())  # which could not be sent
    assert next(sending.more()) == first, "it is sent again, and was not counted"
    sent = list(sending.more())
    assert sent[0] == first and not list(sending.more())
    monkeypatch.setattr(carried_logs, "ANSWER_S", -1.0)  # none of them was ever answered
    again = list(sending.more())
    assert again and again[0] not in sent
    for _ in range(9):
        sending.taken()  # also when the answers come after all


def test_nothing_is_sent_faster_than_it_is_taken(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(bytes(2 * KEPT))
    sending = LogsToSend()
    sending.begin(WORKER, log)
    assert 0 < len(list(sending.more())) < MOST
    assert not list(sending.more()), "nothing of it was taken"
    sending.taken()
    assert list(sending.more())


@pytest.mark.parametrize(
    ("sent", "size", "last", "stretch"),
    [
        (0, 0, False, (0, 0)),
        (0, 10, False, (0, 10)),
        (10, 1 << 19, False, (10, 10 + carried_logs.PIECE_BYTES)),
        (10, 1 << 30, False, ((1 << 30) - 2 * KEPT, (1 << 30) - 2 * KEPT + (64 << 10))),
        (10, 1 << 30, True, ((1 << 30) - carried_logs.LAST_BYTES, 1 << 30)),
        (10, 20, True, (10, 20)),
        (20, 5, False, (20, 20)),
    ],
)
def test_what_is_sent_next(sent: int, size: int, last: bool, stretch: tuple[int, int]) -> None:
    assert next_stretch(sent, size, last=last) == stretch
