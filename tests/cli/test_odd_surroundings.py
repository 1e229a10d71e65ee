"""A small run where there is no init, no home, no stdin, few descriptors, nobody who reads: it
works, or it is refused by name."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.values.run_folder import RunDir
from tests.cli.test_commands import TASK

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
STEPS = ["--set", "train.batch=16", "--set", "train.steps=6", "--workers", "1"]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "line.py"
    path.write_text(TASK)
    return path


@pytest.fixture
def process_one() -> list[str]:
    """What makes a command process 1 of a namespace of its own, as in a container."""
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no process namespaces here: {tried.stderr.strip()}")
    return UNSHARE


def manyhands(*arguments: object, before: list[str] | None = None, **how: Any):
    command = [*(before or []), sys.executable, "-m", "manyhands", *map(str, arguments)]
    settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, **how}
    return subprocess.run(command, check=False, **settings)


def test_as_process_one(process_one: list[str], task: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = manyhands("train", task, "--to", run, "--json", *STEPS, before=process_one)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 6


SCRIPT = """
import os, sys, runpy
assert os.getpid() == 1
import manyhands as mh
task = runpy.run_path(sys.argv[1])["task"]
report = mh.train(task, to=sys.argv[2], workers=1, quiet=True, settings=["train.steps=6"])
print(report.step)
"""


def test_a_script_as_process_one(process_one: list[str], task: Path, tmp_path: Path) -> None:
    """Without a command, so without its init."""
    script = [*process_one, sys.executable, "-c", SCRIPT, str(task), str(tmp_path / "run")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


INIT = """
import os, subprocess, sys, time
from contextlib import suppress
from manyhands.cli.init_process import init_stays_behind
init_stays_behind()
assert os.getpid() != 1
def zombies():
    stats = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it ended meanwhile
            stats.append(open(f"/proc/{process}/stat").read())
    return [s for s in stats if s.rpartition(")")[2].split()[0] == "Z"]
subprocess.run(["sh", "-c", "true & true & true &"])  # orphans, who end
while zombies():
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(60)
"""


def test_as_process_one_orphans_are_reaped_and_signals_obeyed(process_one: list[str]) -> None:
    command = [*process_one, sys.executable, "-c", INIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (one,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(one), signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_as_process_one_a_run_is_stopped_by_sigterm(
    process_one: list[str], task: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = ["train", str(task), "--to", str(run), "--workers", "1"]
    arguments += [
        "--set",
        "train.batch=16",
        "--set",
        "train.steps=1000000",
        "--set",
        "log.csv=true",
    ]
    command = [*process_one, sys.executable, "-m", "manyhands", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        steps = run / "metrics.csv"
        while not steps.exists() or len(steps.read_text().splitlines()) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        (one,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(one), signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130 and f"manyhands resume {run}" in said


def test_few_descriptors_are_refused_by_name(task: Path, tmp_path: Path) -> None:
    limited = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh"]
    done = manyhands("train", task, "--to", tmp_path / "run", *STEPS, before=limited)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "may have 24 files open (ulimit -n)" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_with_standard_files_closed(closed: str, task: Path, tmp_path: Path) -> None:
    """Then their numbers are the next that are given out: to our memory, for example."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    done = manyhands("train", task, "--to", tmp_path / "run", *STEPS, before=shell)
    assert done.returncode == 0, done.stderr
    assert json.loads(RunDir(tmp_path / "run").report.read_text())["step"] == 6


def test_nobody_reads_what_is_printed(task: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = manyhands(
            "train", task, "--to", tmp_path / "run", *STEPS,
            capture_output=False, stdout=write, stderr=subprocess.PIPE,
        )  # fmt: skip
    finally:
        os.close(write)
    assert done.returncode == 0 and "Broken pipe" not in done.stderr, done.stderr


NOBODY = ["--reuid=54321", "--regid=54321", "--clear-groups",
          "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # fmt: skip
"""Somebody without a name, who may write to nothing that is not theirs. They may read everything:
the interpreter may be in a home of root's."""


@pytest.fixture
def nobody() -> list[str]:
    setpriv = shutil.which("setpriv")
    if setpriv is None or os.getuid() != 0:
        pytest.skip("only root becomes somebody else, with setpriv")
    return [setpriv, *NOBODY]


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder in which everybody may read, with a task."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "line.py").write_text(TASK)
        yield Path(folder)


def test_nobody_at_home(nobody: list[str], public: Path) -> None:
    """No name, no home, no language, no ssh: PATH is an empty folder."""
    work, empty = public / "work", public / "empty"
    work.mkdir()
    empty.mkdir()
    work.chmod(0o777)
    env = {"PATH": str(empty), "LANG": "C", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = manyhands("train", public / "line.py", *STEPS, before=nobody, env=env, cwd=work)
    assert done.returncode == 0, done.stderr
    (run,) = (work / "runs").iterdir()
    assert RunDir(run).report.exists()


def test_a_folder_that_may_not_be_written(nobody: list[str], public: Path) -> None:
    run = public / "run"
    done = manyhands("train", public / "line.py", "--to", run, *STEPS, before=nobody)
    assert done.returncode == 2 and "Permission denied" in done.stderr, done.stderr
    assert str(run) in done.stderr and "Traceback" not in done.stderr
