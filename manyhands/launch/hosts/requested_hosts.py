# SPDX-License-Identifier: Apache-2.0
"""From what people write (--hosts, --listen, --token-file) to a launcher on several hosts.

Hosts that are named are reached by ssh. Others may join at any time, if they have the token.
"""

import re
from dataclasses import replace
from pathlib import Path

from manyhands.launch.engines.launcher import WORKER
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.launch.hosts.host_daemon import address_towards
from manyhands.launch.hosts.joined_hosts import Listening
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.launch.hosts.ssh import SshHost, bare_name
from manyhands.values.errors import RequestError
from manyhands.values.join_token import DriverKey, key_for
from manyhands.values.run_options import SSH, HostAccess, Where

HERE = ("here", "localhost", "127.0.0.1")
JOIN_S = 60.0


def parse_hosts(text: str) -> list[tuple[str, int | None]]:
    """ "a,b:2" → [("a", None), ("b", 2)]"""
    found: list[tuple[str, int | None]] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, colon, count = part.rpartition(":") if part.count(":") == 1 else (part, "", "")
        if colon and not count.isdigit():
            raise RequestError(f"--hosts {text}: write hosts as a,b,c, or with workers as a:2,b:4.")
        found.append((name, int(count)) if colon else (part, None))
    if not found:
        raise RequestError("--hosts names no host. Write them as a,b,c.")
    names = [name for name, _ in found]
    if odd := [name for name in names if not re.fullmatch(r"[^\s-]\S*", name)]:
        raise RequestError(f"--hosts: {odd[0]!r} is no name of a host.")
    if len(set(names)) < len(names):
        raise RequestError(f"--hosts {text} names a host twice.")
    return found


def parse_listen(text: str) -> tuple[str, int]:
    """ "10.0.0.1:7000", "10.0.0.1", ":7000" (all addresses), "[::1]:7000" → address and port"""
    bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    address, colon, port = text.rpartition(":")
    if not colon or bare_ipv6 or text.endswith("]"):
        address, port = text, "0"
    if not port.isdigit() or int(port) > 65535:
        raise RequestError(f"--listen {text}: write it as ADDRESS:PORT, ADDRESS or :PORT.")
    return address.strip("[]") or "0.0.0.0", int(port)


def understand(asked: HostAccess) -> tuple[Listening, list[tuple[str, int | None]]]:
    """Where to listen, and which hosts to start, with how many workers each."""
    named = parse_hosts(asked.hosts) if asked.hosts is not None else []
    others = [(name, slots) for name, slots in named if name not in HERE]
    here = next((slots for name, slots in named if name in HERE), None if not named else 0)
    address, port = parse_listen(asked.listen) if asked.listen is not None else ("", 0)
    if not address:
        address = address_towards(bare_name(others[0][0])) if others else "127.0.0.1"
    token = asked.token_file
    key = key_for(Path(token)) if token else DriverKey()
    return Listening([address], port, key, here), others


def open_hosts(where: Where) -> ManyHosts:
    """Listen, start the daemon on the hosts that were named, and wait until they are here."""
    listening, others = understand(where)
    launcher = ManyHosts(WORKER, create_segments(), listening)
    launcher.hosts.ship = where.shipped
    try:
        there = replace(listening, port=launcher.hosts.server.port)
        starters = [SshHost(there, where.ssh or SSH, name, slots) for name, slots in others]
        launcher.hosts.starters += starters

        def alive() -> None:
            for starter in starters:
                name = bare_name(starter.host)
                if (problem := launcher.hosts.refused.get(name)) is not None:
                    raise RequestError(f"host {name} was turned away: {problem}")
                starter.check()

        launcher.wait_for(len(others), JOIN_S, alive)
    except BaseException:
        launcher.close()
        raise
    return launcher
