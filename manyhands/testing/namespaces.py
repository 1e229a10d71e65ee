# SPDX-License-Identifier: Apache-2.0
"""Hosts made of Linux network namespaces: they can be cut off, slowed down and killed whole.

    with Network(hosts=3) as net:
        a, b, c = net.hosts
        server = b.popen([sys.executable, "server.py", b.address])
        net.cut(a, b)

Every host has a link to one bridge, which has a namespace of its own: the machine's network stays
as it is. Only the network is apart; files, process ids and the name of the machine are shared.
Needs root and iproute2, `why_not()` says what is missing; three hosts take about 0.05 s to make.
"""

import atexit
import ctypes
import functools
import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.values.errors import ManyhandsError

MOST_HOSTS = 250
NAMED = Path("/run/netns")  # where `ip netns` keeps them
SUBNETS = ("10.77", "172.29", "192.168", "198.18")  # the next where all of the former is taken
DIES_WITHIN_S = 30.0
CLONE_NEWNET = 0x40000000

_count = itertools.count()


class NetworkRefused(ManyhandsError):
    """The machine did not do what a Network needs; the message has its words."""


@dataclass(eq=False)
class Host:
    """Made by a Network, which also ends it. `net.root` is one as well, except for `kill`."""

    name: str
    address: str
    mac: str
    namespace: str | None
    """As in `ip netns list`; None is where the Network was made."""

    path: Path
    """Opened, it is the namespace."""

    device: str
    port: str
    """The other end of `device`, at the switch."""

    switch: Path
    _started: list[subprocess.Popen[Any]] = field(default_factory=list[subprocess.Popen[Any]])

    def inside(self) -> AbstractContextManager[None]:
        """This thread is in the namespace until it leaves the block.

        Sockets that it opens and processes and threads that it starts stay there.
        """
        return _entered(self.path)

    def popen(self, command: Sequence[str | Path], **popen: Any) -> subprocess.Popen[Any]:
        """Killed and reaped when the network ends, if it still runs."""
        with self.inside():  # a fork is born where its thread is, so Popen behaves as anywhere else
            process = subprocess.Popen(command, **popen)
        self._started.append(process)
        return process

    def run(self, command: Sequence[str | Path], **run: Any) -> subprocess.CompletedProcess[Any]:
        with self.inside():
            return subprocess.run(command, **run)

    def pids(self) -> list[int]:
        """Of all processes inside, whoever started them; not this one, should it be inside."""
        return _pids(self._own_namespace())

    def kill(self) -> None:
        """SIGKILL to everything inside. When it returns they are dead.

        The kernel closes their connections, so others see that they end. Not so when the power
        fails: for that, `net.isolate(host)` first. New processes can be started afterwards.
        """
        self._own_namespace()
        self.end()

    def end(self) -> None:
        """What the network does at last: kill all, but at root only what `popen` has started."""
        if self.namespace is not None:
            _kill_all(self.namespace)
        for process in self._started:
            process.kill()
            process.wait(DIES_WITHIN_S)
        self._started.clear()

    def limit(self, mbit: float | None) -> None:
        """So many megabit per second out, and as many in. None: as fast as the machine can."""
        shape = "noqueue" if mbit is None else _bucket(mbit)
        _tell(self.path, "tc", [f"qdisc replace dev {self.device} root {shape}"])
        _tell(self.switch, "tc", [f"qdisc replace dev {self.port} root {shape}"])

    def _own_namespace(self) -> str:
        if self.namespace is None:
            raise ValueError("root is the machine itself: its processes are not ours to kill")
        return self.namespace


