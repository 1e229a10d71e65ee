# SPDX-License-Identifier: Apache-2.0
"""Ray brings hosts: room is reserved in placement groups, and in it host daemons run, as actors.

A group is placed as a whole or not at all: one for the least workers that are wanted, further ones
as there is room. One daemon takes all bundles that a group has on a node (so that its workers share
their memory), or just one where workers want GPUs, because Ray shows an actor the GPUs of its own
bundle only. A host daemon that dies is given up at once, before its lease ends; when its bundles
are there again, on the same node or where Ray has moved them, another takes its place.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from manyhands.launch.engines.launcher import WORKER, HostNews
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.launch.hosts.host_daemon import Offer, serve
from manyhands.launch.hosts.joined_hosts import Listening
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.launch.ray.ray_resources import (
    Resources,
    actor_options,
    missing,
    parse_resources,
    times,
)
from manyhands.launch.ray.ray_session import Session, address_of
from manyhands.values.errors import RequestError
from manyhands.values.run_options import Where

LOOK_S = 1.0
PLACE_S = 60.0
"""How long a gang may take to be placed (a cluster may have to start machines)."""
EXTRA_S = 3.0
"""How long others may take, whose room was seen to be free."""
JOIN_S = 60.0
LEAVE_S = 3.0
IDLE_S = 30.0
"""Before what is not wanted any more is given back."""
REST_S = 2.0
"""Before a bundle is used again whose daemon has died."""
TOLD_TO_GO = 130
FAILURES = 5
"""daemons that may fail one after the other before any has joined."""


class DaemonActor:
    """The actor: a host daemon on a node of Ray's."""

    def serve(self, offer: Offer) -> int:
        return serve(offer)


@dataclass(slots=True, eq=False)
class _Daemon:
    name: str
    actor: Any
    ended: Any
    """Ray's promise of its exit code."""
    slots: int


@dataclass(slots=True, eq=False)
class _Group:
    """A placement group, and who is in its bundles."""

    handle: Any
    size: int
    since: float
    gang: bool
    bundles: dict[int, _Daemon] = field(default_factory=dict[int, _Daemon])
    placed: bool = False
    resting: float = 0.0
    """Until then nobody new moves in."""
    busy: float = 0.0
    """When it was last seen that it is needed."""


