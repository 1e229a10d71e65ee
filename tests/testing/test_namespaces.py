"""Hosts made of network namespaces do what hosts do, and leave nothing behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from manyhands.testing import namespaces
from manyhands.testing.namespaces import Host, Network, NetworkRefused, why_not

Making = Callable[..., Network]

SOON_S = 0.5  # what would arrive has arrived by then
LONG_S = 30.0


@contextmanager
def connected(a: Host, b: Host) -> Generator[tuple[socket.socket, socket.socket]]:
    """The two ends of a TCP connection; `a` has connected."""
    with ExitStack() as stack:
        with b.inside():
            server = stack.enter_context(socket.create_server((b.address, 0)))
        with a.inside():
            mine = socket.create_connection(server.getsockname(), timeout=LONG_S)
        stack.enter_context(mine)
        theirs = stack.enter_context(server.accept()[0])
        theirs.settimeout(LONG_S)
        yield mine, theirs


@contextmanager
def listening(*hosts: Host) -> Generator[list[socket.socket]]:
    with ExitStack() as stack:
        found: list[socket.socket] = []
        for host in hosts:
            with host.inside():
                found.append(stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)))
            found[-1].bind((host.address, 0))
        yield found


def arrives(sender: socket.socket, receiver: socket.socket, within_s: float = LONG_S) -> bool:
    sender.sendto(b"hello", receiver.getsockname())
    receiver.settimeout(within_s)
    try:
        return receiver.recvfrom(5) == (b"hello", sender.getsockname())
    except TimeoutError:
        return False


def names() -> list[str]:
    """As `ip netns list` has them, of this process; a removed one is gone from there at once."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if f"manyhands-{os.getpid()}-" in line]


def links() -> set[str]:
    """Of this process, where the tests run."""
    return {name for _, name in socket.if_nameindex() if name.startswith(f"mh{os.getpid()}-")}


def test_hosts_have_their_own_addresses_and_reach_each_other(network: Making) -> None:
    net = network(hosts=3)
    a, b, c = net.hosts
    assert [host.name for host in net.hosts] == ["a", "b", "c"]
    subnet = a.address.removesuffix(".1")
    assert [host.address for host in net.hosts] == [f"{subnet}.{n}" for n in (1, 2, 3)]
    for one, other in ((a, b), (b, c), (c, a)):
        with connected(one, other) as (mine, theirs):
            assert theirs.getpeername()[0] == one.address
            assert mine.getpeername()[0] == other.address
            mine.sendall(b"hello")
            assert theirs.recv(5) == b"hello"


def test_processes_run_inside(network: Making) -> None:
    a, b = network(hosts=2).hosts
    code = """if True:
        import socket, sys
        server = socket.create_server((sys.argv[1], 0))
        print(server.getsockname()[1], flush=True)
        print(server.accept()[1][0], flush=True)
    """
    with b.popen(
        [sys.executable, "-c", code, b.address], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        connect = f"import socket; socket.create_connection(('{b.address}', {port}))"
        a.run([sys.executable, "-c", connect], check=True)
        assert server.stdout.readline().strip() == a.address
        assert server.wait(LONG_S) == 0
    with pytest.raises(FileNotFoundError):
        a.popen(["no-such-program"])


def test_loopback_is_up_and_not_shared(network: Making) -> None:
    a, b = network(hosts=2).hosts
    with ExitStack() as stack:
        with a.inside():
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.enter_context(socket.create_connection(server.getsockname(), timeout=LONG_S))
        with b.inside(), pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.getsockname(), timeout=LONG_S)


def test_only_the_thread_that_enters_is_inside(network: Making) -> None:
    (a,) = network(hosts=1).hosts

    def here() -> str:
        return os.readlink("/proc/thread-self/ns/net")

    seen: list[str] = []
    before, entered, looked = here(), threading.Event(), threading.Event()

    def look() -> None:
        entered.wait(LONG_S)
        seen.append(here())
        looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    with pytest.raises(RuntimeError, match="on the way"), a.inside():
        seen.append(here())
        entered.set()
        looked.wait(LONG_S)
        raise RuntimeError("on the way")
    thread.join()
    inside, beside = seen
    assert inside != before and beside == before and here() == before


def test_a_cut_is_silent_and_the_same_connection_goes_on_when_it_is_healed(
    network: Making,
) -> None:
    net = network(hosts=3)
    a, b, c = net.hosts
    with connected(a, b) as (mine, theirs), connected(a, c) as (to_c, at_c):
        net.cut(a, b)
        mine.sendall(b"ping")
        theirs.sendall(b"pong")
        for end in (mine, theirs):
            end.settimeout(SOON_S)
            with pytest.raises(TimeoutError):
                end.recv(4)
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        with a.inside(), pytest.raises(TimeoutError):  # nobody listens there, and nobody says so
            socket.create_connection((b.address, 1), timeout=SOON_S)
        to_c.sendall(b"ping")
        assert at_c.recv(4) == b"ping"
        net.heal(a, b)
        with a.inside(), pytest.raises(ConnectionRefusedError):
            socket.create_connection((b.address, 1), timeout=LONG_S)
        for end, word in ((mine, b"pong"), (theirs, b"ping")):
            end.settimeout(LONG_S)
            assert end.recv(4) == word


