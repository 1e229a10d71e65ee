# SPDX-License-Identifier: Apache-2.0
"""From what hosts say of themselves to what a person should know: pure, one check a line.

A check is ✓, or ! when a run would work but not as it could, or ✗ when it would not work; the last
two say what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from manyhands.launch.engines.kernels_that_die import words
from manyhands.launch.hosts.joined_hosts import differs
from manyhands.stories.doctor.questions import HostFacts
from manyhands.values.worker_status import Link

FEW_FILES, TOO_FEW_FILES = 1024, 128
SMALL_SHM_BYTES = 128 << 20
LITTLE_ROOM_BYTES, NO_ROOM_BYTES = 1 << 30, 16 << 20
SLOW_LOOPBACK_S = 1e-3
CLOCKS_S = 1.0
SLOW_LINK_BYTES_PER_S, FAR_S = 12.5e6, 5e-3
"""100 Mbit/s, and what a network within a house never takes."""

Mark = Literal["ok", "warning", "wrong"]
SIGNS: dict[Mark, str] = {"ok": "✓", "warning": "!", "wrong": "✗"}


@dataclass(frozen=True, slots=True)
class Check:
    mark: Mark
    where: str
    """Which host, or which two."""
    text: str

    def __str__(self) -> str:
        return f"{SIGNS[self.mark]} {self.where}: {self.text}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    hosts: int
    checks: Sequence[Check]
    links: Sequence[Link]

    @property
    def works(self) -> bool:
        return not any(check.mark == "wrong" for check in self.checks)

    def summary(self) -> str:
        wrong, warned = (sum(c.mark == m for c in self.checks) for m in ("wrong", "warning"))
        what = f"A run on {_count(self.hosts, 'host')}"
        warnings = f" ({_count(warned, 'warning')})" if warned else ""
        if self.works:
            return f"{what} would work{warnings}."
        return f"{what} would not work: {_count(wrong, 'problem')}{warnings}."


def machine_checks(where: str, facts: HostFacts, slots: int | None = None) -> list[Check]:
    """What a host says of itself."""
    size = f"{_count(facts.cores, 'core')}, {facts.memory_bytes / 1e9:.1f} GB of memory"
    found = [Check("ok", where, size)]
    if slots is not None and slots > facts.cores:
        text = f"offers {slots} workers and has {_count(facts.cores, 'core')}: give it --slots"
        found.append(Check("warning", where, text))
    if facts.segments:
        text = f"workers cannot share memory: {facts.segments}. Is `ulimit -f` limited?"
        found.append(Check("wrong", where, text))
    found.append(_shm(where, facts.shm_bytes))
    found.append(_files(where, facts.open_files))
    if facts.bound:
        text = f"no port can be bound at {facts.bound}. Is it an address of this host? (--address)"
        found.append(Check("wrong", where, text))
    else:
        found.append(Check("ok", where, f"a port can be bound ({facts.listener})"))
    found.append(_loopback(where, facts.loopback_s))
    if facts.free_bytes >= 0:
        found.append(_disk(where, facts.free_bytes))
    if facts.zombies:
        text = (
            "process 1 does not reap orphans, as an init does: what processes leave behind piles "
            "up. docker run --init"
        )
        found.append(Check("warning", where, text))
    if facts.kernels:
        found.append(Check("warning", where, words(facts.kernels)))
    if facts.not_native:
        text = f"updates take the long way, to the same bits: {facts.not_native}"
        found.append(Check("ok", where, text))
    return found


def _disk(where: str, free: int) -> Check:
    has = f"{free / 1e6:.0f} MB are free where runs are kept"
    if free >= LITTLE_ROOM_BYTES:
        return Check("ok", where, has)
    mark: Mark = "wrong" if free < NO_ROOM_BYTES else "warning"
    return Check(mark, where, f"only {has}: checkpoints need room, or give --folder")


def _shm(where: str, size: int) -> Check:
    if size >= SMALL_SHM_BYTES:
        return Check("ok", where, f"/dev/shm has {size / 1e6:.0f} MB")
    has = "is missing" if size < 0 else f"has only {size / 1e6:.0f} MB"
    text = (
        f"/dev/shm {has}. Workers do not use it, but data sets that start processes of their own "
        "may: docker run --shm-size=1g"
    )
    return Check("warning", where, text)


def _files(where: str, limit: int) -> Check:
    if limit < 0:
        return Check("ok", where, "as many open files as are wanted")
    if limit >= FEW_FILES:
        return Check("ok", where, f"{limit} open files")
    mark: Mark = "wrong" if limit < TOO_FEW_FILES else "warning"
    return Check(mark, where, f"only {limit} open files: ulimit -n 4096")


def _loopback(where: str, seconds: float) -> Check:
    if seconds < 0:
        text = "127.0.0.1 cannot be reached, by which workers speak to their driver: ip link set lo"
        return Check("wrong", where, f"{text} up")
    took = f"{1e3 * seconds:.3f} ms there and back on loopback"
    if seconds > SLOW_LOOPBACK_S:
        return Check("warning", where, f"{took}: this host is very busy")
    return Check("ok", where, took)


def version_checks(where: str, mine: HostFacts, theirs: HostFacts) -> list[Check]:
    """A host that has other versions than the driver's."""
    if (problem := differs(theirs.manyhands, theirs.torch, theirs.python)) is not None:
        return [Check("wrong", where, problem)]
    if mine.python != theirs.python or mine.torch != theirs.torch:
        text = f"Python {theirs.python}, torch {theirs.torch}; the driver has {mine.python} and"
        return [Check("warning", where, f"{text} {mine.torch}: results may differ in last bits")]
    return [Check("ok", where, "the same Python, torch and manyhands as the driver")]


def clock_check(where: str, ahead_s: float, unsure_s: float) -> Check:
    """Runs do not depend on clocks; people who read logs do."""
    if abs(ahead_s) - unsure_s <= CLOCKS_S:
        return Check("ok", where, f"its clock is right, within {abs(ahead_s) + unsure_s:.2f} s")
    way = "ahead of" if ahead_s > 0 else "behind"
    text = f"its clock is {abs(ahead_s):.1f} s {way} the driver's: logs will mislead. Use NTP."
    return Check("warning", where, text)


def folder_check(where: str, folder: str, *, sees: bool) -> Check:
    if sees:
        return Check("ok", where, f"sees the driver's {folder}")
    text = (
        f"does not see the driver's {folder}. Its logs and checkpoints travel through the driver; "
        "data must be there too, or be given by URL."
    )
    return Check("warning", where, text)


def unreached(caller: str, called: str, address: str, error: str, ports: str) -> Check:
    """Of two hosts, one cannot open a connection to the other."""
    text = (
        f"host {called} cannot be reached at {address} from host {caller}: {error}. "
        f"Workers connect to each other: open TCP ports {ports} of {called}, or give an address "
        "that others reach (manyhands worker --address)."
    )
    return Check("wrong", f"{caller} – {called}", text)


def link_check(link: Link) -> Check:
    where = f"{link.host} – {link.other}"
    text = f"{1e3 * link.round_trip_s:.2f} ms there and back, {link.bytes_per_s / 1e6:.1f} MB/s"
    if link.bytes_per_s >= SLOW_LINK_BYTES_PER_S and link.round_trip_s <= FAR_S:
        return Check("ok", where, text)
    seconds = 2 * 4e6 / 2 / link.bytes_per_s + 2 * link.round_trip_s
    cost = f"a step of a model with 1 million weights takes {1e3 * seconds:.0f} ms for this alone"
    return Check("warning", where, f"{text}: {cost}. Larger batches have fewer steps.")


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"