class RayHosts:
    """A Provider: keeps as many slots on Ray's nodes as are wanted."""

    def __init__(
        self, launcher: ManyHosts, session: Session, each: Resources | None, *, spread: bool
    ) -> None:
        """`each` is what a worker needs; None: as many CPUs as it has threads."""
        self.launcher, self.hosts = launcher, launcher.hosts
        self.session, self.ray = session, session.ray
        self.given, self.each = each, each or {"CPU": 1.0}
        self.strategy = "SPREAD" if spread else "PACK"
        self.groups: list[_Group] = []
        self.most = 0
        self.requested = False
        """The autoscaler was asked for more."""
        self.try_next = 0
        """How many bundles at most the next group should have, after one that did not fit."""
        self.hired = self.failures = 0
        self.told: list[HostNews] = []
        self.trouble = ""
        self.changing = threading.Lock()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._tend, name="ray hosts", daemon=True)
        self.thread.start()
        if not session.asks_for_a_token:
            self._tell(
                "asks nobody for a token: who can reach it can run code on it, and read what it is "
                "given. See docs/ray.md."
            )

    # ---- for the launcher

    def room(self) -> int:
        """Cores for further workers."""
        return times(self.each, self.ray.available_resources()) * max(1, int(self._cpus))

    @property
    def _cpus(self) -> float:
        return self.each.get("CPU", 0.0)

    def reserve(self, least: int, most: int, threads: int) -> None:
        with self.changing:
            if self.given is None and not self.groups:
                self.each = {"CPU": float(threads)}
            self.most = most
            short = least - sum(group.size for group in self.groups)
            gang = self._open(short, gang=True) if short > 0 else None
        if least:
            self._wait(gang, least)
        self._request(most if most > least else 0)

    def news(self) -> list[HostNews]:
        told = list(self.told)
        del self.told[: len(told)]
        return told

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self._request(0)
        daemons = {daemon for group in self.groups for daemon in group.bundles.values()}
        with suppress(Exception):  # Ray may be gone; so is all that it was to give back then
            ended = [daemon.ended for daemon in daemons]
            if ended:
                self.ray.wait(ended, num_returns=len(ended), timeout=LEAVE_S)
            for daemon in daemons:
                self.ray.kill(daemon.actor)
            for group in self.groups:
                self.ray.util.remove_placement_group(group.handle)
        self.groups.clear()
        self.session.close()

    # ---- the gang

    def _wait(self, gang: _Group | None, least: int) -> None:
        """Until it is placed and its daemons are here."""
        deadline = time.monotonic() + PLACE_S
        hopeless = self.session.own  # nobody is going to add machines
        while gang is not None and not gang.placed:
            there, free = self.ray.cluster_resources(), self.ray.available_resources()
            never = hopeless and missing(self.each, gang.size, there)
            if never or time.monotonic() > deadline:
                self._drop_group(gang)
                raise RequestError(self._refusal(gang.size, there, free))
            with self.changing:
                self._staff(gang)
            time.sleep(0.02)
        deadline = time.monotonic() + JOIN_S
        while self._here() < least:
            self.told += [sign for sign in self.launcher.poll() if isinstance(sign, HostNews)]
            if self.failures >= FAILURES or time.monotonic() > deadline:
                raise RequestError(
                    f"room for {self._here()} of {least} workers has joined from Ray. "
                    + (self.hosts.refusals() or self._what_may_be())
                )
            self.launcher.selector.select(0.05)

    def _what_may_be(self) -> str:
        where = f"{self.hosts.listening.shown}:{self.hosts.server.port}"
        why = f" The last host daemon ended so: {self.trouble}" if self.trouble else ""
        return f"Have its nodes manyhands, and do they reach {where}?{why}"

    def _here(self) -> int:
        return sum(host.guest.here.slots for host in self.hosts.others.values())

    def _refusal(self, workers: int, there: Mapping[str, float], free: Mapping[str, float]) -> str:
        short = missing(self.each, workers, free) or missing(self.each, workers, there)
        what = "; ".join(
            f"{workers} workers ask for {workers * need:g} {name}, the cluster has "
            f"{there.get(name, 0):g}, of which {free.get(name, 0):g} are free"
            for name, need in short.items()
        )
        what = what or f"no node has room for a worker ({_shown(self.each)})"
        return (
            f"Ray cannot place {workers} workers: {what}. Ask for fewer (--workers), for less each "
            "(--worker-resources CPU=0.5), or begin with fewer and grow (--workers 1:8)."
        )

    # ---- the thread

    def _tend(self) -> None:
        while not self.over.is_set():
            try:
                self._look()
            except Exception as error:  # Ray's head may be gone for a while, or for good
                if self.over.is_set():
                    return
                self.trouble = f"{type(error).__name__}: {error}"
                self.over.wait(LOOK_S)

    def _look(self) -> None:
        ended = [p.ended for group in self.groups for p in group.bundles.values()]
        waiting = any(len(group.bundles) < group.size for group in self.groups)
        if ended:
            done, _ = self.ray.wait(list(set(ended)), timeout=0.1 if waiting else LOOK_S)
            for one in done:
                self._ended(one)
        else:
            self.over.wait(0.05 if waiting else LOOK_S)
        with self.changing:
            for group in list(self.groups):
                self._staff(group)
            self._grow()
            self._shrink()

    def _ended(self, which: Any) -> None:
        """A host daemon is gone, and so are its workers: tell at once."""
        left = 0
        try:
            left = self.ray.get(which)
            why = f"its host daemon left (exit code {left})"
        except Exception as error:
            why = f"Ray says that its host daemon died: {_first_sentence(error)}"
        self.trouble = why
        for group in self.groups:
            gone = {i: p for i, p in group.bundles.items() if p.ended == which}
            for index, daemon in gone.items():
                del group.bundles[index]
                group.resting = time.monotonic() + REST_S
                known = self._give_up(daemon.name, why) or left == TOLD_TO_GO
                self.failures = 0 if known else self.failures + 1

    def _give_up(self, name: str, why: str) -> bool:
        """False: it never joined, or has said goodbye."""
        server = self.hosts.server
        keys = [key for key, guest in list(server.guests.items()) if guest.here.name == name]
        for key in keys:
            server.drop(key, why)
        return bool(keys)

    def _staff(self, group: _Group) -> None:
        """daemons for bundles that are placed and have none."""
        empty = [i for i in range(group.size) if i not in group.bundles]
        now = time.monotonic()
        if not empty or now < group.resting or self.failures >= FAILURES:
            return
        table = self.ray.util.placement_group_table(group.handle)
        if table.get("state") != "CREATED":
            if not group.gang and not group.placed and now - group.since > EXTRA_S:
                self.try_next = group.size // 2
                self._drop_group(group)
            return
        nodes = {n["NodeID"]: n for n in self.ray.nodes() if n["Alive"]}
        by_node: dict[str, list[int]] = {}
        for index in empty:
            by_node.setdefault(table["bundles_to_node_id"][index], []).append(index)
        if not by_node.keys() <= nodes.keys():  # Ray is about to move what was there
            return
        for node, indices in by_node.items():
            alone = self.each.get("GPU", 0) > 0
            for mine in [[i] for i in indices] if alone else [indices]:
                self._hire(group, nodes[node], mine)
        group.placed = True

    def _hire(self, group: _Group, node: Mapping[str, Any], bundles: list[int]) -> None:
        self.hired += 1
        name = f"{node['NodeName']}/{self.hired}"
        listening = self.hosts.listening
        offer = Offer(
            host=listening.shown,
            port=self.hosts.server.port,
            token=listening.key.token(),
            slots=len(bundles),
            name=name,
        )
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group.handle, placement_group_bundle_index=bundles[0]
        )
        how = actor_options(self.each) | {"scheduling_strategy": place, "max_restarts": 0}
        actor = self.ray.remote(DaemonActor).options(**how).remote()
        daemon = _Daemon(name, actor, actor.serve.remote(offer), len(bundles))
        group.bundles |= dict.fromkeys(bundles, daemon)

    def _grow(self) -> None:
        """One more group, if more is wanted and there seems to be room."""
        waiting = any(not group.placed for group in self.groups)
        wanted = self.most - sum(group.size for group in self.groups)
        if wanted <= 0 or waiting or self.failures >= FAILURES:
            return
        size = min(wanted, times(self.each, self.ray.available_resources()))
        if self.try_next:
            size, self.try_next = min(size, self.try_next), 0
        if size > 0:
            self._open(size, gang=False)

    def _shrink(self) -> None:
        """Give back one group that nobody needs and nobody has used for a while."""
        now, total = time.monotonic(), sum(group.size for group in self.groups)
        hosts = list(self.hosts.others.values())
        working = {host.guest.here.name for host in hosts if host.workers}
        for group in reversed(list(self.groups)):
            daemons = set(group.bundles.values())
            if total - group.size < self.most or any(p.name in working for p in daemons):
                group.busy = now
            elif now - group.busy > IDLE_S:
                for daemon in daemons:
                    self._give_up(daemon.name, "Ray has its room back")
                    self.ray.kill(daemon.actor)
                self._drop_group(group)
                return

    def _open(self, size: int, *, gang: bool) -> _Group:
        handle = self.ray.util.placement_group([dict(self.each)] * size, strategy=self.strategy)
        group = _Group(handle, size, time.monotonic(), gang, busy=time.monotonic())
        self.groups.append(group)
        return group

    def _drop_group(self, group: _Group) -> None:
        with suppress(ValueError):
            self.groups.remove(group)
        self.ray.util.remove_placement_group(group.handle)

    def _request(self, workers: int) -> None:
        """Tell Ray's autoscaler what we could use. It keeps that until it is told otherwise."""
        if not workers and not self.requested:
            return
        self.requested = bool(workers)
        with suppress(Exception):  # a wish, no more
            bundles = [dict(self.each)] * workers
            self.ray.autoscaler.sdk.request_resources(bundles=bundles)

    def _tell(self, what: str) -> None:
        self.told.append(HostNews("ray", what))


def open_on_ray(where: Where) -> ManyHosts:
    """A launcher whose hosts are brought by Ray. The driver's own host takes no workers."""
    if where.asks_for_hosts:
        raise RequestError("--hosts and --listen are for local processes; Ray brings its own.")
    each = parse_resources(where.worker_resources) if where.worker_resources else None
    session = Session(address_of(where.engine), where.ray_token)
    try:
        listening = Listening([session.address], here=0)
        launcher = ManyHosts(WORKER, create_segments(), listening)
    except BaseException:
        session.close()
        raise
    launcher.hosts.ship = where.shipped
    launcher.hosts.provider = RayHosts(launcher, session, each, spread=where.spread)
    return launcher


def _first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _shown(each: Resources) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in each.items())
