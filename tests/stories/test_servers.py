"""Servers update the weights, workers only compute: the bits are those of one worker alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories import live
from manyhands.values import events
from manyhands.values.config import RunConfig
from manyhands.values.errors import ConfigError
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.support.server_runs import Go, proven, runs_in, while_it_trains
from tests.support.tasks import make

SETTINGS = ["train.batch=32", "train.micro_batch=4", "train.steps=10", "recovery.silent_s=1"]


@pytest.fixture
def go(tmp_path: Path, launcher: Launcher) -> Go:
    return runs_in(tmp_path, launcher, SETTINGS, "server:count=2")


_CALM: dict[Any, str] = {}


@pytest.fixture
def calm(go: Go) -> Callable[..., str]:
    """The fingerprint of one worker, without servers."""

    def found(*settings: str, kind: str = "cnn") -> str:
        if (key := (settings, kind)) not in _CALM:
            report = go(*settings, kind=kind, workers=1, name="calm", sync="allreduce")
            _CALM[key] = report.fingerprint
        return _CALM[key]

    return found


def views(run: str | Path) -> list[events.Viewed]:
    seen = events.read_events(RunDir(Path(run)).events)
    return [event for event in seen if isinstance(event, events.Viewed)]


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (3, 2), (4, 3)])
def test_the_bits_of_one_worker(
    go: Go, calm: Callable[..., str], servers: int, workers: int
) -> None:
    report = go("train.clip_norm=0.5", workers=workers, sync=f"server:count={servers}")
    assert report.fingerprint == calm("train.clip_norm=0.5")
    (view,) = views(report.run)
    assert len(view.servers) == servers and len(view.members) == servers + workers
    assert 0 not in view.servers
    assert report.workers == workers


@pytest.mark.parametrize("kind", ["lstm", "odd", "own", "cnn-sgd"])
def test_odd_models_and_optimizers(go: Go, calm: Callable[..., str], kind: str) -> None:
    """Among them an optimizer that cannot be cut: one server has all of it."""
    assert go(kind=kind).fingerprint == calm(kind=kind)


@pytest.mark.parametrize("at", ["begin", "gather", "update", "share"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_server_or_a_worker_is_killed(
    go: Go, calm: Callable[..., str], rank: int, at: str
) -> None:
    """Of ranks 0 and 1, which compute, and 2 and 3, which serve. Nobody else is started anew."""
    report = go("train.clip_norm=0.5", faults=FaultPlan().kill(rank=rank, at_step=4, at=at))
    assert report.fingerprint == calm("train.clip_norm=0.5")
    assert report.recoveries == 1
    first, *later = views(report.run)
    assert later and all(view.servers for view in later)
    for view in later:
        assert set(first.members.values()) - set(view.members.values()) == {first.members[rank]}


def test_all_servers_at_once_in_the_middle_of_their_update(
    go: Go, calm: Callable[..., str]
) -> None:
    faults = FaultPlan()
    for rank in (2, 3):
        faults = faults.kill(rank=rank, at_step=4, at="update")
    assert go(faults=faults, kind="own").fingerprint == calm(kind="own")


def test_they_come_and_go_while_it_trains(
    go: Go, calm: Callable[..., str], tmp_path: Path, launcher: Launcher
) -> None:
    run = tmp_path / "run"
    with while_it_trains(go, run, "server:count=1"):
        assert "2 workers and 3 servers since step" in live.scale(run, None, 60, servers=3)
        live.change(run, ["lr=0.002"], 60)
        assert "1 worker and 2 servers since step" in live.scale(run, 1, 60, servers=2)
    counts = [(len(view.members), len(view.servers)) for view in views(run)]
    assert (5, 3) in counts and counts[-1] == (3, 2)
    proof = proven(run)
    again = mh.replay(run, make("cnn"), step=0, to=proof.steps, launcher=launcher)
    assert again.same and again.compared_weights == [proof.steps], again.differences


def test_a_checkpoint_goes_on_with_servers_and_without(
    go: Go, calm: Callable[..., str], launcher: Launcher
) -> None:
    report = go("train.steps=4")
    for steps, sync in ((7, "allreduce"), (10, "server:count=3")):
        report = mh.resume(
            report.run,
            make("cnn"),
            workers=3,
            sync=sync,
            settings=[f"train.steps={steps}"],
            quiet=True,
            launcher=launcher,
        )
        assert bool(views(report.run)[-1].servers) == (sync != "allreduce")
    assert report.fingerprint == calm()


@pytest.mark.parametrize(
    ("sync", "settings", "said"),
    [
        ("server:count=0", [], "server.count must be at least 1"),
        ("server:mode=fast", [], "server.mode"),
        ("server:cuont=2", [], "did you mean 'count'"),
        ("server:2", [], "write it as server:count=2"),
        ("alone:count=2", [], "only a server has settings"),
        ("srever", [], "train.sync"),
        ("server", ["train.collective=gloo"], "there every worker has weights of its own"),
    ],
)
def test_what_cannot_be_is_said(go: Go, sync: str, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        go(*settings, sync=sync)
    assert said in str(error.value)


def test_a_section_means_servers_and_another_way_leaves_it_out() -> None:
    config = RunConfig().with_settings(["server.count=3"])
    assert config.servers is not None and config.servers.count == 3
    assert config.with_settings(["train.sync=allreduce"]).servers is None
    assert RunConfig().servers is None


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as schedule-free ones do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


def counted() -> mh.Task:
    def half(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    return replace(make("cnn"), optimizer=lambda m: Counting(m.parameters()), schedule=half)


@pytest.mark.parametrize("sync", ["allreduce", "server:count=1"])
def test_what_an_optimizer_keeps_in_its_groups_is_everybodys(
    tmp_path: Path, launcher: Launcher, sync: str
) -> None:
    """Only one process takes the step of such an optimizer."""

    def train(name: str, workers: int, steps: int = 10, **more: Any) -> mh.Report:
        settings = [*SETTINGS[:2], f"train.steps={steps}", "recovery.silent_s=60"]
        return mh.train(
            counted(),
            to=tmp_path / name,
            workers=workers,
            settings=settings,
            quiet=True,
            launcher=launcher,
            **more,
        )

    wanted = train("one", 1).fingerprint
    for rank in (0, 2):
        faults = FaultPlan().kill(rank=rank, at_step=4, at="update" if rank else "share")
        workers = 2 if sync != "allreduce" else 3
        report = train(f"killed-{rank}", workers, sync=sync, faults=faults)
        assert report.fingerprint == wanted and report.recoveries == 1
    half = train("half", 2, steps=4, sync=sync)
    report = mh.resume(
        half.run, counted(), workers=2, settings=["train.steps=10"], quiet=True, launcher=launcher
    )
    assert report.fingerprint == wanted
