"""Noise at every port of a live run: strangers, other keys, and nonsense under the right one."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import manyhands as mh
from manyhands.driver import drive as run_module
from manyhands.driver.live.command_socket import Examine, ask
from manyhands.driver.supervisor import Supervisor
from manyhands.launch.engines.fork_agent import WorkerExit, WorkerStarted
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.hosts import join_protocol
from manyhands.launch.hosts.requested_hosts import open_hosts
from manyhands.launch.wire.control_channel import Keys, SupervisorChannel
from manyhands.values.credentials import Credentials
from manyhands.values.join_token import JoinToken, read_token
from manyhands.values.messages import Beat, FromWorker, Hello, Leaving, Left, RoundPart, encode
from manyhands.values.run_folder import RunDir
from manyhands.values.run_options import Where
from tests.support.cluster import MANYHANDS
from tests.support.hostile_clients import GREETING, dealer, throw

PATIENCE_S = 60.0
SETTINGS = ["train.batch=16", "train.steps=150", "log.every_steps=1"]
TASK = """
import time, torch, manyhands as mh
from pathlib import Path
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
def loss(model, batch):
    if Path({slow!r}).exists():
        time.sleep(0.1)
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
task = mh.Task(
    model=lambda: torch.nn.Linear(8, 1),
    loss=loss,
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    data={{"x": x, "y": x.sum(1)}},
)
"""


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return found


# ---- a run


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The supervisor and the switchboard of the next run, and all that was said to it."""
    found: dict[str, Any] = {"said": []}

    def supervisor(*arguments: Any, **named: Any) -> Supervisor:
        found["supervisor"] = Supervisor(*arguments, **named)
        return found["supervisor"]

    def switchboard(address: str) -> SupervisorChannel:
        board = found["switchboard"] = SupervisorChannel(address)
        receive = board.receive

        def recorded() -> list[FromWorker]:
            messages = receive()
            found["said"] += messages
            return messages

        board.receive = recorded  # type: ignore[method-assign]
        return board

    monkeypatch.setattr(run_module, "Supervisor", supervisor)
    monkeypatch.setattr(run_module, "SupervisorChannel", switchboard)
    return found


class Driving(threading.Thread):
    """A run in a thread, whose steps are slow for as long as a file is there."""

    def __init__(self, folder: Path, launcher: Launcher, workers: int) -> None:
        super().__init__(name="driver", daemon=True)
        self.slow, self.path = folder / "slow", folder / "run"
        self.task = folder / "task.py"
        self.slow.touch()
        self.task.write_text(TASK.format(slow=str(self.slow)))
        self.launcher, self.workers = launcher, workers
        self.report: mh.Report | None = None

    def run(self) -> None:
        self.report = mh.train(
            self.task,
            to=self.path,
            workers=self.workers,
            settings=SETTINGS,
            quiet=True,
            launcher=self.launcher,
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.path / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] == kind]

    def finish(self) -> str:
        self.slow.unlink(missing_ok=True)
        self.join(PATIENCE_S)
        assert self.report is not None
        return self.report.fingerprint


def raw_noise(port: int, lots: random.Random) -> None:
    """A million bytes that mean nothing, some of which look as if they did."""
    for _ in range(250):
        throw(port, lots.choice((b"", b"manyhan1", GREETING, GREETING[:11])) + lots.randbytes(4000))
    for _ in range(5):
        other = Credentials.of(lots.randbytes(32), "join")
        with dealer(port, other.server_public, *zmq.curve_keypair()) as stranger:
            stranger.send(b"let me in", flags=zmq.NOBLOCK)


def nonsense_at_the_gate(port: int, token: JoinToken, lots: random.Random) -> None:
    """From somebody who has the token."""
    with dealer(port, token.driver, *token.pair) as insider:
        for _ in range(100):
            insider.send(lots.randbytes(lots.randrange(200)))
        for tag in ("Want", "Echo", "Here", "WorkerExit", "Nobody"):
            fields = {"type": tag, "offset": -1, "number": 1 << 63, "slots": 0, "worker": 0}
            insider.send(msgspec.msgpack.encode(fields))
        for message in (
            WorkerExit(0, 1, -9),
            WorkerStarted(1, 1),
            join_protocol.Logged(0, b"lies"),
            join_protocol.Echo(9),
        ):
            insider.send(join_protocol.encode(message))
        insider.send_multipart([b"", b"many", b"frames"])


