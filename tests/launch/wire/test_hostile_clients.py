"""Strangers at the ports of a run by command: its memory, its descriptors and its bits stay its
own."""

import json
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from tests.launch.wire.test_refusals import TASK
from tests.support.cluster import MANYHANDS
from tests.support.hostile_clients import half_open, listening, long_frame, peak_bytes, pour

PATIENCE_S = 60.0
DESCRIPTORS = 1024
SETTINGS = ["train.batch=16", "train.steps=60", "log.every_steps=1", "checkpoint.every_steps=3"]


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return found


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """For the strangers, who are in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(4096, before[0]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("many_descriptors")
def test_strangers_take_neither_memory_nor_descriptors_of_a_run(
    tmp_path: Path, launcher: Launcher
) -> None:
    slow, run, task = tmp_path / "slow", tmp_path / "run", tmp_path / "task.py"
    slow.touch()
    task.write_text(TASK.format(slow=str(slow)))
    command = [*MANYHANDS, "train", str(task), "--to", str(run), "--workers", "2"]
    command += ["--listen", "127.0.0.1", *(x for s in SETTINGS for x in ("--set", s))]
    limit = (DESCRIPTORS, DESCRIPTORS)
    driver = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
    )

    def told(kind: str) -> list[dict[str, Any]]:
        path = run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] == kind]

    with ExitStack() as stack:
        stack.callback(driver.kill)
        until(lambda: told("Saved"))
        ports, before = listening(driver.pid), peak_bytes(driver.pid)
        assert len(ports) == 2, "where hosts join, and where workers speak"
        for port in ports:
            stack.enter_context(half_open(port, DESCRIPTORS))
            stack.enter_context(half_open(port, 20, long_frame(1 << 40)))
        pouring = [threading.Thread(target=pour, args=(p, 1 << 30)) for p in ports for _ in "1234"]
        for thread in pouring:
            thread.start()
        for thread in pouring:
            thread.join(PATIENCE_S)
        saved = len(told("Saved"))
        until(lambda: len(told("Saved")) > saved)
        warned = until(lambda: [e["text"] for e in told("Warned") if "too many" in e["text"]])
        assert "they came from 127.0.0.1" in warned[0]
        assert peak_bytes(driver.pid) - before < 100 << 20
        slow.unlink()
        said, _ = driver.communicate(timeout=PATIENCE_S)
        assert driver.returncode == 0, said
    found = json.loads((run / "report.json").read_text())
    calm = mh.train(
        task, to=tmp_path / "calm", workers=1, settings=SETTINGS, quiet=True, launcher=launcher
    )
    assert found["fingerprint"] == calm.fingerprint and found["recoveries"] == 0