def test_a_cut_can_be_one_way(network: Making) -> None:
    net = network(hosts=2)
    a, b = net.hosts
    with listening(a, b) as (at_a, at_b):
        net.cut(a, b, one_way=True)
        assert not arrives(at_a, at_b, SOON_S)
        assert arrives(at_b, at_a)
        net.cut(a, b)  # the other way too, now
        net.cut(a, b)
        assert not arrives(at_b, at_a, SOON_S)
        net.heal(a, b)
        net.heal(a, b)
        assert arrives(at_a, at_b) and arrives(at_b, at_a)


def test_an_isolated_host_reaches_nobody_and_rejoins(network: Making) -> None:
    net = network(hosts=3, with_root=True)
    a, b, c = net.hosts
    with listening(a, b, c, net.root) as (at_a, at_b, at_c, at_root):
        net.cut(a, b, one_way=True)
        net.isolate(b)
        for other in (at_a, at_c, at_root):
            assert not arrives(at_b, other, SOON_S / 5)
            assert not arrives(other, at_b, SOON_S / 5)
        assert arrives(at_a, at_c) and arrives(at_root, at_a)
        net.rejoin(b)
        for other in (at_a, at_c, at_root):
            assert arrives(at_b, other) and arrives(other, at_b)


def test_root_takes_part_and_can_be_cut(network: Making) -> None:
    net = network(hosts=2, with_root=True)
    a, _ = net.hosts
    assert net.root_address == net.root.address
    with socket.create_server((net.root_address, 0)) as server, a.inside():
        socket.create_connection(server.getsockname(), timeout=LONG_S).close()
    with listening(net.root, a) as (at_root, at_a):
        net.cut(net.root, a, one_way=True)
        assert not arrives(at_root, at_a, SOON_S)
        assert arrives(at_a, at_root)
    for refused in (net.root.kill, net.root.pids):
        with pytest.raises(ValueError, match="not ours to kill"):
            refused()
    left = net.root.popen(["sleep", "1000"])
    net.close()
    assert left.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match="with_root=True"):
        _ = network().root


@pytest.mark.parametrize("whose", ["everyone", "the sender", "the receiver"])
def test_a_limit_limits(network: Making, whose: str) -> None:
    net = network(hosts=2)
    a, b = net.hosts
    {"everyone": net, "the sender": a, "the receiver": b}[whose].limit(mbit=50)
    size_bytes = 4_000_000
    with connected(a, b) as (mine, theirs):
        sending = threading.Thread(target=mine.sendall, args=(bytes(size_bytes),))
        start = time.monotonic()
        sending.start()
        got = 0
        while got < size_bytes:
            got += len(theirs.recv(1 << 20))
        took_s = time.monotonic() - start
        sending.join()
    assert took_s > size_bytes * 8 / 50e6 / 2
    net.limit(None)
    shapers = a.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout
    assert "tbf" not in shapers
    with listening(a, b) as (at_a, at_b):
        assert arrives(at_a, at_b)


def test_a_host_is_killed_whole(network: Making) -> None:
    a, b = network(hosts=2).hosts
    spared = a.popen(["sleep", "1000"])
    family = b.popen(
        ["sh", "-c", "trap '' TERM HUP; setsid sleep 1000 & sleep 1000 & echo; wait"],
        stdout=subprocess.PIPE,
    )
    assert family.stdout is not None
    with family.stdout:
        family.stdout.readline()
        pids = b.pids()
        assert family.pid in pids and len(pids) == 3
        listed = subprocess.run(
            ["ip", "netns", "pids", str(b.namespace)], capture_output=True, text=True
        )
        assert sorted(map(int, listed.stdout.split())) == sorted(pids)
        b.kill()
        assert family.stdout.read() == b"", "whoever had the other end is dead"
    assert b.pids() == [] and family.returncode == -signal.SIGKILL
    assert a.pids() == [spared.pid] and spared.poll() is None
    again = b.popen(["sleep", "1000"])
    assert b.pids() == [again.pid]
    with b.inside():
        b.kill()  # not us
    assert b.pids() == []


