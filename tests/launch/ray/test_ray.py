"""Ray as an engine: the same weights, the same bytes, the same scores; and nothing left behind."""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.proof import check
from manyhands.data.mapreduce.resumable_tasks import DataTask, TaskRunner
from manyhands.launch.choose_engine import open_engine
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.ray import ray_placement_groups
from manyhands.launch.ray.ray_executor import RayExecutor
from manyhands.launch.ray.ray_resources import actor_options, missing, parse_resources, times
from manyhands.launch.ray.ray_session import Session, _why_not_reached, address_of, ray_processes
from manyhands.testing.namespaces import Network, why_not
from manyhands.values.errors import DataError, DataTaskFailed, RequestError
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_options import Where
from tests.data.mapreduce.test_map_reduce import Square, dies, fails, square
from tests.support.clicks import TASK as CLICKS
from tests.support.clicks import write_clicks
from tests.support.ray_nodes import Nodes, Run, process_name, until

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: 'manyhands[ray]'"
)
CPU = "CPU=0.25"
"""Of each worker, so that any machine has room for a few."""


# ---- pure


def test_resources_are_read() -> None:
    assert parse_resources("CPU=2,GPU=0,memory=2GB,disk=1") == {"CPU": 2, "memory": 2e9, "disk": 1}
    assert parse_resources("cpu=0.5, memory=1GiB") == {"CPU": 0.5, "memory": 1 << 30}
    for wrong in ("CPU", "CPU=x", "CPU=1.5", "=1", "CPU=0", "CPU=2GB"):
        with pytest.raises(RequestError, match="--worker-resources"):
            parse_resources(wrong)
    assert actor_options({"GPU": 1, "disk": 1}) == {
        "num_cpus": 0,
        "num_gpus": 1,
        "resources": {"disk": 1},
    }


def test_what_fits_is_counted() -> None:
    each, there = {"CPU": 0.1, "memory": 10.0}, {"CPU": 0.3, "memory": 100.0, "GPU": 1.0}
    assert times(each, there) == 3
    assert times({"disk": 1.0}, there) == 0
    assert missing(each, 4, there) == {"CPU": 0.1}
    assert missing(each, 3, there) == {}


def test_engines_are_read() -> None:
    assert address_of("ray") is None
    assert address_of("ray://10.0.0.1:6379") == address_of("ray=10.0.0.1:6379") == "10.0.0.1:6379"
    for wrong in ("ray://head", "ray=", "ray://:6379"):
        with pytest.raises(RequestError, match="HOST:PORT"):
            address_of(wrong)
    for where in (
        Where(spread=True),
        Where(worker_resources=CPU),
        Where(ray_token_file=Path("f")),
    ):
        with pytest.raises(RequestError, match="are for Ray"):
            open_engine(where)


def test_who_does_not_reach_ray_is_told_about_tls() -> None:
    late = ConnectionError("Failed to connect")
    late.__cause__ = RuntimeError("Failed:\nTraceback (most recent):\n  x\nRpcError: too late\n")
    without = _why_not_reached("10.0.0.1:6379", "10.0.0.2", late, tls=False)
    assert "set RAY_USE_TLS=1" in without and without.endswith("Ray said: RpcError: too late")
    assert "files of its CA?" in _why_not_reached("10.0.0.1:6379", "10.0.0.2", late, tls=True)
    other = RuntimeError("AuthToken is wrong")
    assert "TLS" not in _why_not_reached("10.0.0.1:6379", "10.0.0.2", other, tls=True)


