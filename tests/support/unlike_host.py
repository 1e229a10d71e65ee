"""This host, and one more whose daemon has another environment; each with room for one worker."""

import os
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from manyhands.launch.engines.memory_segments import create_segments
from manyhands.launch.hosts.joined_hosts import Listening
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.values.join_token import key_for
from tests.support.cluster import MANYHANDS


@contextmanager
def beside_another(folder: Path, **environment: str) -> Generator[ManyHosts]:
    """The other one is called "other"; it has joined."""
    token = folder / "token"
    key = key_for(token)
    entry = "tests.support.warm_worker:main"
    launcher = ManyHosts(entry, create_segments(), Listening(["127.0.0.1"], 0, key, here=1))
    join = ["--join", f"127.0.0.1:{launcher.hosts.server.port}", "--token-file", str(token)]
    with (folder / "said.txt").open("wb") as out:
        daemon = subprocess.Popen(
            [*MANYHANDS, "worker", *join, "--name", "other", "--slots", "1"],
            env={**os.environ, "TMPDIR": str(folder), **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 90
        while not launcher.hosts.others:
            assert time.monotonic() < deadline, (folder / "said.txt").read_text()
            launcher.poll()
            time.sleep(0.02)
        yield launcher
    finally:
        launcher.close()
        daemon.terminate()
        daemon.wait(30)