class Network:
    """Hosts `a`, `b`, ... that reach each other. Nothing of it is left when the block ends.

    What a cut drops is dropped silently: no reset, no ICMP, connections just stall. Healing takes
    effect at once; TCP sends again when its own clock says so, which waits twice as long each time.
    A host always reaches itself.
    """

    def __init__(self, hosts: int = 2, *, with_root: bool = False) -> None:
        """With root, where this is called takes part as `net.root`, on a link like the others."""
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"a network has 1 to {MOST_HOSTS} hosts, not {hosts}")
        self.hosts: tuple[Host, ...] = ()
        self._size, self._with_root = hosts, with_root
        self._root: Host | None = None
        self._maker = os.getpid()
        self._number = next(_count)
        self._prefix = f"manyhands-{self._maker}-{self._number}-"
        self._switch = NAMED / f"{self._prefix}switch"
        self._cuts: set[tuple[Host, Host]] = set()
        self._changing = threading.Lock()
        self._held = ExitStack()

    def __enter__(self) -> "Network":
        atexit.register(self.close)  # an interrupt may strike while we clean up
        try:
            _remove_stale()
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs inside and removes everything. Once more does no harm."""
        if os.getpid() != self._maker:
            return  # a fork ends, and it is not the fork's network
        try:
            for host in self._all():
                host.end()
        finally:
            if self._root:  # the kernel removes the links inside in its own time; here it is seen
                _run(["ip", "link", "delete", self._root.device], self._root.path, forgiving=True)
            _remove([path.name for path in NAMED.glob(f"{self._prefix}*")])
            self._held.close()
            self.hosts, self._root = (), None
            atexit.unregister(self.close)

    @property
    def root(self) -> Host:
        if self._root is None:
            raise ValueError("this network has no root: make it with Network(with_root=True)")
        return self._root

    @property
    def root_address(self) -> str:
        return self.root.address

    def cut(self, a: Host, b: Host, *, one_way: bool = False) -> None:
        """Both ways, or only what `a` sends to `b`. What has left the switch still arrives."""
        self._change([(a, b)] if one_way else [(a, b), (b, a)], cut=True)

    def heal(self, a: Host, b: Host) -> None:
        """Both ways, however they were cut."""
        self._change([(a, b), (b, a)], cut=False)

    def isolate(self, host: Host) -> None:
        """Cut it from all others, root too."""
        self._change(self._pairs(host), cut=True)

    def rejoin(self, host: Host) -> None:
        """Heal it with all others, also where it was cut before it was isolated."""
        self._change(self._pairs(host), cut=False)

    def limit(self, mbit: float | None) -> None:
        """Every host's link, root's too: see `Host.limit`."""
        for host in self._all():
            host.limit(mbit)

    def _all(self) -> tuple[Host, ...]:
        return self.hosts if self._root is None else (*self.hosts, self._root)

    def _pairs(self, host: Host) -> list[tuple[Host, Host]]:
        others = [other for other in self._all() if other is not host]
        return [(host, other) for other in others] + [(other, host) for other in others]

    def _change(self, pairs: Sequence[tuple[Host, Host]], *, cut: bool) -> None:
        number = {host: n for n, host in enumerate(self._all(), 1)}
        if any(a is b or not {a, b} <= number.keys() for a, b in pairs):
            raise ValueError("cut and heal take two different hosts of this network")
        with self._changing:
            lines: list[str] = []
            todo = [pair for pair in pairs if (pair in self._cuts) != cut]
            for sender, receiver in todo:
                # Where it leaves the switch, so that the sender's kernel does not hear of the drop.
                where = f"dev {receiver.port} egress pref {number[sender]}"
                match = f"protocol all u32 match ether src {sender.mac}"
                # Not `action drop`: that is a module, act_gact, which small kernels leave out.
                drop = "action mirred egress redirect dev sink"
                lines.append(f"filter add {where} {match} {drop}" if cut else f"filter del {where}")
            _tell(self._switch, "tc", lines)
            self._cuts.symmetric_difference_update(todo)

    def _make(self) -> None:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._held.callback(os.close, home)
        here = Path(f"/proc/self/fd/{home}")
        subnet = self._held.enter_context(_reserved_subnet())
        addresses = subnet.hosts()
        self.hosts = tuple(
            self._host(name, str(address))
            for name, address in zip(_names(self._size), addresses, strict=False)
        )
        spaces = [self._switch.name, *(str(host.namespace) for host in self.hosts)]
        _tell(here, "ip", [f"netns add {space}" for space in spaces])
        _tell(self._switch, "ip", self._wiring())
        if self._with_root:
            device = f"mh{self._maker}-{self._number}"
            self._root = root = self._host("root", str(subnet[-2]), here, device)
            # Made on this side, for the other can only give it to a process's main thread.
            peer = f"peer name {root.port} netns {self._switch.name}"
            _tell(here, "ip", [f"link add {device} address {root.mac} type veth {peer}"])
        for host in self._all():
            _tell(host.path, "ip", _settling(host, self._all(), subnet.prefixlen))
        ports = [host.port for host in self._all()]
        _tell(self._switch, "ip", [f"link set {port} addrgenmode none" for port in ports])
        _tell(self._switch, "ip", [f"link set {port} master br0 up" for port in ports])
        _tell(self._switch, "tc", [f"qdisc add dev {port} clsact" for port in ports])

    def _host(
        self, name: str, address: str, path: Path | None = None, device: str = "eth0"
    ) -> Host:
        mac = ":".join(f"{byte:02x}" for byte in b"\2\0" + socket.inet_aton(address))
        namespace = None if path else self._prefix + name
        path = path or NAMED / f"{self._prefix}{name}"
        # Not just the name: to ip, `a` is short for `address`.
        return Host(name, address, mac, namespace, path, device, f"port-{name}", self._switch)

    def _wiring(self) -> Iterator[str]:
        # It does not forget who is where: what is sent to the silent would load everyone's link.
        yield "link add br0 type bridge ageing_time 8640000 mcast_snooping 0"
        yield "link set br0 addrgenmode none"
        yield "link set br0 up"
        yield "link add sink type veth peer name drain"  # who listens at the drain? nobody
        for end in ("sink", "drain"):
            yield f"link set {end} addrgenmode none"
            yield f"link set {end} up"
        for host in self.hosts:
            peer = f"peer name {host.device} address {host.mac} netns {host.namespace}"
            yield f"link add {host.port} type veth {peer}"


def _settling(host: Host, everyone: Iterable[Host], prefix: int) -> Iterator[str]:
    if host.namespace is not None:
        yield "link set lo up"
    yield f"link set {host.device} addrgenmode none"  # no IPv6, which would talk unasked
    yield f"link set {host.device} up"
    yield f"address add {host.address}/{prefix} dev {host.device}"
    for other in everyone:
        if other is not host:  # known for good: a cut is no reason to ask around, nor to give up
            to = f"{other.address} lladdr {other.mac}"
            yield f"neighbour add {to} dev {host.device} nud permanent"


def _names(count: int) -> list[str]:
    letters = string.ascii_lowercase
    return [*letters, *(x + y for x in letters for y in letters)][:count]


def _bucket(mbit: float) -> str:
    """A shaper that sends whole 64 KiB segments, and queues as shallow as a real switch's."""
    if not mbit > 0:
        raise ValueError(f"a limit is more than 0 mbit, got {mbit}; None takes it away")
    rate = int(mbit * 1e6)
    return f"tbf rate {rate}bit burst {max(80_000, rate // 8 // 500)} latency 20ms"