@needs_ray
def test_requests_to_ray_that_cannot_work_are_answered(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Ray brings its own"):
        open_engine(Where(engine="ray", listen=":0"))
    with pytest.raises(RequestError, match="for a Ray cluster"):
        open_engine(Where(engine="ray", ray_token_file=tmp_path / "token"))
    token, nowhere = tmp_path / "token", "ray://127.0.0.1:1"
    with pytest.raises(RequestError, match="cannot be read"):
        open_engine(Where(engine=nowhere, ray_token_file=token))
    token.write_text("secret")
    token.chmod(0o644)
    with pytest.raises(RequestError, match=f"chmod 600 {token}"):
        open_engine(Where(engine=nowhere, ray_token_file=token))


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"pip install 'manyhands\[ray\]'"):
        open_engine(Where(engine="ray"))


# ---- a Ray of our own


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """One Ray for all tests here, which are in a process that is connected to it."""
    here = Session(None)
    yield here
    here.close()


def task(pause_s: float = 0.0) -> mh.Task:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(pause_s)
        return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return mh.Task(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        ),
        loss=loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        data={"x": x, "y": x.sum(1)},
        held_out=0.25,
        predict=lambda m, b: (m(b["x"])[:, 0], b["y"]),
        scores={"error": lambda p, t: float((p - t).abs().mean())},
    )


def train(to: Path, **how: Any) -> mh.Report:
    settings = ["train.batch=32", "train.epochs=20", *how.pop("settings", [])]
    return mh.train(task(how.pop("pause_s", 0)), to=to, settings=settings, quiet=True, **how)