def nonsense_at_the_switchboard(keys: Keys, heard: list[FromWorker], lots: random.Random) -> None:
    """From somebody who has a worker's key: nobody's messages, old ones, others' again."""
    port = int(keys.address.rpartition(":")[2])
    mine = keys.supervisor_public, keys.worker_public, keys.worker_secret
    with dealer(port, *mine, name=keys.worker_public) as insider:
        for _ in range(100):
            insider.send(lots.randbytes(lots.randrange(200)))
        for number in (77, -1, 1 << 40):
            insider.send(encode(Hello(worker=number, pid=1, host="x", built=b"")))
            insider.send(encode(Beat(worker=number, step=10**9, samples_per_s=-1.0)))
        last: dict[str, Any] = {"because": "", "peak_memory_bytes": 0, "loss": 0.0}
        for generation in range(9):
            insider.send(encode(Left(worker=0, step=1, generation=generation, **last)))
            insider.send(encode(Leaving(worker=1, generation=generation)))
            insider.send(
                encode(RoundPart(worker=0, round="x", payload=b"x", generation=generation))
            )
        for message in heard:
            insider.send(encode(message))


def test_noise_at_every_port_changes_nothing(
    tmp_path: Path, captured: dict[str, Any], launcher: Launcher
) -> None:
    token = tmp_path / "token"
    with ExitStack() as stack:
        where = Where(hosts="here:1", listen="127.0.0.1", token_file=token)
        cluster = open_hosts(where)
        port = cluster.hosts.server.port
        join = [*MANYHANDS, "worker", "--join", f"127.0.0.1:{port}", "--token-file", str(token)]
        for name in ("b", "c"):
            daemon = subprocess.Popen([*join, "--name", name, "--slots", "1"], stderr=sys.stdout)
            stack.callback(daemon.wait, 30)
        stack.callback(cluster.close)
        driving = Driving(tmp_path, cluster, workers=3)
        stack.callback(driving.finish)
        driving.start()
        until(lambda: any(len(e["members"]) == 3 for e in driving.events("Viewed")))
        keys: Keys = captured["switchboard"].keys_for(77, "127.0.0.1")
        peer_addresses = [w.peer_address for w in captured["supervisor"].now.workers.values()]
        ports = [int(a.rpartition(":")[2]) for a in (keys.address, *peer_addresses)]
        noise = [
            threading.Thread(target=raw_noise, args=(p, random.Random(p)), daemon=True)
            for p in (port, *ports)
        ]
        lots = random.Random(2)
        for thread in noise:
            thread.start()
        nonsense_at_the_gate(port, read_token(token), lots)
        nonsense_at_the_switchboard(keys, list(captured["said"]), lots)
        for thread in noise:
            thread.join(PATIENCE_S)
        # Doors are looked at when hosts meet: let them.
        ask(RunDir(driving.path).control, Examine(), patience_s=PATIENCE_S)

        def warned(where: str) -> list[str]:
            texts = [e["text"] for e in driving.events("Warned")]
            return [t for t in texts if f"refused at {where}" in t]

        for where in (f"127.0.0.1:{port}", keys.address.removeprefix("tcp://"), peer_addresses[0]):
            until(lambda where=where: warned(where))
        mark = driving.finish()
    calm = mh.train(
        driving.task,
        to=tmp_path / "calm",
        workers=1,
        settings=SETTINGS,
        quiet=True,
        launcher=launcher,
    )
    assert mark == calm.fingerprint
    assert driving.report is not None and driving.report.recoveries == 0
    assert not driving.events("Lost") and not driving.events("Exited")
    at_the_gate = " ".join(warned(f"127.0.0.1:{port}"))
    assert "with another key" in at_the_gate and "did not speak our language" in at_the_gate
    assert "that made no sense" in at_the_gate
