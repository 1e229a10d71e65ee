"""Hosts that were dropped by hand: they go at once, and do not come back, also after a resume."""

import os
import platform
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.hosts.join_protocol import Here, TurnedAway, decode_to_host, encode
from manyhands.launch.hosts.join_server import TokenHolders
from manyhands.launch.hosts.joined_hosts import JoinedHosts, Listening
from manyhands.launch.hosts.message_digest import message_digest
from manyhands.launch.hosts.withdrawn_hosts import WithdrawnHosts, read_withdrawn
from manyhands.stories import live, status
from manyhands.testing.namespaces import Host, Network
from manyhands.values.errors import RequestError, RunDirError
from manyhands.values.join_token import DriverKey, JoinToken, make_token
from manyhands.values.machine import torch_version
from manyhands.values.run_folder import RunDir
from manyhands.values.version import VERSION
from tests.support.cluster import Warm
from tests.support.tasks import make

SETTINGS = ("train.batch=32", "train.micro_batch=4", "train.steps=120", "recovery.silent_s=1")


@contextmanager
def caller(port: int, token: JoinToken, name: str) -> Generator["zmq.Socket[bytes]"]:
    """A host that has said that it is here."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.rcvtimeo = 0, 10_000
    socket.curve_serverkey = token.driver
    socket.curve_publickey, socket.curve_secretkey = token.pair
    socket.connect(f"tcp://127.0.0.1:{port}")
    python = platform.python_version()
    here = Here(name, 1, 1 << 30, "127.0.0.1", VERSION, torch_version(), python, message_digest())
    socket.send(encode(here))
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def answer(socket: "zmq.Socket[bytes]") -> str:
    """Why it was turned away."""
    while True:
        message = decode_to_host(socket.recv())
        if isinstance(message, TurnedAway):
            return message.because


@pytest.fixture
def joined() -> Iterator[JoinedHosts]:
    fd = os.memfd_create("task")
    hosts = JoinedHosts(Listening(["127.0.0.1"], here=0), fd)
    yield hosts
    hosts.close()
    os.close(fd)


def test_what_was_withdrawn_is_known_to_a_resume(tmp_path: Path) -> None:
    run, key = RunDir(tmp_path), DriverKey()
    own = key.token("c").pair[0]
    for name, token in (("b", None), ("c", own)):
        WithdrawnHosts(run).add(name, token)
    again = WithdrawnHosts(run)
    assert again.has_name("b") and again.has_name("c") and not again.has_name("d")
    assert again.has_token(own) and not again.has_token(key.token().pair[0])
    run.withdrawn.write_text("[{]")
    with pytest.raises(RunDirError, match="would be let in again"):
        read_withdrawn(run)


def test_a_dropped_host_does_not_come_back(joined: JoinedHosts, tmp_path: Path) -> None:
    token = joined.listening.key.token()
    joined.load(0, tmp_path, 2.0)
    with caller(joined.server.port, token, "b") as socket:
        while not joined.others:
            for happening in joined.server.happened():
                joined.came(happening.guest)  # type: ignore[union-attr]
        with pytest.raises(RequestError, match=r"no host a.*those that have: b"):
            joined.withdraw("a")
        assert "could not" not in joined.withdraw("b")
        assert "by hand" in answer(socket)
    with caller(joined.server.port, token, "b") as socket:
        assert "cannot come back" in answer(socket)


def test_a_host_that_came_before_the_resume_is_sent_away(
    joined: JoinedHosts, tmp_path: Path
) -> None:
    WithdrawnHosts(RunDir(tmp_path)).add("b", None)
    with caller(joined.server.port, joined.listening.key.token(), "b") as socket:
        while not joined.others:
            for happening in joined.server.happened():
                joined.came(happening.guest)  # type: ignore[union-attr]
        joined.load(0, tmp_path, 2.0)
        assert "cannot come back" in answer(socket)


def test_a_token_is_for_its_own_host() -> None:
    key = DriverKey(names=("c",))
    holders = TokenHolders(key)
    own = key.token("c").pair[0]
    assert holders.objection("c", own) is None
    assert holders.objection("d", key.token().pair[0]) is None
    assert holders.objection("d", own) == "this token was made for host c, not for d."
    holders.withdrawn.add("c", own)
    assert not holders.callback("", own), "its connections are refused"
    assert holders.callback("", key.token().pair[0])


# ---- a run


def gone(warm: Warm, host: Host, name: str) -> str:
    """What a daemon said that ended because its request was wrong."""
    assert warm.of.pop(host).wait(30) == 2, warm.said()
    return (warm.folder / f"{name}.txt").read_text()


@pytest.mark.timeout(240)  # five daemons, one after the other
def test_hosts_are_listed_and_dropped(
    network: Callable[..., Network], launcher: Launcher, tmp_path: Path
) -> None:
    with closing(Warm(network(hosts=3), tmp_path)) as warm:
        _, b, c = warm.net.hosts
        own = make_token(warm.token, "c2")
        names = warm.start(b), warm.start(c, 1, "--token-file", str(own))
        run = warm.train("cnn", *SETTINGS, pause_s=0.3, workers="1:3")
        run.view_of(3)
        run.step()
        rows = {row["name"]: row for row in status.hosts(run.path)}
        assert [rows[name]["token"] for name in names] == ["shared", "its own"]
        assert sorted(rank for row in rows.values() for rank in row["ranks"]) == [0, 1, 2]
        with pytest.raises(RequestError, match="no host nobody has joined"):
            live.drop_host(run.path, "nobody", 60)
        assert "its token is withdrawn" in live.drop_host(run.path, names[1], 60)
        assert "by hand" in gone(warm, c, names[1])
        warm.count = 1
        warm.start(c, 1, "--token-file", str(own))
        assert "does not accept this token" in gone(warm, c, names[1])
        assert "cannot come back under this name" in live.drop_host(run.path, names[0], 60)
        assert "by hand" in gone(warm, b, names[0])
        rows = {row["name"]: row for row in status.hosts(run.path)}
        assert [rows[name]["state"] for name in names] == ["dropped", "dropped"]
        mark = run.finish()
    calm = mh.train(
        make("cnn"), to=tmp_path / "calm", workers=1, settings=[*SETTINGS], launcher=launcher
    )
    assert mark == calm.fingerprint