@pytest.fixture(scope="module")
def calm(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of one local worker."""
    folder = tmp_path_factory.mktemp("calm")
    return train(folder / "run", workers=1, launcher=launcher).fingerprint


def on_ray(to: Path, **how: Any) -> mh.Report:
    return train(to, engine="ray", worker_resources=CPU, **how)


def daemons(session: Session) -> list[int]:
    found = ray_processes(str(session.folder / "token")) if session.folder else []
    return [pid for pid in found if process_name(pid).startswith("ray::DaemonActor")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


@needs_ray
@pytest.mark.usefixtures("session")
def test_the_weights_are_the_same_and_a_killed_worker_changes_nothing(
    calm: str, tmp_path: Path
) -> None:
    faults = FaultPlan().kill(rank=1, at_step=20, at="update")
    report = on_ray(tmp_path / "run", workers=2, faults=faults)
    assert report.fingerprint == calm and report.recoveries == 1
    hosts = events(tmp_path / "run", "Hosted")
    assert "with room for 2 workers" in hosts[0]["what"], "one daemon has the whole node"


@needs_ray
@pytest.mark.usefixtures("session")
def test_workers_at_different_steps(tmp_path: Path) -> None:
    faults = FaultPlan().kill(rank=1, at_step=2, at="gather")
    report = on_ray(tmp_path / "run", workers=2, sync="server:mode=async", faults=faults)
    proof = check(read(tmp_path / "run" / "ledger.jsonl"))
    assert report.recoveries == 1 and proof.ok and proof.steps == report.step


@needs_ray
def test_a_killed_daemon_is_given_up_at_once_and_replaced(
    session: Session, launcher: Launcher, tmp_path: Path
) -> None:
    def watch(step: Any) -> None:
        if step.step % 20 == 0 and not killed and len(now := daemons(session)) == 2:
            killed.append(now[-1])
            os.kill(now[-1], signal.SIGKILL)

    killed: list[int] = []
    long = ["train.epochs=30", "recovery.host_s=60"]  # its lease would last to the end
    calmly = train(tmp_path / "calm", workers=1, settings=long, launcher=launcher).fingerprint
    report = on_ray(tmp_path / "run", workers="1:2", on_step=watch, settings=long, pause_s=0.01)
    assert killed and report.fingerprint == calmly
    told = [event["what"] for event in events(tmp_path / "run", "Hosted")]
    assert any("Ray says that its host daemon died" in what for what in told), told
    assert sum("has joined" in what for what in told) == 3, told
    until(lambda: not daemons(session), 10)


@pytest.mark.slow
@needs_ray
def test_idle_room_is_given_back_and_asked_for_again(
    session: Session, calm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_placement_groups, "IDLE_S", 0.5)
    every = session.ray.cluster_resources()["CPU"]  # what is free may not be all of it yet
    hands = open_engine(Where(engine="ray", worker_resources=CPU))
    try:
        for name in ("first", "second"):
            report = train(tmp_path / name, workers=1, launcher=hands)
            assert report.fingerprint == calm
            until(lambda: not daemons(session), 20)
            until(lambda: session.ray.available_resources().get("CPU") == every, 20)
    finally:
        hands.close()


@needs_ray
@pytest.mark.usefixtures("session")
def test_more_than_there_is_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_placement_groups, "PLACE_S", 0.5)
    words = r"8 workers ask for 8000 CPU, the cluster has [\d.]+, of which [\d.]+ are free"
    with pytest.raises(RequestError, match=words):
        train(tmp_path / "run", engine="ray", workers=8, worker_resources="CPU=1000")
    assert not (tmp_path / "run").exists()


# ---- tasks


@pytest.fixture
def executor(session: Session) -> Iterator[RayExecutor]:
    assert session.ray.is_initialized()
    with RayExecutor(Session(None), {"CPU": 0.25}) as ray:
        yield ray


@needs_ray
def test_ray_is_an_executor(executor: RayExecutor) -> None:
    assert list(executor.map(pow, (2, 3), (5, 2))) == [32, 9]
    assert executor.submit(lambda a, *, b: a + b, 1, b=2).result() == 3
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 / 0).result()
    shared = executor.put(b"shared")
    assert executor.submit(len, shared).result() == 6
    assert executor.submit(os.getcwd).result() == os.getcwd()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(len, "x")


@pytest.mark.slow
@needs_ray
def test_tasks_that_kill_their_process_are_run_again_and_told_at_last(
    executor: RayExecutor, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with TaskRunner(tmp_path, workers=2, executor=executor) as runner:
        jobs = [DataTask(str(n), dies, (n, log, 1 if n == 2 else 0)) for n in range(4)]
        assert [s.n for s in runner.do("some", jobs, Square)] == [0, 1, 4, 9]
        with pytest.raises(DataTaskFailed, match="task 9 died"):
            runner.do("always", [DataTask("9", dies, (9, log, 99))], Square)
        with pytest.raises(DataError, match="cannot do 5"):
            runner.do("raises", [DataTask("5", fails, (5, log, (5,)))], Square)
        assert runner.do("after", [DataTask("3", square, (3, log))], Square)[0].n == 9


@needs_ray
@pytest.mark.usefixtures("session")
def test_prepared_data_has_the_same_bytes(tmp_path: Path) -> None:
    lines = [f"{i % 17},w{i % 5},{i % 2}" for i in range(3000)]
    (tmp_path / "raw.csv").write_text("\n".join(["a,b,y", *lines]))
    how: dict[str, Any] = {"label": "y", "shard_size": "8KiB", "memory": "1MB"}
    mh.prepare(tmp_path / "raw.csv", tmp_path / "local", workers=1, **how)
    mh.prepare(tmp_path / "raw.csv", tmp_path / "ray", engine="ray", worker_resources=CPU, **how)
    local, ray = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("local", "ray")
    )
    assert len(local) > 3 and local == ray


@pytest.mark.slow
@needs_ray
@pytest.mark.usefixtures("session")
def test_scores_are_the_same(launcher: Launcher, tmp_path: Path) -> None:
    train(tmp_path / "run", workers=1, launcher=launcher)
    here = mh.evaluate(tmp_path / "run", task())
    assert mh.evaluate(tmp_path / "run", task(), engine="ray", worker_resources="CPU=1") == here


@pytest.mark.slow
@needs_ray
@pytest.mark.usefixtures("session")
def test_predictions_have_the_same_bytes(launcher: Launcher, tmp_path: Path) -> None:
    """Of several parts, some records of which are bad; of records from Python; of those that the
    task holds out."""
    write_clicks(tmp_path / "train.csv", 400)
    write_clicks(tmp_path / "big.csv", 20_000, seed=3, label=False)
    with (tmp_path / "big.csv").open("a") as file:
        file.write("20000,u1,old,3\n")
    mh.prepare(tmp_path / "train.csv", tmp_path / "data", label="clicked", id="id", split="0.8")
    (tmp_path / "clicks.py").write_text(CLICKS.format(data=tmp_path / "data"))
    settings = ["train.batch=64", "train.steps=4"]
    run = tmp_path / "run"
    mh.train(
        tmp_path / "clicks.py", to=run, settings=settings, quiet=True, launcher=launcher, workers=1
    )
    ray: dict[str, Any] = {"engine": "ray", "worker_resources": CPU}
    here, there = tmp_path / "here.parquet", tmp_path / "there.parquet"
    mh.predict(run, tmp_path / "big.csv", to=here, memory="1MB", keep="user")
    found = mh.predict(run, tmp_path / "big.csv", to=there, memory="1MB", keep="user", **ray)
    assert (found.records, found.bad) == (20_001, 1)
    assert here.read_bytes() == there.read_bytes()
    records = [{"id": k, "user": "u3", "age": 20 + k, "hour": 3} for k in range(50)]
    assert mh.predict(run, records, **ray).table == mh.predict(run, records).table
    held, score = mh.predict(run, score=True), mh.predict(run, score=True, workers=2, **ray)
    assert held.table == score.table and held.scores == score.scores
    assert held.records > 0
    no = tmp_path / "no.csv"
    with pytest.raises(DataError, match="1 bad record"):
        mh.predict(run, tmp_path / "big.csv", to=no, on_error="fail", **ray)
    assert not no.exists()
    with pytest.raises(RequestError, match="predict runs on local processes, or on ray"):
        mh.predict(run, engine="inline")


# ---- what is left


def left_of(folder: Path) -> list[str]:
    mark = str(folder).encode()
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.append(process_name(int(path.parent.name)))
        except OSError:
            continue
    return found


TASK = Path(__file__).parents[3] / "examples" / "01_digits.py"


@needs_ray
@pytest.mark.slow
def test_nothing_is_left_of_a_ray_of_our_own(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mh-", dir="/tmp") as short:  # Ray makes sockets there
        command = [sys.executable, "-m", "manyhands", "train", str(TASK), "--engine", "ray"]
        command += ["--to", str(tmp_path / "run"), "--worker-resources", CPU, "--workers", "2"]
        command += ["--set", "train.steps=5", "--json"]
        environment = {**os.environ, "TMPDIR": short}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["step"] == 5
        assert list(Path(short).iterdir()) == []
        until(lambda: not left_of(Path(short)), 5)


# ---- several nodes


SLOW_TASK = """
import time, torch, manyhands as mh
from beside_the_task import pause
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
def loss(model, batch):
    pause()
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
task = mh.Task(
    model=lambda: torch.nn.Linear(8, 1),
    loss=loss,
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    data={"x": x, "y": x.sum(1)},
)
"""
BESIDE = "import time\ndef pause():\n    time.sleep(0.01)\n"


@pytest.fixture(scope="module")
def network_of_three() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with Network(hosts=3) as net:
        yield net


@pytest.fixture(scope="module")
def nodes(network_of_three: Network) -> Iterator[Nodes]:
    """Two Ray nodes of one CPU each; the driver's is the head."""
    with tempfile.TemporaryDirectory(prefix="mh-", dir="/tmp") as short:
        ray = Nodes(network_of_three, Path(short))
        ray.start(network_of_three.hosts[0], cpus=1)
        ray.wait(1)
        ray.start(network_of_three.hosts[1], cpus=1)
        ray.wait(2)
        yield ray
        for host in network_of_three.hosts:
            host.kill()


SETTINGS = ("--set", "train.batch=32", "--set")


@pytest.fixture(scope="module")
def slow_task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[int], str]]:
    """And the fingerprint that it comes to after so many steps."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "beside_the_task.py").write_text(BESIDE)
    (folder / "task.py").write_text(SLOW_TASK)
    swift = tmp_path_factory.mktemp("swift")
    (swift / "beside_the_task.py").write_text(BESIDE.replace("0.01", "0"))
    (swift / "task.py").write_text(SLOW_TASK)

    @functools.cache
    def fingerprint(steps: int) -> str:
        command = [sys.executable, "-m", "manyhands", "train", str(swift / "task.py"), "--json"]
        command += ["--to", str(swift / f"run-{steps}"), "--workers", "1"]
        command += [*SETTINGS, f"train.steps={steps}"]
        done = subprocess.run(command, check=True, capture_output=True, timeout=100)
        return json.loads(done.stdout)["fingerprint"]

    return folder / "task.py", fingerprint


@needs_ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_node_dies_and_the_others_go_on(
    nodes: Nodes, slow_task: tuple[Path, Callable[[int], str]], tmp_path: Path
) -> None:
    file, fingerprint = slow_task
    run, steps = Run(nodes, tmp_path), 120
    run.train(file, "--workers", "2", *SETTINGS, f"train.steps={steps}")
    run.view_of(2)
    run.step(20)
    nodes.kill_raylet(nodes.net.hosts[1])
    run.view_of(1)
    assert run.finish() == fingerprint(steps)


@needs_ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_node_that_is_cut_off_is_replaced_by_another(
    nodes: Nodes, slow_task: tuple[Path, Callable[[int], str]], tmp_path: Path
) -> None:
    file, fingerprint = slow_task
    a, b, c = nodes.net.hosts
    b.kill()
    nodes.start(b, cpus=1)
    nodes.wait(2)
    run, steps = Run(nodes, tmp_path), 500
    run.train(file, "--workers", "2", *SETTINGS, f"train.steps={steps}")
    run.view_of(2)
    run.step(20)
    nodes.net.cut(a, b)
    run.view_of(1)
    nodes.start(c, cpus=1)
    run.view_of(2)
    assert run.finish() == fingerprint(steps)
    assert len(run.joined()) == 3
    nodes.net.heal(a, b)


@needs_ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_run_grows_with_the_cluster(
    nodes: Nodes, slow_task: tuple[Path, Callable[[int], str]], tmp_path: Path
) -> None:
    file, fingerprint = slow_task
    _, b, c = nodes.net.hosts
    b.kill()
    c.kill()
    run, steps = Run(nodes, tmp_path), 500
    run.train(file, "--workers", "1:4", *SETTINGS, f"train.steps={steps}")
    run.view_of(1)
    run.step(5)
    nodes.start(b, cpus=2)
    run.view_of(3)
    assert run.finish() == fingerprint(steps)
    assert any("2 workers" in what for what in run.joined()), run.joined()


@needs_ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_on_the_cluster(
    nodes: Nodes, slow_task: tuple[Path, Callable[[int], str]], tmp_path: Path
) -> None:
    file, _ = slow_task
    run = Run(nodes, tmp_path)
    run.train(file, "--workers", "1", *SETTINGS, "train.steps=5000")
    run.view_of(1)
    run.step(5)
    assert run.driver is not None
    run.driver.kill()

    def left() -> list[str]:
        names = [process_name(pid) for host in nodes.net.hosts for pid in host.pids()]
        return [name for name in names if "DaemonActor" in name or "manyhands" in name]

    until(lambda: not left(), 20)
    again = Run(nodes, tmp_path / "again")
    again.path.parent.mkdir()
    again.train(file, "--workers", "1", *SETTINGS, "train.steps=5")
    again.finish()  # there was room for it
