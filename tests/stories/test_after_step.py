"""Task(after_step=fn): a plain loop that calls it after optimizer.step(), whoever died when."""

import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.testing.namespaces import Network
from manyhands.values.errors import ManyhandsError, TaskError
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.building import Net, linear, net
from tests.catalogue.case import Case, Settings
from tests.catalogue.test_catalogue import compare, named
from tests.support.cluster import Warm
from tests.support.tasks import make

AfterStep = Callable[[Any], None]


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def shorten_some(model: nn.Module) -> None:
    """Only what is too long: nothing at first."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and float(parameter.norm()) > 1.9:
            parameter.mul_(1.9 / parameter.norm())


def replace_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.99


def noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def follow(model: Any) -> None:
    """A target network, which nobody trains, and which is moved to the other now and then."""
    model.calls += 1
    if int(model.calls) % 3 == 0:
        model.target.load_state_dict(model.online.state_dict())
    model.mean.lerp_(model.online.weight.mean(0), 0.1)


def with_target() -> nn.Module:
    made = net(
        lambda m, x: m.head(m.online(x) - m.target(x).detach()),
        online=linear(6, 8),
        target=linear(6, 8),
        head=linear(8, 3),
        calls=lambda: torch.zeros((), dtype=torch.long),
        mean=lambda: torch.zeros(6),
    )()
    assert isinstance(made, Net)
    made.target.requires_grad_(False)
    return made


FLAT = Case(
    "flat",
    "A fused optimizer.",
    model=lambda: nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.Linear(33, 3)),
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
)
TARGET = Case("target", "Weights that nobody trains, and buffers.", model=with_target)
TRIED: list[tuple[Case, AfterStep]] = [
    (FLAT, clip),
    (TARGET, follow),
    (named("step-hook"), noise),
]
MORE: list[tuple[Case, AfterStep]] = [
    (named("muon"), shorten_some),
    (named("mlp"), replace_memory),
]


def plainly(case: Case, act: AfterStep, ema: float | None = None) -> dict[str, dict[str, Tensor]]:
    """What a plain loop comes to, on the same micro-batches."""
    made: list[AveragedModel] = []

    def after(model: nn.Module, step: int, ends_epoch: bool) -> None:
        with torch.no_grad():
            act(model)
        if ema is not None:
            if not made:
                made.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema)))
            made[0].update_parameters(model)

    records, seed = len(case.data["x"]), case.settings.seed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trained = reference.train(
            case, lambda epoch: order(seed, epoch, records)[range(records)].tolist(), after
        )
    finally:
        torch.set_num_threads(threads)
    if not made:
        return {"trained": trained}
    averaged = made[0].module.state_dict()
    # torch averages what nobody trains too; here it is the model's.
    averaged |= {name: value for name, value in trained.items() if name.startswith("target.")}
    return {"trained": trained, "ema": averaged}


def task_of(case: Case, act: AfterStep) -> mh.Task:
    return mh.Task(
        model=case.model,
        loss=case.loss,
        optimizer=case.optimizer,
        data=case.data,
        after_step=act,
    )


def run(case: Case, act: AfterStep, to: Path, launcher: Launcher, **options: Any) -> mh.Report:
    train = {k: v for k, v in asdict(case.settings).items() if v is not None}
    train |= options.pop("train", {})
    options = {"faults": FaultPlan(), **options}
    return mh.train(
        task_of(case, act), to=to, config={"train": train}, quiet=True, launcher=launcher, **options
    )


@pytest.mark.parametrize(
    ("case", "act"),
    [*TRIED, *(pytest.param(*tried, marks=pytest.mark.slow) for tried in MORE)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_it_is_what_a_plain_loop_comes_to_through_a_kill_at_every_moment(
    case: Case, act: AfterStep, launcher: Launcher, tmp_path: Path
) -> None:
    expected = plainly(case, act)["trained"]
    plan = FaultPlan().kill(rank=0, at_step=1, at="after").kill(rank=1, at_step=2, at="update")
    plan = plan.kill(rank=2, at_step=3, at="share").kill(rank=3, at_step=4, at="afterwards")
    for workers, faults in ((3, plan), (1, FaultPlan().kill(rank=0, at_step=2, at="afterwards"))):
        to = tmp_path / str(workers)
        report = run(case, act, to, launcher, workers=workers, faults=faults)
        compare(load_file(report.weights), expected)
        assert report.recoveries >= 1
    compare(
        load_file(run(case, act, tmp_path / "a", launcher, train={"sync": "alone"}).weights),
        expected,
    )


def test_who_dies_in_the_middle_of_it_leaves_nothing_half_done(
    launcher: Launcher, tmp_path: Path
) -> None:
    flag = tmp_path / "dead"

    def noise_then_die(model: Any) -> None:
        """In its third call, after it has written to weights of both kinds, and to a buffer."""
        follow(model)
        for k, parameter in enumerate(model.parameters()):
            parameter.mul_(0.9).add_(torch.rand(()), alpha=1e-3)
            if k == 3 and int(model.calls) == 3 and armed and not flag.exists():
                flag.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)

    armed = False
    expected = plainly(TARGET, noise_then_die, ema=0.9)
    armed = True
    report = run(TARGET, noise_then_die, tmp_path / "run", launcher, workers=2, train={"ema": 0.9})
    assert flag.exists() and report.recoveries == 1
    compare(load_file(report.weights), expected["trained"])
    compare(load_file(Path(report.weights).with_name("ema.safetensors")), expected["ema"])


def test_it_goes_on_over_gloo_when_resumed_and_replayed(launcher: Launcher, tmp_path: Path) -> None:
    expected = plainly(TARGET, follow, ema=0.9)
    base = {k: v for k, v in asdict(Settings()).items() if v is not None and k != "epochs"}
    mh.train(
        task_of(TARGET, follow),
        to=tmp_path / "run",
        workers=2,
        config={
            "train": {**base, "steps": 4, "ema": 0.9, "collective": "gloo"},
            "checkpoint": {"every_steps": 2},
        },
        quiet=True,
        launcher=launcher,
    )
    again = mh.resume(
        tmp_path / "run",
        task_of(TARGET, follow),
        workers=3,
        settings=["train.steps=6", "train.collective=auto"],
        quiet=True,
        launcher=launcher,
    )
    compare(load_file(again.weights), expected["trained"])
    compare(load_file(Path(again.weights).with_name("ema.safetensors")), expected["ema"])
    found = replay(
        tmp_path / "run", task_of(TARGET, follow), step=3, to=6, workers=2, launcher=launcher
    )
    assert found.same and found.first == 2


def trained(model: Any) -> Any:
    return model.online.parameters()


def test_a_step_that_was_skipped_has_none(launcher: Launcher, tmp_path: Path) -> None:
    first = int(order(0, 0, 40)[range(1)][0])

    def loss(model: Any, batch: Any) -> Tensor:
        bad = bool((batch["i"] == first).any())
        return model(batch["x"]).square().mean() * (torch.nan if bad else 1.0)

    data = {"x": torch.ones(40, 6), "i": torch.arange(40)}
    task = mh.Task(
        model=with_target,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(trained(m), lr=0.1),
        after_step=follow,
        data=data,
    )
    train = {"batch": 10, "micro_batch": 5, "epochs": 2, "not_finite": "skip"}
    plan = FaultPlan().kill(rank=0, at_step=0, at="share").kill(rank=1, at_step=4, at="update")
    prints: set[str] = set()
    for faults in (FaultPlan(), plan):
        report = mh.train(
            task,
            to=tmp_path / str(len(prints)),
            workers=2,
            config={"train": train},
            quiet=True,
            launcher=launcher,
            faults=faults,
        )
        assert int(load_file(report.weights)["calls"]) == 6
        prints.add(report.fingerprint)
    assert len(prints) == 1


@pytest.mark.timeout(180)
def test_hosts_call_it_each(
    network: Callable[..., Network], launcher: Launcher, tmp_path: Path
) -> None:
    settings = ("train.batch=32", "train.micro_batch=4", "train.steps=60", "train.ema=0.9")
    with closing(Warm(network(hosts=2), tmp_path)) as warm:
        _, b = warm.net.hosts
        run = warm.train("clipped", *settings, pause_s=0.03, workers="1:2")
        name = warm.start(b)
        run.hosted(name, "has joined")
        run.view_of(2)
        assert run.finish()
        marks = [mh.fingerprint(run.path, weights=w) for w in ("trained", "ema")]
    calm = mh.train(
        make("clipped"), to=tmp_path / "calm", workers=1, settings=[*settings], launcher=launcher
    )
    assert marks == [mh.fingerprint(calm.run, weights=w) for w in ("trained", "ema")]


# ---- what it must not do


def frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def passing(*of_a_hook: Any) -> None: ...


def hooked(model: nn.Module) -> None:
    model.register_forward_hook(passing)


def grown(model: nn.Module) -> None:
    model.another = nn.Parameter(torch.zeros(3))


def replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(8, 6))


def buffered(model: nn.Module) -> None:
    model.register_buffer("seen", torch.zeros(2))


def widened(model: nn.Module) -> None:
    next(model.parameters()).data = torch.zeros(3, 3)


REFUSED: list[tuple[AfterStep, str]] = [
    (frozen, r"after_step changed requires_grad of parameter '0\.weight'"),
    (hooked, "after_step gave a hook to the model"),
    (grown, "parameter 'another' of the model was made"),
    (replaced, r"after_step put another one in the place of parameter '0\.weight'"),
    (buffered, "buffer 'seen' was nothing when the model was built"),
    (widened, r"after_step made a float32\[3, 3\] of parameter '0\.weight'"),
]


@pytest.mark.parametrize(("act", "said"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("sync", ["allreduce", pytest.param("alone", marks=pytest.mark.slow)])
def test_what_it_must_not_do_is_said_by_name(
    act: AfterStep, said: str, sync: str, launcher: Launcher, tmp_path: Path
) -> None:
    with pytest.raises(ManyhandsError, match=said):
        run(named("mlp"), act, tmp_path / "run", launcher, train={"sync": sync})


def test_what_it_raises_is_told_with_its_line(launcher: Launcher, tmp_path: Path) -> None:
    def wrong(model: nn.Module) -> None:
        raise ValueError("no such constraint")

    with pytest.raises(ManyhandsError) as failed:
        run(named("mlp"), wrong, tmp_path / "run", launcher, workers=2)
    told = str(failed.value)
    assert "no such constraint" in told and 'raise ValueError("no such constraint")' in told
    assert Path(__file__).name in told and "recover" not in told
    with pytest.raises(TaskError, match="after_step is not a function"):
        replace(make("cnn"), after_step=3)  # type: ignore[arg-type]


def test_eval_and_threads_end_with_it(launcher: Launcher, tmp_path: Path) -> None:
    def careless(model: nn.Module) -> None:
        model.eval()
        torch.set_num_threads(2)

    prints = {
        run(FLAT, act, tmp_path / str(k), launcher, workers=2).fingerprint
        for k, act in enumerate((careless, lambda model: None))
    }
    assert len(prints) == 1
