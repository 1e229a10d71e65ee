# SPDX-License-Identifier: Apache-2.0
"""What a host says about itself, and about its way to others, when `manyhands doctor` asks.

Run as `python -m manyhands.stories.doctor.probe`: a question a line comes in, an answer a line goes
out. Every question is answered, with an error in words where something does not work.
"""

import os
import platform
import resource
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import IO

from manyhands.launch.engines.kernels_that_die import (
    kernels_to_use,
    processor_flags,
    trial_in_new_process,
)
from manyhands.stories.doctor.questions import (
    Answered,
    Clock,
    Dial,
    Dialled,
    HostFacts,
    Look,
    Meet,
    Met,
    ProbeFinding,
    Question,
    Time,
    decode_asked,
    encode,
)
from manyhands.training.collective.handshake import PeerListener
from manyhands.training.collective.sockets import Sockets
from manyhands.values.environment import limited_kernels
from manyhands.values.errors import Broken
from manyhands.values.machine import machine, torch_version
from manyhands.values.native_library import why_not
from manyhands.values.version import VERSION
from manyhands.values.world import World

DIAL_S = 3.0
MEET_S = 10.0
ECHOES = 50
ORPHAN_S = 8.0
"""An init reaps at once; some look around only every few seconds."""
SEGMENT_BYTES = 1 << 46


class Until:
    """A Patience that ends."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def broken(self) -> bool:
        return time.monotonic() > self.until

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class Probing:
    def __init__(self) -> None:
        self.listener: PeerListener | None = None

    def answer(self, question: Question) -> ProbeFinding:
        match question:
            case Look():
                return self._look(question)
            case Clock():
                return Time(time.time())
            case Dial(address=address):
                return Dialled(dial(address))
            case Meet():
                return self._meet(question)

    def _look(self, look: Look) -> HostFacts:
        mine, bound = machine(), ""
        try:
            self.listener = PeerListener(look.address)
        except OSError as error:
            bound = f"{look.address}: {error.strerror or error}"
        return HostFacts(
            host=mine.host,
            python=platform.python_version(),
            torch=torch_version(),
            manyhands=VERSION,
            cores=mine.cores,
            memory_bytes=mine.memory_bytes,
            shm_bytes=_size_of(Path("/dev/shm")),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            segments=_why_no_segments(),
            listener=self.listener.address if self.listener is not None else "",
            bound=bound,
            ports=_ports(),
            loopback_s=loopback_s(),
            sees=Path(look.marker).exists(),
            free_bytes=_free_in(Path(look.marker).parent),
            zombies=not orphans_are_reaped(),
            kernels=kernels_to_use(processor_flags(), limited_kernels(), trial_in_new_process),
            not_native=why_not() or "",
        )

    def _meet(self, meet: Meet) -> Met:
        assert self.listener is not None, "others know its address"
        try:
            links = Sockets(
                World(meet.rank, 2, (1, 1)),
                [],
                listener=self.listener,
                addresses=meet.addresses,
                generation=meet.generation,
                secret=meet.secret,
                patience=Until(MEET_S),
            )
            try:
                ((_, round_trip_s, bytes_per_s),) = links.measure()
            finally:
                links.close()
        except Broken as error:
            return Met(error=str(error))
        return Met(round_trip_s, bytes_per_s)


def dial(address: str) -> str:
    """Why a connection cannot be made; empty: it can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
    except TimeoutError:
        return f"nothing came back within {DIAL_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def loopback_s() -> float:
    """There and back on this host, at best; -1: not at all."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()[:2], DIAL_S) as one,
            listener.accept()[0] as other,
        ):
            for end in (one, other):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return min(_echo(one, other) for _ in range(ECHOES))
    except OSError:
        return -1.0


def _echo(one: socket.socket, other: socket.socket) -> float:
    begun = time.perf_counter()
    for here, there in ((one, other), (other, one)):
        here.send(b"!")
        there.recv(1)
    return time.perf_counter() - begun


def _why_no_segments() -> str:
    try:
        fd = os.memfd_create("manyhands-doctor")
        try:
            os.ftruncate(fd, SEGMENT_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def orphans_are_reaped() -> bool:
    """Whether a process is gone that ended after its parent did."""
    told, tell = os.pipe()
    middle = os.fork()
    if middle == 0:
        orphan = os.fork()
        if orphan == 0:
            time.sleep(0.05)
        else:
            os.write(tell, str(orphan).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    orphan = int(os.read(told, 20))
    os.close(told)
    os.close(tell)
    deadline = time.monotonic() + ORPHAN_S
    while time.monotonic() < deadline:
        if not Path(f"/proc/{orphan}").exists():
            return True
        time.sleep(0.01)
    return False


def _free_in(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return -1


def _size_of(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return -1


def _ports() -> str:
    try:
        return "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return "1024-65535"


def serve(asked: IO[bytes], answers: IO[bytes]) -> None:
    """Until nobody asks any more."""
    probing = Probing()
    for line in asked:
        asked_for = decode_asked(line)
        answer = Answered(asked_for.number, probing.answer(asked_for.question))
        answers.write(encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