def test_networks_stand_side_by_side(network: Making) -> None:
    nets = [network(hosts=2, with_root=True) for _ in range(3)]
    assert len({net.root_address for net in nets}) == len(links()) == 3
    for net in nets:
        with connected(net.root, net.hosts[0]) as (mine, theirs):
            mine.sendall(b"hello")
            assert theirs.recv(5) == b"hello"
    with pytest.raises(ValueError, match="two different hosts of this network"):
        nets[0].cut(nets[0].hosts[0], nets[1].hosts[0])
    with pytest.raises(ValueError, match="two different hosts of this network"):
        nets[0].heal(nets[0].root, nets[0].root)
    with pytest.raises(ValueError, match="more than 0 mbit"):
        nets[0].limit(0)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_however_the_block_ends(
    network: Making, error: type[BaseException] | None
) -> None:
    with ExitStack() as stack:
        if error:
            stack.enter_context(pytest.raises(error))
        with Network(hosts=2, with_root=True) as net:
            assert len(names()) == 3 and len(links()) == 1
            sleeper = net.hosts[0].popen(["sleep", "1000"])
            net.isolate(net.hosts[0])
            net.limit(mbit=100)
            if error:
                raise error
    assert names() == [] and links() == set()
    assert sleeper.returncode == -signal.SIGKILL


def test_nothing_is_left_of_a_network_that_could_not_be_made(
    network: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nonsense(mbit: float) -> str:
        return "nonsense"

    monkeypatch.setattr(namespaces, "_bucket", nonsense)
    with pytest.raises(NetworkRefused, match="qdisc replace dev eth0 root nonsense"):
        network(hosts=1).limit(1)

    def interrupt(*_: object) -> Iterator[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(namespaces, "_settling", interrupt)
    before = names()
    with pytest.raises(KeyboardInterrupt), Network(hosts=2, with_root=True):
        pass
    assert names() == before and links() == set()


LIVES = """if True:
    import ctypes, subprocess, sys, time
    from manyhands.testing.namespaces import Network
    if sys.argv[1] == "mounts of its own":
        assert ctypes.CDLL(None).unshare(0x20000) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    with Network(hosts=2, with_root=True) as net:
        sleeper = net.hosts[0].popen(["sleep", "1000"], stdout=sys.stdout)
        print(net.hosts[0].path, sleeper.pid, net.root.device, flush=True)
        time.sleep(1000)
"""


@contextmanager
def living(mounts: str = "our mounts") -> Generator[tuple[subprocess.Popen[str], Path, Path, str]]:
    """A process that is inside its network: it, a namespace, a process there, root's link."""
    with subprocess.Popen(
        [sys.executable, "-c", LIVES, mounts],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout is not None
        try:
            namespace, sleeper, link = process.stdout.readline().split()
            yield process, Path(namespace), Path(f"/proc/{sleeper}"), link
        finally:
            process.kill()


def test_ctrl_c_leaves_nothing(network: Making) -> None:
    with living() as (process, namespace, sleeper, link):
        assert namespace.exists() and link in {name for _, name in socket.if_nameindex()}
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LONG_S) != 0
        assert not namespace.exists() and not sleeper.exists()
        assert link not in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize("mounts", ["our mounts", "mounts of its own"])
def test_what_the_killed_have_left_is_removed_by_the_next_network(
    network: Making, mounts: str
) -> None:
    with living(mounts) as (process, namespace, sleeper, link):
        network()
        assert namespace.exists() and sleeper.exists(), "its maker lives"
        process.kill()
        process.wait(LONG_S)
        network()
        assert not namespace.exists()
        deadline = time.monotonic() + LONG_S  # the kernel takes its time with these two
        while link in {name for _, name in socket.if_nameindex()} or running(sleeper):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def running(process: Path) -> bool:
    """And not merely waiting to be reaped, by whoever has to."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_ends_takes_no_network_with_it(network: Making) -> None:
    net = network(hosts=1)
    pid = os.fork()
    if pid == 0:
        net.close()
        os._exit(0)
    os.waitpid(pid, 0)
    net.hosts[0].run(["true"], check=True)
    assert len(names()) == 2


def test_networks_say_why_they_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not.__wrapped__  # the answer is remembered, and these are not for others
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert reason() == "network namespaces need root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    installed: dict[str, str] = {}
    monkeypatch.setattr(shutil, "which", installed.get)
    assert reason() == "ip and tc not found: install iproute2"
    installed.update(ip="/sbin/ip", tc="/sbin/tc")

    def refuse(self: Network) -> None:
        raise NetworkRefused("Operation not permitted")

    monkeypatch.setattr(Network, "__enter__", refuse)
    assert reason() == "this machine refuses network namespaces: Operation not permitted"


@pytest.mark.parametrize("hosts", [0, 251])
def test_a_network_has_a_sensible_number_of_hosts(hosts: int) -> None:
    with pytest.raises(ValueError, match="1 to 250 hosts"):
        Network(hosts=hosts)
