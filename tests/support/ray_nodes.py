"""Ray on several hosts (network namespaces): nodes that can be started, cut off and killed."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.testing.namespaces import Host, Network

RAY = Path(sys.executable).with_name("ray")
PORT = 6379
PATIENCE_S = 60.0
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class Nodes:
    """A Ray cluster with a token; its head is on the first host."""

    def __init__(self, net: Network, folder: Path) -> None:
        self.net, self.folder, self.token = net, folder, folder / "ray-token"
        folder.mkdir(exist_ok=True)
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        self.address = f"{net.hosts[0].address}:{PORT}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self) -> dict[str, str]:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        return {**os.environ, **HEALTH, **token, "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, host: Host, cpus: int) -> None:
        head = host is self.net.hosts[0]
        where = ["--head", f"--port={PORT}"] if head else [f"--address={self.address}"]
        command = [str(RAY), "start", *where, "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={host.address}", f"--num-cpus={cpus}"]
        command += [f"--temp-dir={self.folder / host.name}", "--object-store-memory=80000000"]
        command += ["--include-dashboard=false"] if head else []
        with (self.folder / f"ray-{host.name}.txt").open("ab") as out:
            self.processes[host.name] = host.popen(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self, count: int) -> None:
        """Until so many nodes are alive."""
        code = f"""if True:
            import sys, time, ray
            from ray._raylet import GcsClient
            client = GcsClient(address={self.address!r})
            while True:
                nodes = client.get_all_node_info().values()
                if sum(n.state == 0 for n in nodes) >= {count}:
                    sys.exit(0)
                time.sleep(0.1)
        """
        host = self.net.hosts[0]
        host.run(
            [sys.executable, "-c", code], env=self.environment(), check=True, timeout=PATIENCE_S
        )

    def kill_raylet(self, host: Host) -> None:
        for pid in host.pids():
            if process_name(pid).startswith("raylet") or b"/raylet/raylet" in command_of(pid):
                os.kill(pid, 9)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def process_name(pid: int) -> str:
    return command_of(pid).replace(b"\0", b" ").decode(errors="replace").strip()


def until(what: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


class Run:
    """Of a driver on the head's host; with commands only, as people do it."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.path, self.out = nodes, folder / "run", folder / "driver.txt"
        self.driver: subprocess.Popen[bytes] | None = None
        self.seen = 0
        """Events that were waited for; the next is waited for among those that follow."""

    def train(self, task: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "manyhands", "train", str(task), "--to", str(self.path)]
        command += ["--engine", f"ray://{self.nodes.address}", *arguments]
        command += ["--ray-token-file", str(self.nodes.token)]
        with self.out.open("wb") as out:
            self.driver = self.nodes.net.hosts[0].popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        path = self.path / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in told if kind in ("", event["event"])]

    def wait_for(self, what: Callable[[dict[str, Any]], bool]) -> None:
        """The next event like this."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self.driver is not None
            ended = self.driver.poll() is not None
            for number, event in enumerate(self.events()):
                if number >= self.seen and what(event):
                    self.seen = number + 1
                    return
            assert not ended, f"it ended before that: {self.said()}"
            assert time.monotonic() < deadline, f"it did not come to that: {self.said()}"
            time.sleep(0.02)

    def step(self, number: int) -> None:
        self.wait_for(lambda e: e["event"] == "Stepped" and e["step"] >= number)

    def view_of(self, workers: int) -> None:
        self.wait_for(lambda e: e["event"] == "Viewed" and len(e["members"]) == workers)

    def joined(self) -> list[str]:
        told = [event["what"] for event in self.events("Hosted")]
        return [what for what in told if "has joined" in what]

    def finish(self) -> str:
        """Its fingerprint."""
        assert self.driver is not None
        assert self.driver.wait(PATIENCE_S) == 0, self.said()
        return json.loads((self.path / "report.json").read_text())["fingerprint"]

    def said(self) -> str:
        quiet = [f"{e}" for e in self.events() if e["event"] != "Stepped"]
        return "\n".join([self.out.read_text()[-3000:], *quiet])
