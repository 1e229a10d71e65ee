"""The agent and its workers: who ends with whom, and what is said of it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import cloudpickle
import pytest

import manyhands as mh
from manyhands.driver.supervise.death_causes import cause_of_loss
from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.testing.contracts import orders
from manyhands.values.run_folder import RunDir
from tests.support.tasks import make

ENTRY = "manyhands.testing.contracts:contract_worker"


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    """Opened by a thread that ended at once."""
    opened: list[Local] = []
    thread = threading.Thread(target=lambda: opened.append(Local(ENTRY, create_segments())))
    thread.start()
    thread.join()
    with closing(opened[0]):
        yield opened[0]


def seen(local: Local, kind: type) -> object:
    """The next thing of this kind that the launcher tells."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for sign in local.poll():
            if isinstance(sign, kind):
                return sign
        time.sleep(0.005)
    raise AssertionError(f"no {kind.__name__}")


def call(local: Local, worker: int, body: Callable[[], None], folder: Path) -> None:
    """Have a worker do this."""
    (folder / "body").write_bytes(cloudpickle.dumps(body))
    local.start(worker, orders(f"call {folder / 'body'}".encode()), folder / "log")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while runs(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its worker"
        time.sleep(0.005)


def detach_and_tell(told: Path, *, stays: bool) -> Callable[[], None]:
    """What a worker does: start a grandchild in a session of its own, whose parent then ends."""

    def detach() -> None:
        import os
        import signal
        import subprocess

        middle = os.fork()
        if middle == 0:
            os.setsid()
            pid = subprocess.Popen(["sleep", "600"]).pid
            told.with_suffix(".draft").write_text(str(pid))
            os.rename(told.with_suffix(".draft"), told)
            os._exit(0)
        os.waitpid(middle, 0)
        if stays:
            signal.pause()

    return detach


def pid_in(told: Path) -> int:
    deadline = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return int(told.read_text())


@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_what_a_worker_detached_ends_with_it(how: str, local: Local, tmp_path: Path) -> None:
    """Nothing leads from such a process to its worker: no parent, no session, no group."""
    call(local, 0, detach_and_tell(tmp_path / "pid", stays=how != "it ends"), tmp_path)
    pid = pid_in(tmp_path / "pid")
    if how == "it is killed":
        assert runs(pid), "while its worker lives, it does"
        local.kill(0)
    seen(local, WorkerExit)
    until_gone(pid)


def test_a_worker_that_ends_takes_nothing_of_another_with_it(tmp_path: Path) -> None:
    with closing(Local(ENTRY, create_segments())) as local:
        call(local, 0, detach_and_tell(tmp_path / "pid", stays=True), tmp_path)
        pid = pid_in(tmp_path / "pid")
        local.start(1, orders(b"exit 0"), tmp_path / "other")
        exit = seen(local, WorkerExit)
        assert isinstance(exit, WorkerExit) and exit.worker == 1
        assert runs(pid), "it belongs to worker 0, which lives"
    until_gone(pid)


def test_a_launcher_outlives_the_thread_that_opened_it(local: Local, tmp_path: Path) -> None:
    agent = local.agent.pid
    local.start(0, orders(b"exit 7"), tmp_path / "log")
    exit = seen(local, WorkerExit)
    assert isinstance(exit, WorkerExit) and exit.code == 7
    assert local.agent.pid == agent and not exit.why


def test_an_agent_goes_with_its_driver_even_if_somebody_holds_the_line(tmp_path: Path) -> None:
    """A child that the driver forked has the driver's end of the socket as well."""
    told, over = os.pipe()
    driver = os.fork()
    if driver == 0:
        try:
            local = Local(ENTRY, create_segments())
            holder = os.fork()
            if holder == 0:
                os.close(told)
                time.sleep(120)
                os._exit(0)
            os.write(over, f"{local.agent.pid} {holder}".encode())
            signal.pause()
        finally:
            os._exit(1)
    agent, holder = map(int, os.read(told, 100).split())
    try:
        assert runs(agent)
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
        until_gone(agent)  # while it was importing torch
    finally:
        os.kill(holder, signal.SIGKILL)
        os.close(told)
        os.close(over)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("torch", "raise ImportError('libgomp.so.1: cannot open shared object file')", "libgomp"),
        ("msgspec", "raise ImportError('built for another Python')", "built for another Python"),
        ("sitecustomize", "import os, sys; print('no licence', file=sys.stderr); os._exit(3)",
         "no licence"),
    ],
)  # fmt: skip
def test_an_agent_that_cannot_start_says_why(
    name: str, text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    run = tmp_path / "run"
    with pytest.raises(mh.RequestError, match=f"workers cannot be started: .*{said}"):
        mh.train(make("cnn"), to=run, workers=1, settings=["train.batch=8"], quiet=True)
    assert not RunDir(run).root.exists(), "nothing was computed: no half-made run is left"


def test_a_dead_agent_is_blamed_and_no_person() -> None:
    why = "the process that had forked it (77) was killed by signal 11 (SIGSEGV)"
    worker = WorkerState(0, "gone", exit=WorkerExit(0, 78, -9, why=why))
    cause = cause_of_loss(Situation(wanted=1, workers={0: worker}), worker)
    assert cause.what == why and "person" not in cause.advice
