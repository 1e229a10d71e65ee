# SPDX-License-Identifier: Apache-2.0
"""Hosts that are reached by ssh, which starts the host daemon there.

The token goes in by standard input, never on a command line.
"""

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from manyhands.launch.hosts.joined_hosts import Listening
from manyhands.values.errors import RequestError


class SshHost:
    """A host daemon on another host, started over ssh."""

    def __init__(self, driver: Listening, ssh: str, host: str, slots: int | None) -> None:
        """`driver`: where it joins."""
        self.host = host
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        command = join_command(driver, host, slots)
        self.process = subprocess.Popen(
            [*shlex.split(ssh), "--", host, shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is for the driver, which then tells them to go
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(driver.key.token().text.encode())
            self.process.stdin.flush()  # it stays open: when it ends, so does the daemon

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
    command += ["--name", bare_name(name)]
    return command if slots is None else [*command, "--slots", str(slots)]


def bare_name(host: str) -> str:
    """Without the user: ssh takes user@host."""
    return host.rpartition("@")[2]