@contextmanager
def _reserved_subnet() -> Generator[ipaddress.IPv4Network]:
    """One that neither the machine nor another Network on it uses."""
    told = json.loads(_run(["ip", "-json", "-4", "route", "show", "table", "all"]))
    routes = [ipaddress.IPv4Network(r["dst"]) for r in told if r["dst"] != "default"]
    with socket.socket(socket.AF_UNIX) as claim:
        for block, n in itertools.product(SUBNETS, range(256)):
            subnet = ipaddress.IPv4Network(f"{block}.{n}.0/24")
            if any(subnet.overlaps(route) for route in routes):
                continue
            # An abstract name is unique in this namespace, and free again when its owner is dead.
            with suppress(OSError):
                claim.bind(f"\0manyhands.testing.namespaces {subnet}")
                break
        else:
            raise NetworkRefused(f"no subnet is free in {', '.join(SUBNETS)}")
        yield subnet


@contextmanager
def _entered(namespace: Path) -> Generator[None]:
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(namespace, os.O_RDONLY)
        try:
            _enter(there)
        finally:
            os.close(there)
        yield
    finally:
        _enter(back)
        os.close(back)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):  # os.setns is Python 3.12
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")


def _tell(namespace: Path, tool: str, lines: Iterable[str]) -> None:
    """All lines to one `ip` or `tc`, and none after the first that fails."""
    _run([tool, "-batch", "-"], namespace, "".join(f"{line}\n" for line in lines))


