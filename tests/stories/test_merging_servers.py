"""Workers at different steps: nothing acknowledged is lost, nothing is applied twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.checkpoint.step_files import MODEL
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories import live
from manyhands.training.sync.merge.history import read_history, violations
from manyhands.values import events
from manyhands.values.errors import ConfigError, RequestError, RunFailed
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.support.server_runs import Go, proven, runs_in, while_it_trains
from tests.support.tasks import classify, make

SETTINGS = ["train.batch=32", "train.micro_batch=8", "train.steps=14", "recovery.silent_s=1"]


@pytest.fixture
def go(tmp_path: Path, launcher: Launcher) -> Go:
    """What is pushed and applied is recorded beside the run."""
    train = runs_in(tmp_path, launcher, SETTINGS, "server:count=2,mode=async")

    def run(
        *settings: str, name: str = "run", faults: FaultPlan | None = None, **how: Any
    ) -> mh.Report:
        history = tmp_path / f"history-{name}"
        history.mkdir()
        recorded = (faults or FaultPlan()).recording(str(history))
        return train(*settings, name=name, faults=recorded, **how)

    return run


def scored_task() -> mh.Task:
    return replace(make("cnn"), held_out=0.2)


def not_a_number(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * torch.nan


class Visits(nn.Module):
    """Its weights say how often each record was applied: the gradient does not depend on them, and
    all numbers are exact. They lie with two servers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(40_000))


def visit(model: Visits, batch: Any) -> Tensor:
    return -model.seen[batch["i"]].mean()


def visits() -> mh.Task:
    return mh.Task(
        model=Visits,
        loss=visit,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
        data={"i": torch.arange(128) * 312},
    )


def counted(report: mh.Report) -> None:
    """16 steps are 4 epochs, in each of which every record adds 1/32 to its weight."""
    assert report.step == 16 and proven(report.run).steps == 16
    seen = load_file(RunDir(Path(report.run)).step(16) / MODEL)["seen"]
    expected = torch.zeros(40_000)
    expected[torch.arange(128) * 312] = 4 / 32
    assert torch.equal(seen, expected)
    recorded = read_history(Path(report.run).with_name("history-run"))
    assert recorded and violations(recorded, done=range(16)) == []


@pytest.mark.parametrize("at", ["begin", "compute", "gather", "share"])
def test_a_worker_is_killed(go: Go, at: str) -> None:
    faults = FaultPlan().kill(rank=3, at_step=1, at=at)
    report = go("train.steps=16", task=visits(), faults=faults)
    counted(report)
    assert report.recoveries == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", ["begin", "gather", "update", "share"])
def test_a_server_is_killed(go: Go, rank: int, at: str) -> None:
    """Rank 0 is the head, who orders what the others push."""
    faults = FaultPlan().kill(rank=rank, at_step=4, at=at)
    report = go("train.steps=16", task=visits(), faults=faults)
    counted(report)
    assert report.recoveries == 1


@pytest.mark.parametrize("who", [(2, 3), (0, 1), (0, 2)])
def test_several_at_once(go: Go, who: tuple[int, int]) -> None:
    """All workers; all servers; the head and a worker."""
    faults = FaultPlan()
    for rank in who:
        faults = faults.kill(rank=rank, at_step=3, at="gather")
    report = go("train.clip_norm=0.5", faults=faults)
    assert report.step == 14 and proven(report.run).steps == 14
    kept = load_file(RunDir(Path(report.run)).step(14) / MODEL)
    # 4 + 4 + 4 + 1 micro-batches an epoch, in each of which it is called once.
    assert kept["average.num_batches_tracked"] == 3 * 13 + 8


def test_whoever_mends_is_killed_too(go: Go) -> None:
    faults = FaultPlan().kill(rank=0, at_step=3, at="update").kill(rank=1, at_step=3, at="regroup")
    counted(go("train.steps=16", task=visits(), faults=faults))


def test_a_bound_of_zero_is_sync(go: Go) -> None:
    marks = {
        go("train.steps=5", sync=sync, name=name).fingerprint
        for name, sync in (("a", "server:mode=stale,staleness=0"), ("b", "allreduce"))
    }
    assert len(marks) == 1


def test_a_bound_holds_through_delays_and_a_death(go: Go) -> None:
    """The head looks at what each push read when it orders it (grants.ReadStates)."""
    faults = FaultPlan().slow(rank=2, at_step=0, times=6).kill(rank=1, at_step=2, at="gather")
    report = go(
        "train.steps=24",
        "checkpoint.every_steps=10",
        workers=3,
        sync="server:count=1,mode=stale,staleness=2",
        faults=faults,
    )
    assert report.step == 24 and report.recoveries == 1
    assert proven(report.run).steps == 24


