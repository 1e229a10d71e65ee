"""Clients that no server would like to have: strangers, floods, and friends with bad manners."""

import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import zmq

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)
"""As every ZeroMQ peer with CURVE begins."""


@contextmanager
def dealer(
    port: int, server: bytes, public: bytes, secret: bytes, name: bytes = b""
) -> Generator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    dealing = context.socket(zmq.DEALER)
    dealing.linger = 1000
    if name:
        dealing.identity = name
    dealing.curve_serverkey, dealing.curve_publickey, dealing.curve_secretkey = (
        server,
        public,
        secret,
    )
    dealing.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield dealing
    finally:
        dealing.close()
        context.term()


def throw(port: int, data: bytes) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(data)


def long_frame(size: int) -> bytes:
    """The beginning of a command of so many bytes, as a stranger can send it at once."""
    return GREETING + b"\x06" + size.to_bytes(8, "big")


def pour(port: int, size: int, at_a_time: int = 1 << 20) -> int:
    """How many bytes of one long frame a server takes from a stranger, at most `size`."""
    taken = 0
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.settimeout(5)
        stranger.sendall(long_frame(size))
        while taken < size:
            taken += stranger.send(bytes(min(at_a_time, size - taken)))
    return taken


@contextmanager
def half_open(
    port: int, count: int, begin: bytes = GREETING[:11]
) -> Generator[list[socket.socket]]:
    """So many connections that begin to say who they are, and never finish."""
    with ExitStack() as stack:
        found: list[socket.socket] = []
        for _ in range(count):
            stranger = stack.enter_context(socket.socket())
            stranger.settimeout(5)
            with suppress(OSError):
                stranger.connect(("127.0.0.1", port))
                stranger.sendall(begin)
            found.append(stranger)
        yield found


def listening(pid: int) -> list[int]:
    """The TCP ports at which a process listens."""
    links: list[str] = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(str(path.readlink()))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(r[1].rpartition(":")[2], 16) for r in rows if r[3] == "0A" and r[9] in inodes]


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had at a time."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
