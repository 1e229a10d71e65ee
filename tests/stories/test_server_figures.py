"""What servers have to do is told; what they cannot do is refused by name."""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.cli.run_commands import status as print_status
from manyhands.launch.engines.launcher import Launcher
from manyhands.monitor.run_comparison import look_at, rows
from manyhands.stories import live
from manyhands.values import events
from manyhands.values.config import EFFECTS, RunConfig
from manyhands.values.errors import ConfigError, Interrupted, RequestError, RunFailed
from manyhands.values.run_folder import RunDir
from tests.support.tasks import make

SETTINGS = ["train.batch=32", "train.micro_batch=8", "train.steps=12", "recovery.silent_s=1"]

Go = Callable[..., mh.Report]


@pytest.fixture
def go(tmp_path: Path, launcher: Launcher) -> Go:
    def run(
        sync: str,
        *settings: str,
        task: mh.Task | None = None,
        name: str = "run",
        workers: int = 2,
    ) -> mh.Report:
        return mh.train(
            task or make("wide"),
            to=tmp_path / name,
            workers=workers,
            sync=sync,
            settings=[*SETTINGS, *settings],
            quiet=True,
            launcher=launcher,
        )

    return run


def served(run: str | Path) -> list[events.Served]:
    seen = events.read_events(RunDir(Path(run)).events)
    return [event for event in seen if isinstance(event, events.Served)]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_servers_did_is_told_at_the_end(
    go: Go, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = go(f"server:count=2,mode={mode}")
    told = served(report.run)
    assert sum(s.applied for event in told for s in event.servers) == 2 * 12
    (last,) = told
    assert math.isclose(sum(s.share for s in last.servers), 1.0)
    size_bytes = 4 * sum(p.numel() for p in make("wide").model().parameters())
    for each in last.servers:
        assert each.applied == 12 and 0 < each.busy <= 1 and 0 < each.p50_s <= each.p99_s < 60
        # Seconds are not in it: what a push brings to a server is its own part.
        assert math.isclose(
            each.bytes_per_s / each.applied_per_s, each.share * size_bytes, rel_tol=1e-6
        )
    ranks = [s.rank for s in last.servers]
    assert ranks == ([0, 1] if mode == "async" else [2, 3])
    assert sum(last.staleness) == (12 if mode == "async" else 0)
    assert all(s.queue <= 4 for s in last.servers), "a worker has two mailboxes"

    status = json.loads((Path(report.run) / "status.json").read_text())
    assert [s["rank"] for s in status["servers"]] == ranks
    assert sum(status["staleness_counts"]) == sum(last.staleness)
    capsys.readouterr()
    print_status(Path(report.run))
    shown = capsys.readouterr().out
    assert "applied/s" in shown and "p99 ms" in shown
    assert ("steps behind" in shown) == (mode == "async")
    lines = [line for line in shown.splitlines() if "fingerprint" not in line and "run" not in line]
    assert max(len(line.rstrip()) for line in lines) <= 100, shown


def test_runs_without_servers_say_nothing_of_them(go: Go) -> None:
    report = go("allreduce")
    assert served(report.run) == []
    assert json.loads((Path(report.run) / "status.json").read_text())["servers"] == []


# ---- what cannot be


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("transfer=push", "neither pulled nor pushed"),
        ("replicas=2", "as many copies as hosts"),
        ("staleness=1", 'is for server.mode = "stale"'),
        ("mode=bounded", "server.mode"),
        ("mode=stale,staleness=-2", "server.staleness must be at least 0"),
        ("mode=stale,staleness=1.5", "server.staleness"),
        ("count=0", "server.count must be at least 1"),
        ("count=-1", "server.count must be at least 1"),
        ("count=two", "server.count"),
    ],
)
def test_settings_that_cannot_be(go: Go, tmp_path: Path, given: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        go(f"server:{given}")
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()
    section, _, value = given.rpartition(",")[2].partition("=")
    if section in ("transfer", "replicas"):
        with pytest.raises(ConfigError, match="there is nothing to choose"):
            RunConfig().with_settings([f"server.{section}={value}"])


def line(features: int = 4) -> mh.Task:
    """Two tensors of a few numbers: two blocks."""
    x = torch.randn(64, features, generator=torch.Generator().manual_seed(0))
    return mh.Task(
        model=lambda: nn.Linear(features, 1),
        loss=lambda m, b: (m(b["x"])[:, 0] - b["y"]).square().mean(),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
        data={"x": x, "y": x.sum(1)},
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_more_servers_than_there_is_to_share_out(go: Go, tmp_path: Path, mode: str) -> None:
    with pytest.raises(RequestError) as error:
        go(f"server:count=3,mode={mode}", task=line())
    said = str(error.value)
    assert "server.count = 3" in said and "blocks of 16,384 numbers" in said
    assert "this model has 2" in said
    assert not (tmp_path / "run").exists(), "nothing was computed"
    assert go(f"server:count=2,mode={mode}", task=line()).step == 12


def test_far_too_many_are_refused_by_the_first_process(
    go: Go, tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = list[int](), launcher.start

    def counted(worker: int, *given: Any) -> Any:
        started.append(worker)
        return start(worker, *given)

    monkeypatch.setattr(launcher, "start", counted)
    with pytest.raises(RequestError, match=r"server\.count = 99.*this model has 2"):
        go("server:count=99", task=line())
    assert started == [0]
    assert not (tmp_path / "run").exists()


def test_whole_tensors_are_counted_where_they_are_not_cut(go: Go) -> None:
    task = replace(line(), optimizer=lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1))
    with pytest.raises(RequestError, match="whole tensors, of which this model has 2"):
        go("server:count=3", task=task)


def test_servers_that_get_nothing_all_the_same_are_pointed_out(go: Go) -> None:
    """Of four near equal parts of 40,001 numbers, which are four blocks, one is empty."""
    report = go("server:count=4", task=line(40_000))
    warned = [
        e.text
        for e in events.read_events(RunDir(Path(report.run)).events)
        if isinstance(e, events.Warned)
    ]
    assert any("1 of the 4 servers get nothing to update" in text for text in warned), warned


def test_scaling_beyond_that_is_refused_and_the_run_goes_on(go: Go, tmp_path: Path) -> None:
    def train() -> None:
        with pytest.raises(Interrupted):
            go("server:count=1", "train.steps=100000", "recovery.silent_s=60", task=line())

    thread = threading.Thread(target=train)
    thread.start()
    run = tmp_path / "run"
    try:
        deadline = time.monotonic() + 60
        while not (run / "status.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(RequestError, match="in 2 parts at the most"):
            live.scale(run, None, 60, servers=3)
        assert "2 servers since step" in live.scale(run, None, 60, servers=2)
    finally:
        live.stop(run, 60)
        thread.join(60)


# ---- what is not finite


class Lengths(nn.Module):
    """The gradient of its norm is NaN where the input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.scale = nn.Linear(6, 1), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + 0.01 * self.scale(x).pow(2).sum(1, keepdim=True).sqrt()


BAD = 21


def lengths(*, huge: float = 1.0, bad: bool = True) -> mh.Task:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    if bad:
        x[BAD] = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean() * huge

    return mh.Task(
        model=Lengths,
        loss=loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        data={"x": x, "y": x.sum(1, keepdim=True)},
    )


MODES = ["mode=sync", "mode=async", "mode=stale,staleness=2"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", [[], ["train.clip_norm=0.5"]])
def test_a_gradient_that_is_not_finite_names_worker_step_and_parameter(
    go: Go, mode: str, clip: list[str]
) -> None:
    with pytest.raises(RunFailed) as failed:
        go(f"server:count=1,{mode}", *clip, task=lengths())
    verdict = failed.value.verdict
    assert "the gradient of 'scale.weight' is not finite at step" in verdict, verdict
    assert "micro-batch" in verdict and f" {BAD}" in verdict and "rank " in verdict, verdict
    apart = mode != "mode=sync"
    assert ("It was not pushed" in verdict) == apart, verdict
    assert ("The step was not taken" in verdict) != apart
    assert ('train.not_finite = "skip"' in verdict) != apart, "which is refused there"


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_is_not_finite_names_worker_step_and_records(go: Go, mode: str) -> None:
    with pytest.raises(RunFailed) as failed:
        go(f"server:count=1,{mode}", task=lengths(huge=math.nan, bad=False))
    verdict = failed.value.verdict
    assert "the loss is nan at step" in verdict and "records" in verdict, verdict


# ---- what of the result follows from them


def test_modes_say_that_weights_depend_on_timing_and_runs_that_they_did(
    go: Go, launcher: Launcher
) -> None:
    assert (EFFECTS["server.mode"], EFFECTS["server.staleness"]) == ("timing", "timing")
    assert EFFECTS["server.count"] == "nothing"
    task = make("cnn")
    exact = go("server:count=1", name="exact", task=task)
    report = go("server:count=1,mode=async", name="mixed", task=task)
    again: dict[str, Any] = {"settings": ["train.steps=20"], "quiet": True, "launcher": launcher}
    mh.resume(report.run, task, workers=2, sync="allreduce", **again)
    both = [look_at(RunDir(Path(run))) for run in (exact.run, report.run)]
    assert rows(both)["weights"] == ["-", "depended on timing in 12 steps"]
    with pytest.raises(RequestError, match="depended on timing"):
        mh.replay(report.run, task, step=5, launcher=launcher)
    after = mh.replay(report.run, task, step=12, to=20, launcher=launcher)
    assert after.same and after.compared_weights == [20]