def test_a_slow_worker_does_not_slow_the_others(go: Go) -> None:
    """It takes ten times as long, so it does about a tenth; every record is consumed once all the
    same."""
    report = go("train.steps=44", faults=FaultPlan().slow(rank=2, at_step=0, times=10), kind="lstm")
    shares = proven(report.run).by_worker
    assert shares[2].steps + shares[3].steps == 44
    assert shares[3].steps >= 5 * max(1, shares[2].steps)


def test_one_worker_and_one_server(go: Go) -> None:
    report = go("train.steps=6", workers=1, sync="server:mode=async", kind="cnn-sgd")
    assert report.step == 6 and proven(report.run).by_worker[1].steps == 6


@pytest.mark.parametrize("mode", ["mode=async", "mode=stale,staleness=2"])
def test_there_may_be_more_workers_than_micro_batches(go: Go, mode: str) -> None:
    """Each computes whole steps. One is killed."""
    settings = ["train.micro_batch=32", "train.steps=16"]
    faults = FaultPlan().kill(rank=2, at_step=4, at="compute")
    counted(go(*settings, task=visits(), workers=3, sync=f"server:{mode}", faults=faults))


def test_it_is_scaled_beyond_its_micro_batches(go: Go, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def one(*settings: str, **how: Any) -> mh.Report:
        return go("train.micro_batch=32", *settings, workers=1, **how)

    with while_it_trains(one, run, "server:count=1,mode=async"):
        assert "3 workers since step" in live.scale(run, 3, 60)
    assert proven(run).steps > 0


def test_it_scores_saves_and_goes_on_in_other_ways(go: Go, launcher: Launcher) -> None:
    """What is scored and saved after n steps are the first n of them."""
    settings = ["evaluate.every_steps=4", "checkpoint.every_steps=3", "train.steps=7"]
    report = go(*settings, task=scored_task())
    run = RunDir(Path(report.run))
    scored = [e.step for e in events.read_events(run.events) if isinstance(e, events.Evaluated)]
    saved = [e.step for e in events.read_events(run.events) if isinstance(e, events.Saved)]
    assert scored == [4, 7] and saved == [3, 6, 7]
    for steps, sync in ((10, "allreduce"), (13, "server:count=1,mode=stale,staleness=1")):
        report = mh.resume(
            report.run,
            scored_task(),
            workers=2,
            sync=sync,
            settings=[f"train.steps={steps}"],
            quiet=True,
            launcher=launcher,
        )
    assert report.step == 13 and proven(report.run).steps == 13
    with pytest.raises(RequestError, match="depended on timing"):
        mh.replay(report.run, scored_task(), step=6, launcher=launcher)


def test_commands_while_it_trains(go: Go, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with while_it_trains(go, run, "server:count=1,mode=async"):
        assert "2 workers and 2 servers since step" in live.scale(run, None, 60, servers=2)
        live.change(run, ["lr=0.002"], 60)
        assert "1 worker and 1 servers since step" in live.scale(run, 1, 60, servers=1)
    assert proven(run).steps > 0
    assert '"staleness"' in (run / "status.json").read_text()


def test_what_is_not_finite_is_named_and_never_pushed(go: Go) -> None:
    with pytest.raises(RunFailed) as error:
        go(task=replace(make("cnn"), loss=not_a_number))
    assert "loss is nan" in str(error.value) and "micro-batch" in str(error.value)


@pytest.mark.parametrize(
    ("sync", "settings", "said"),
    [
        ("server:mode=stale", [], "set server.staleness"),
        ("server:mode=async,staleness=2", [], 'is for server.mode = "stale"'),
        ("server:staleness=2", [], 'is for server.mode = "stale"'),
        ("server:mode=stale,staleness=-1", [], "server.staleness must be at least 0"),
        ("server:mode=asink", [], "server.mode"),
        ("server:mode=async", ["train.ema=0.9"], "train.ema is not there"),
        ("server:mode=async", ["train.not_finite=skip"], "train.not_finite"),
    ],
)
def test_what_cannot_be_is_said(go: Go, sync: str, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        go(*settings, sync=sync)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"), [("own", "not cut"), ("max_norm", "max_norm"), ("odd", "mean_seen")]
)
def test_tasks_that_need_all_at_the_same_step(go: Go, kind: str, said: str) -> None:
    with pytest.raises((RequestError, RunFailed)) as error:
        go(kind=kind)
    assert said in str(error.value)


def test_whoever_did_not_finish_is_made_up_for_by_one(go: Go) -> None:
    """All steps are done, all others have left."""
    report = go("train.steps=4", faults=FaultPlan().kill(rank=3, at_step=4, at="save"))
    assert report.step == 4 and report.recoveries == 1 and proven(report.run).steps == 4