def _run(
    command: list[str], namespace: Path | None = None, told: str = "", *, forgiving: bool = False
) -> str:
    """Its output. In a process group of its own, for Ctrl-C is meant for us."""
    with _entered(namespace) if namespace else ExitStack():
        done = subprocess.run(command, input=told, capture_output=True, text=True, process_group=0)
    if done.returncode and not forgiving:
        words = " ".join(done.stderr.split())
        failed = re.search(r"Command failed -:(\d+)", words)
        at = told.splitlines()[int(failed[1]) - 1] if failed else " ".join(command[1:])
        raise NetworkRefused(f"`{command[0]} {at}`: {words or f'exit {done.returncode}'}")
    return done.stdout


def _pids(namespace: str) -> list[int]:
    """As `ip netns pids`, but not itself, and also when the name means nothing here.

    Those whom a killed run has left may have mounts of their own: the name is looked up in theirs.
    """
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        for root in (Path("/"), process / "root"):
            with suppress(OSError):  # no such name there, or it has ended
                named = (root / NAMED.relative_to("/") / namespace).stat()
                if os.path.samestat(named, (process / "ns/net").stat()):
                    found.append(int(process.name))
                    break
    return [pid for pid in found if pid != os.getpid()]


def _kill_all(namespace: str) -> None:
    deadline = time.monotonic() + DIES_WITHIN_S
    while pids := _pids(namespace):  # again, for they may fork meanwhile
        if time.monotonic() > deadline:
            raise NetworkRefused(f"processes {pids} in {namespace} do not die of SIGKILL")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _remove_stale() -> None:
    """What networks have left whose makers were killed, with all that still runs there."""
    stale: list[str] = []
    for path in NAMED.glob("manyhands-*"):
        maker = re.match(r"manyhands-(\d+)-", path.name)
        if maker and not Path(f"/proc/{maker[1]}").exists():
            stale.append(path.name)
    for namespace in stale:
        _kill_all(namespace)
    _remove(stale)


def _remove(namespaces: Sequence[str]) -> None:
    if not namespaces:
        return
    lines = "".join(f"netns delete {namespace}\n" for namespace in namespaces)
    # Forgiving and forced: another process may be removing the same stale ones.
    _run(["ip", "-force", "-batch", "-"], told=lines, forgiving=True)
    if left := [namespace for namespace in namespaces if (NAMED / namespace).exists()]:
        raise NetworkRefused(f"`ip netns delete` did not remove {', '.join(left)}")


@functools.cache
def why_not() -> str | None:
    """Why no Network can be made here, or None. The first call makes one, to see."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with Network(hosts=2, with_root=True) as net:
            net.isolate(net.hosts[0])
            net.limit(mbit=1000)
    except (NetworkRefused, OSError) as refused:
        return f"this machine refuses network namespaces: {refused}"
    return None
