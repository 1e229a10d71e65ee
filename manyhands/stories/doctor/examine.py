# SPDX-License-Identifier: Apache-2.0
"""`manyhands doctor`: looks at this host, and at others and the ways between them, as a run would.

Hosts join as they join a run, over ssh or by themselves; each then has a probe (probe.py), which
is asked about its host and meets the others as workers do, two hosts at a time. What they say is
judged in checks.py.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import zmq

from manyhands.launch.hosts.join_protocol import ProbeAnswer, ProbeQuestion
from manyhands.launch.hosts.join_server import HostCame, HostGone, HostSaid, JoinedHost, JoinServer
from manyhands.launch.hosts.joined_hosts import Listening, differs
from manyhands.launch.hosts.probe_process import Probe
from manyhands.launch.hosts.requested_hosts import parse_hosts, understand
from manyhands.launch.hosts.ssh import SshHost
from manyhands.stories.doctor import checks, questions
from manyhands.stories.doctor.checks import Check, Diagnosis
from manyhands.values.bounded_types import NotUnderstood
from manyhands.values.credentials import new_secret
from manyhands.values.errors import RequestError
from manyhands.values.run_options import SSH, DoctorRequest
from manyhands.values.worker_status import Link
from manyhands.values.world import World, opponents

LOOK_S = 90.0
"""A probe first imports torch, from a cold and distant disk perhaps."""
ANSWER_S = 30.0
CLOCK_ASKS = 5
HERE = "this host"

F = TypeVar("F", bound=questions.ProbeFinding)
Tell = Callable[[Check | str], None]


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of a question."""

    finding: questions.ProbeFinding | None = None
    error: str = ""
    sent: float = 0.0
    received: float = 0.0
    """By the driver's clock."""


class Rounds:
    """Asks the probes of all hosts, each one question at a time. "" is this host."""

    def __init__(self, server: JoinServer | None) -> None:
        self.server, self.here = server, Probe()
        self.guests: dict[str, JoinedHost] = {}
        self.gone: dict[str, str] = {}
        self._heard: dict[str, Heard] = {}
        self._asked: dict[str, float] = {}
        self._number = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.here.fileno(), selectors.EVENT_READ)
        if server is not None:
            self._selector.register(server.event, selectors.EVENT_READ)

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._selector.close()
        self.here.close()

    def listen(self, seconds: float) -> None:
        """To whatever comes within that time."""
        for key, _ in self._selector.select(seconds):
            if key.fd == self.here.fileno():
                for line in self.here.lines():
                    self._hear("", line)
                if self.here.ended is not None:
                    self._selector.unregister(self.here.fileno())
                    self._fail("", self.here.ended)
        for happening in self.server.happened() if self.server is not None else []:
            match happening:
                case HostCame(guest=guest):
                    self.guests[guest.key] = guest
                case HostGone(key=key, because=because):
                    self.guests.pop(key, None)
                    self.gone[key] = because
                    self._fail(key, because)
                case HostSaid(key=key, message=ProbeAnswer(line=line, ended=ended)):
                    self._fail(key, ended) if ended else self._hear(key, line)
                case _:
                    pass

    def ask(
        self, asked: Mapping[str, questions.Question], patience_s: float = ANSWER_S
    ) -> dict[str, Heard]:
        self._heard, self._asked = {}, {}
        self._number += 1
        for key, question in asked.items():
            self._asked[key] = time.time()
            line = questions.encode(questions.Asked(self._number, question))
            if key == "":
                self.here.tell(line)
                if self.here.ended is not None:
                    self._fail("", self.here.ended)
            elif self.server is not None:
                self.server.send(key, ProbeQuestion(line))
                if key in self.gone:
                    self._fail(key, self.gone[key])
        deadline = time.monotonic() + patience_s
        while len(self._heard) < len(asked) and (left := deadline - time.monotonic()) > 0:
            self.listen(left)
        silence = Heard(error=f"it has not answered within {patience_s:.0f} s")
        return {key: self._heard.get(key, silence) for key in asked}

    def _hear(self, key: str, line: bytes) -> None:
        try:
            answer = questions.decode_answered(line)
        except NotUnderstood as error:
            self._fail(key, f"it does not speak our language: {error}")
            return
        if key in self._asked and answer.number == self._number:
            self._heard[key] = Heard(answer.finding, "", self._asked[key], time.time())

    def _fail(self, key: str, error: str) -> None:
        if key in self._asked:
            self._heard[key] = Heard(error=error)


def examine(asked: DoctorRequest, *, say: Tell) -> Diagnosis:
    """Everything that would stop or slow a run here, or on these hosts. `say` hears it at once."""
    checks: list[Check] = []

    def note(*found: Check) -> None:
        for check in found:
            checks.append(check)
            say(check)

    marker = _marker(asked.folder, note)
    try:
        if not asked.asks_for_hosts:
            with Rounds(None) as rounds:
                _look_here(rounds, "127.0.0.1", marker, note)
            return Diagnosis(1, checks, [])
        return _Examination(asked, marker, note, say).run(checks)
    finally:
        marker.unlink(missing_ok=True)


