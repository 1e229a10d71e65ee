"""What hosts say of a run that was over before they heard so: nobody's fault, and of no effect."""

import os
import threading
from collections.abc import Iterator

import pytest
import zmq

from manyhands.launch.hosts.join_protocol import (
    Blank,
    Blanked,
    Echo,
    FilePiece,
    HostDropped,
    Load,
    Ping,
    Settled,
    ToHost,
    Want,
    decode_to_host,
    encode,
)
from manyhands.launch.hosts.join_server import HostReady, JoinServer
from manyhands.values.join_token import DriverKey
from tests.launch.hosts.test_withdrawn_hosts import caller

TASK = b"the task's bytes"
LOAD = Load("/run", len(TASK), ".here-1-a", 60.0)
SETTLED = Settled(fds=(3, 4), run="/run", shares=False)


@pytest.fixture
def task_fd() -> Iterator[int]:
    fd = os.memfd_create("task")
    os.write(fd, TASK)
    yield fd
    os.close(fd)


@pytest.fixture
def server() -> Iterator[JoinServer]:
    server = JoinServer(DriverKey(), ["127.0.0.1"])
    yield server
    server.close("the test is over")


def told(socket: "zmq.Socket[bytes]") -> ToHost:
    """The next that is not a ping."""
    while True:
        message = decode_to_host(socket.recv())
        if isinstance(message, Ping):
            socket.send(encode(Echo(message.number)))
        else:
            return message


@pytest.mark.timeout(60)
def test_what_is_said_too_late_is_ignored(server: JoinServer, task_fd: int) -> None:
    with caller(server.port, server.holders.key.token(), "b") as socket:
        server.load(LOAD, task_fd)
        assert told(socket) == LOAD
        socket.send(encode(Want(0)))
        assert told(socket) == FilePiece(0, TASK)
        over = threading.Thread(target=server.unload)
        over.start()
        assert told(socket) == Blank()
        socket.send(encode(Want(4)))
        socket.send(encode(SETTLED))
        server.load(LOAD, task_fd)
        assert told(socket) == LOAD, "it is neither blamed nor told of another run's bytes"
        socket.send(encode(Want(8)))
        socket.send(encode(SETTLED))
        socket.send(encode(Blanked()))
        over.join()
        assert not any(isinstance(h, HostReady) for h in server.happened())
        assert [guest.settled for guest in server.guests.values()] == [None]
        socket.send(encode(Want(3)))
        assert told(socket) == FilePiece(3, TASK[3:]), "of this run it is told everything"
        socket.send(encode(SETTLED))
        socket.send(b"\xc1")
        assert isinstance(told(socket), HostDropped), "what no host says is still blamed"
    assert any(isinstance(h, HostReady) for h in server.happened())
