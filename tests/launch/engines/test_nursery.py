"""Whom a nursery forks ends with it, and it with whoever started it, however that came."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from manyhands.launch.engines.nursery import Nursery

pytestmark = pytest.mark.timeout(60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def says_who_it_is(files: list[int]) -> None:
    with socket.socket(fileno=files[0]) as channel:
        channel.send(str(os.getpid()).encode())
        channel.recv(1)


def child_of(nursery: Nursery, number: int) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nursery.fork(number, [theirs.fileno()])
    theirs.close()
    return int(ours.recv(100)), ours


def test_it_tells_how_a_child_ended_and_forks_another() -> None:
    nursery = Nursery(says_who_it_is)
    first, line = child_of(nursery, 1)
    os.kill(first, signal.SIGKILL)
    select.select([nursery.channel], [], [], 30)
    assert [(e.number, e.code) for e in nursery.ended()] == [(1, -9)]
    assert line.recv(1) == b""
    second, other = child_of(nursery, 2)
    nursery.end(2)
    until(lambda: not alive(second))
    third, another = child_of(nursery, 3)
    nursery.close()
    until(lambda: not alive(third))
    for each in (line, other, another):
        each.close()


def test_a_child_that_hangs_up_is_told_of() -> None:
    nursery = Nursery(says_who_it_is)
    _, line = child_of(nursery, 5)
    line.close()
    select.select([nursery.channel], [], [], 30)
    assert [(e.number, e.code) for e in nursery.ended()] == [(5, 0)]
    nursery.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_does_not_end_when_others_are_asked_to_stop(number: int) -> None:
    nursery = Nursery(says_who_it_is)
    pid, line = child_of(nursery, 1)
    os.kill(nursery.pid, number)
    os.kill(pid, number)
    again, other = child_of(nursery, 2)
    assert alive(pid) and alive(again) and nursery.ended() == []
    nursery.close()
    line.close()
    other.close()


def test_all_end_with_the_process_that_started_it() -> None:
    """A process that is killed, whose nursery has two children."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.fork()
    if parent == 0:
        nursery = Nursery(says_who_it_is)
        children = [child_of(nursery, n) for n in (1, 2)]
        theirs.send(" ".join(str(p) for p in (nursery.pid, *(c for c, _ in children))).encode())
        signal.pause()
        os._exit(0)
    pids = [int(word) for word in ours.recv(100).split()]
    assert all(alive(pid) for pid in pids)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(lambda: not any(alive(pid) for pid in pids))
    ours.close()
    theirs.close()


def test_once_it_is_gone_it_is_known_to_be() -> None:
    nursery = Nursery(partial(says_who_it_is))
    pid, line = child_of(nursery, 1)
    os.kill(nursery.pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    assert nursery.ended() == [] and not nursery.alive
    nursery.fork(2, [])
    nursery.close()
    line.close()