def _marker(folder: Path, note: Callable[[Check], None]) -> Path:
    """A file by which hosts see that they see the same folder."""
    marker = folder.absolute() / f".manyhands-doctor-{os.getpid()}-{time.time_ns():x}"
    try:
        marker.touch()
        note(Check("ok", HERE, f"{folder} can be written to"))
    except OSError as error:
        why = error.strerror or error
        text = f"{folder} cannot be written to ({why}): runs need a folder. Give --folder."
        note(Check("wrong", HERE, text))
    return marker


def _look_here(
    rounds: Rounds, address: str, marker: Path, note: Callable[..., None]
) -> questions.HostFacts | None:
    heard = rounds.ask({"": questions.Look(address, str(marker))}, LOOK_S)[""]
    facts = _as(questions.HostFacts, heard)
    if facts is None:
        note(Check("wrong", HERE, f"workers cannot be started: {heard.error}"))
        return None
    versions = f"Python {facts.python}, torch {facts.torch}, manyhands {facts.manyhands}"
    note(Check("ok", HERE, versions), *checks.machine_checks(HERE, facts))
    return facts


class _Examination:
    """Of several hosts."""

    def __init__(
        self, asked: DoctorRequest, marker: Path, note: Callable[..., None], say: Tell
    ) -> None:
        self.asked, self.folder, self.marker = asked, asked.folder, marker
        self.note, self.say = note, say
        self.facts: dict[str, questions.HostFacts] = {}
        self.names: dict[str, str] = {"": socket.gethostname()}

    def run(self, checks: list[Check]) -> Diagnosis:
        self._resolve()
        listening, others = understand(self.asked)
        try:
            server = JoinServer(listening.key, listening.addresses, listening.port)
        except zmq.ZMQError as error:
            where = f"{listening.addresses[0]}:{listening.port}"
            self.note(Check("wrong", HERE, f"cannot listen at {where}: {error}"))
            return Diagnosis(1, checks, [])
        there = replace(listening, port=server.port)
        starters = [SshHost(there, self.asked.ssh or SSH, name, slots) for name, slots in others]
        try:
            with Rounds(server) as rounds:
                self.rounds = rounds
                mine = _look_here(rounds, listening.shown, self.marker, self.note)
                if mine is None:
                    return Diagnosis(1, checks, [])
                self.facts[""] = mine
                self._gather(starters, there)
                self._look()
                self._compare_clocks()
                self._reach_the_driver(listening)
                taking_part = [key for key in self.facts if key or listening.here != 0]
                return Diagnosis(len(taking_part), checks, self._between(taking_part))
        finally:
            server.close("the doctor has seen enough")
            for starter in starters:
                starter.close()

    def _resolve(self) -> None:
        """Names as this host knows them; ssh may know more."""
        for name, _ in parse_hosts(self.asked.hosts) if self.asked.hosts else []:
            bare = name.rpartition("@")[2]
            try:
                found = {info[4][0] for info in socket.getaddrinfo(bare, None)}
                self.note(Check("ok", bare, f"is {', '.join(sorted(map(str, found)))}"))
            except OSError as error:
                text = f"its name is not known here: {error.strerror or error}"
                self.note(Check("warning", bare, f"{text}. ssh may know it."))

    # ---- who comes

    def _gather(self, starters: Sequence[SshHost], there: Listening) -> None:
        """Wait for the hosts that were named, or for as many as were said to join."""
        waited = {starter.host.rpartition("@")[2]: starter for starter in starters}
        patience_s = self.asked.patience
        count = len(starters) if starters else self.asked.expect
        if not starters:
            command = f"manyhands worker --join {there.shown}:{there.port} --token-file FILE"
            self.say(f"waiting for {count} to join: {command}")
        deadline = time.monotonic() + patience_s
        while len(self.rounds.guests) + len(self.rounds.gone) < count and (
            (left := deadline - time.monotonic()) > 0
        ):
            self.rounds.listen(min(left, 0.2))
            here = {guest.here.name for guest in self.rounds.guests.values()}
            for name in [name for name in waited if name not in here]:
                try:
                    waited[name].check()
                except RequestError as error:
                    del waited[name]
                    count -= 1
                    self.note(Check("wrong", name, str(error)))
        if self.rounds.server is not None and (text := self.rounds.server.refusals.words()):
            self.note(Check("warning", HERE, f"{text}. Give all hosts the same token file."))
        came = {guest.here.name for guest in self.rounds.guests.values()}
        where = f"{there.shown}:{there.port}"
        for name in [name for name in waited if name not in came]:
            text = f"was started and has not joined within {patience_s:.0f} s. Can it reach {where}"
            self.note(Check("wrong", name, f"{text} (TCP)?"))
        if not starters and len(came) < count:
            text = f"{len(came)} of {count} hosts have joined at {where} within {patience_s:.0f} s"
            self.note(Check("wrong", HERE, f"{text}. Can the others reach it (TCP)?"))

    def _look(self) -> None:
        """At every host that has come and can take part."""
        guests = dict(sorted(self.rounds.guests.items(), key=lambda item: item[1].here.name))
        for key, guest in guests.items():
            here, name = guest.here, guest.here.name
            taken = name in self.names.values()
            self.names[key] = f"{name} ({here.address})" if taken else name
            room = f"room for {here.slots} worker{'s' * (here.slots != 1)}"
            self.note(Check("ok", self.names[key], f"has joined from {here.address}, with {room}"))
            problem = differs(here.version, here.torch, here.python, here.messages)
            if problem is not None:
                del self.rounds.guests[key]
                self.note(Check("wrong", self.names[key], problem))
        looks = {
            key: questions.Look(guest.here.address, str(self.marker))
            for key, guest in guests.items()
            if key in self.rounds.guests
        }
        for key, heard in self.rounds.ask(looks, LOOK_S).items():
            name, slots = self.names[key], guests[key].here.slots
            if (facts := _as(questions.HostFacts, heard)) is None:
                text = f"workers cannot be started there: {heard.error}"
                self.note(Check("wrong", name, text))
                continue
            self.facts[key] = facts
            self.note(*checks.version_checks(name, self.facts[""], facts))
            self.note(*checks.machine_checks(name, facts, slots))
            self.note(checks.folder_check(name, str(self.folder.absolute()), sees=facts.sees))

    def _compare_clocks(self) -> None:
        best: dict[str, tuple[float, float]] = {}
        for _ in range(CLOCK_ASKS):
            keys = [key for key in self.facts if key]
            for key, heard in self.rounds.ask(dict.fromkeys(keys, questions.Clock())).items():
                if (told := _as(questions.Time, heard)) is not None:
                    unsure = (heard.received - heard.sent) / 2
                    ahead = told.seconds - (heard.received + heard.sent) / 2
                    best[key] = min(best.get(key, (unsure, ahead)), (unsure, ahead))
        for key, (unsure, ahead) in best.items():
            self.note(checks.clock_check(self.names[key], ahead, unsure))

    # ---- ways between them

    def _reach_the_driver(self, listening: Listening) -> None:
        """Workers of other hosts speak to the supervisor, on a port of its own."""
        where = listening.addresses[0]
        family = socket.AF_INET6 if ":" in where else socket.AF_INET
        with socket.create_server((where, 0), family=family) as listener:
            port = listener.getsockname()[1]
            shown = f"[{listening.shown}]" if ":" in listening.shown else listening.shown
            address = f"{shown}:{port}"
            keys = [key for key in self.facts if key]
            heard = self.rounds.ask(dict.fromkeys(keys, questions.Dial(address)))
        for key, answer in heard.items():
            if error := _dialled(answer):
                driver, ports = self.names[""], self.facts[""].ports
                self.note(checks.unreached(self.names[key], driver, address, error, ports))

    def _between(self, keys: Sequence[str]) -> list[Link]:
        """Every host meets every other; in a round, each meets one at the most."""
        keys = [key for key in keys if self.facts[key].listener]
        if len(keys) < 2:
            return []
        table = [opponents(World(rank, len(keys))) for rank in range(len(keys))]
        secret, links = new_secret(), list[Link]()
        for turn in range(len(table[0])):
            partner: dict[str, str] = {}
            for rank, key in enumerate(keys):
                if (other := table[rank][turn]) is not None:
                    partner[key] = keys[other]
            links += self._meet(partner, keys, turn + 1, secret)
        return links

    def _meet(
        self, partner: Mapping[str, str], keys: Sequence[str], generation: int, secret: bytes
    ) -> list[Link]:
        dials = {key: questions.Dial(self.facts[other].listener) for key, other in partner.items()}
        failed: set[str] = set()
        for key, heard in self.rounds.ask(dials).items():
            if error := _dialled(heard):
                other = partner[key]
                failed |= {key, other}
                facts = self.facts[other]
                names = self.names[key], self.names[other]
                self.note(checks.unreached(*names, facts.listener, error, facts.ports))
        meetings: dict[str, questions.Question] = {}
        for key, other in partner.items():
            if key not in failed:
                first, second = sorted((key, other), key=keys.index)
                peer_addresses = self.facts[first].listener, self.facts[second].listener
                meetings[key] = questions.Meet(
                    int(key == second), peer_addresses, generation, secret
                )
        links: list[Link] = []
        for key, heard in self.rounds.ask(meetings).items():
            if keys.index(key) < keys.index(partner[key]):
                links += self._measured(self.names[key], self.names[partner[key]], heard)
        return links

    def _measured(self, one: str, other: str, heard: Heard) -> list[Link]:
        met = _as(questions.Met, heard)
        if met is None or met.error:
            text = f"cannot meet: {met.error if met else heard.error}"
            self.note(Check("wrong", f"{one} – {other}", text))
            return []
        link = Link(one, other, met.round_trip_s, met.bytes_per_s)
        self.note(checks.link_check(link))
        return [link]


def _as(kind: type[F], heard: Heard) -> F | None:
    return heard.finding if isinstance(heard.finding, kind) else None


def _dialled(heard: Heard) -> str:
    """Why it could not be; empty: it could."""
    found = _as(questions.Dialled, heard)
    return heard.error if found is None else found.error
