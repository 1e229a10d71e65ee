# SPDX-License-Identifier: Apache-2.0
"""From what people write (--hosts, --listen, --token-file) to a cluster of hosts.

Hosts that are named are reached by ssh, which starts a porter there; the token goes in by its
standard input. Others may join at any time, if they have it.
"""

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from manyhands.launch.engines.launcher import WORKER, create_segments
from manyhands.launch.hosts.host_daemon import address_towards
from manyhands.launch.hosts.many_hosts import Listening, ManyHosts
from manyhands.values.credentials import new_secret, read_token, write_token
from manyhands.values.errors import RequestError

HERE = ("here", "localhost", "127.0.0.1")
JOIN_S = 60.0
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"


@dataclass(frozen=True, slots=True)
class Wish:
    """Hosts as they were asked for."""

    hosts: str | None = None
    """NAME[:WORKERS],...; "here" is this one."""
    listen: str | None = None
    """[ADDRESS][:PORT]"""
    token_file: Path | None = None
    ssh: str = SSH
    """The command that reaches a host; its name is added."""
    spread: bool = False
    """Ray: as many nodes as possible, not as few."""
    worker_resources: str | None = None
    """Ray: what each worker needs, as CPU=1,GPU=1,memory=2GB,NAME=1."""
    ray_token_file: Path | None = None
    """The secret of a Ray cluster."""
    ship: tuple[Path, ...] = ()
    """Files and folders that workers on other hosts find in their current directory."""

    @property
    def any(self) -> bool:
        return self.hosts is not None or self.listen is not None


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


def understand(wish: Wish) -> tuple[Listening, list[tuple[str, int | None]]]:
    """Where to listen, and which hosts to start, with how many workers each."""
    named = parse_hosts(wish.hosts) if wish.hosts is not None else []
    others = [(name, slots) for name, slots in named if name not in HERE]
    here = next((slots for name, slots in named if name in HERE), None if not named else 0)
    address, port = parse_listen(wish.listen) if wish.listen is not None else ("", 0)
    if not address:
        address = address_towards(_bare(others[0][0])) if others else "127.0.0.1"
    return Listening([address], port, _secret(wish.token_file), here), others


def open_cluster(wish: Wish) -> ManyHosts:
    """Listen, start porters on the hosts that were named, and wait until they are here."""
    listening, others = understand(wish)
    cluster = ManyHosts(WORKER, create_segments(), listening)
    try:
        there = replace(listening, port=cluster.gate.port)
        starters = [SshHost(there, wish.ssh, name, slots) for name, slots in others]
        cluster.starters += starters

        def alive() -> None:
            for starter in starters:
                starter.check()

        cluster.wait_for(len(others), JOIN_S, alive)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _secret(file: Path | None) -> bytes:
    """From the file; it is made when it is not there."""
    if file is None:
        return new_secret()
    if file.exists():
        return read_token(file)
    secret = new_secret()
    try:
        write_token(file, secret)
    except OSError as error:
        raise RequestError(f"the token file {file} cannot be written: {error}") from error
    return secret


def _bare(host: str) -> str:
    """Without the user: ssh takes user@host."""
    return host.rpartition("@")[2]


class SshHost:
    """A porter on another host, started over ssh."""

    def __init__(self, driver: Listening, ssh: str, host: str, slots: int | None) -> None:
        """`driver`: where it joins."""
        self.host = host
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        command = join_command(driver, host, slots)
        self.process = subprocess.Popen(
            [*shlex.split(ssh), host, shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is for the driver, which then tells them to go
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(driver.secret.hex().encode() + b"\n")
            self.process.stdin.flush()  # it stays open: when it ends, so does the porter

    def check(self) -> None:
        """Raises when it has ended."""
        if (code := self.process.poll()) is None:
            return
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip()[-2000:]
        raise RequestError(
            f"host {self.host} could not be started over ssh (exit code {code})."
            + (f" It said:\n{said}" if said else "")
        )

    def close(self) -> None:
        """It goes by itself when the driver says goodbye, or when its standard input ends."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
        self.errors.close()


def join_command(driver: Listening, name: str, slots: int | None) -> Sequence[str]:
    """What another host runs to join; the token comes by standard input."""
    there = f"{driver.shown}:{driver.port}"
    command = [sys.executable, "-m", "manyhands", "worker", "--join", there, "--token-file", "-"]
    command += ["--tied"]
    command += ["--name", _bare(name)]
    return command if slots is None else [*command, "--slots", str(slots)]
