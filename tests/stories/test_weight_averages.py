"""train.ema and train.swa: torch's AveragedModel to the bit, whoever computed and whoever died."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.errors import ConfigError, RunDirError
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings, mlp
from tests.catalogue.test_catalogue import compare, named
from tests.support.tasks import make

DECAY, FIRST = 0.9, 2

FLAT = Case("flat", "A fused optimizer, in one pass over memory where there is native code.",
    model=lambda: nn.Sequential(nn.Linear(6, 333), nn.BatchNorm1d(333), nn.Linear(333, 3)),
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True))  # fmt: skip
CASES = [FLAT, *map(named, ("muon", "step-hook", "mixed-dtypes"))]
MORE = [named(name) for name in ("frozen-part", "channels-last", "tied", "complex")]


def averages_by_torch(case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """Plain PyTorch on the same micro-batches, with torch's own averages."""
    made: dict[str, Any] = {}

    def after(model: nn.Module, step: int, ends_epoch: bool) -> None:
        if not made:
            made["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            made["swa"] = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
        made["ema"].update_parameters(model)
        if ends_epoch and step // 3 + 1 >= FIRST:
            made["swa"].update_parameters(model)

    records = len(case.data["x"])
    seed = case.settings.seed
    expected = reference.train(
        case, lambda epoch: order(seed, epoch, records)[range(records)].tolist(), after
    )
    return {"trained": expected} | {k: a.module.state_dict() for k, a in made.items()}


def task_of(case: Case) -> mh.Task:
    return mh.Task(
        model=case.model, loss=case.loss, optimizer=case.optimizer, data=case.data, held_out=None
    )


def run(
    case: Case, to: Path, launcher: Launcher, *, faults: FaultPlan | None = None, **options: Any
) -> mh.Report:
    train = {k: v for k, v in asdict(case.settings).items() if v is not None}
    more = options.pop("train", {})
    return mh.train(
        task_of(case),
        to=to,
        config={"train": {**train, "ema": DECAY, "swa": FIRST, **more}},
        quiet=True,
        launcher=launcher,
        faults=faults or FaultPlan(),
        **options,
    )


def check(report: mh.Report, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    folder = Path(report.weights).parent
    compare(load_file(report.weights), expected["trained"])
    for name in ("ema", "swa"):
        compare(load_file(folder / f"{name}.safetensors"), expected[name])


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda c: c.name,
)
def known(request: pytest.FixtureRequest) -> tuple[Case, dict[str, dict[str, torch.Tensor]]]:
    case: Case = request.param
    case = replace(case, settings=replace(case.settings, epochs=4))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return case, averages_by_torch(case)
    finally:
        torch.set_num_threads(threads)


def test_they_are_those_of_torch_on_any_number_of_workers_and_through_kills(
    known: tuple[Case, Any], launcher: Launcher, tmp_path: Path
) -> None:
    case, expected = known
    plan = FaultPlan()
    for rank, step, moment in [(1, 2, "update"), (0, 5, "share"), (2, 8, "share")]:
        plan = plan.kill(rank=rank, at_step=step, at=moment)
    check(run(case, tmp_path / "three", launcher, workers=3, faults=plan), expected)
    check(run(case, tmp_path / "alone", launcher, train={"sync": "alone"}), expected)
    if case.name == FLAT.name:
        check(run(case, tmp_path / "one", launcher, workers=1), expected)


def test_they_go_on_when_a_run_is_resumed_and_are_replayed(
    launcher: Launcher, tmp_path: Path
) -> None:
    case = replace(FLAT, settings=Settings(epochs=4))
    expected = averages_by_torch(case)
    base = {k: v for k, v in asdict(case.settings).items() if v is not None and k != "epochs"}
    config: dict[str, dict[str, Any]] = {
        "train": {**base, "ema": DECAY, "swa": FIRST, "steps": 7},
        "checkpoint": {"every_steps": 5, "keep_last": 9},
    }
    for before, after in (("allreduce", "alone"), ("alone", "allreduce")):
        to = tmp_path / before
        config["train"]["sync"] = before
        mh.train(
            task_of(case),
            to=to,
            workers=1 if before == "alone" else 2,
            config=config,
            quiet=True,
            launcher=launcher,
        )
        again = mh.resume(
            to,
            task_of(case),
            workers=1 if after == "alone" else 3,
            settings=["train.steps=12", f"train.sync={after}"],
            quiet=True,
            launcher=launcher,
        )
        check(again, expected)
        found = replay(to, task_of(case), step=6, to=12, workers=2, launcher=launcher)
        assert found.same and found.first == 5 and 12 in found.compared_weights


def test_a_replay_tells_of_an_average_that_differs(launcher: Launcher, tmp_path: Path) -> None:
    from manyhands.checkpoint.commit import FolderStorage
    from manyhands.checkpoint.safetensors_files import encode
    from manyhands.values.run_folder import RunDir

    report = run(FLAT, tmp_path / "run", launcher, workers=1)
    tensors = load_file(Path(report.weights).with_name("ema.safetensors"))
    next(iter(tensors.values())).view(-1)[0] += 1
    storage = FolderStorage(RunDir(Path(report.run)))
    files = dict(storage.manifest(report.step).files)
    folder = Path(report.weights).parent
    wrong = encode(tensors, {"format": "pt", "n_averaged": "6"})
    files["ema.safetensors"] = storage.put(report.step, 99, "ema.safetensors", wrong)
    for name in files.keys() - {"ema.safetensors"}:
        storage.put(report.step, 99, name, [(folder / name).read_bytes()])
    storage.commit(replace_manifest(storage.manifest(report.step), files))
    found = replay(report.run, task_of(FLAT), step=5, workers=1, launcher=launcher)
    (said,) = found.differences
    assert "the ema.safetensors were" in said


def replace_manifest(manifest: Any, files: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(manifest, files=files, attempt=99)


def test_a_step_that_was_skipped_is_in_no_moving_average(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The first and another one of each epoch are skipped, while workers die at both."""
    first, other = int(order(0, 0, 96)[range(1)][0]), int(order(0, 0, 96)[range(40, 41)][0])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        bad = bool((batch["i"] == first).any() | (batch["i"] == other).any())
        return model(batch["x"]).square().mean() * (torch.nan if bad else 1.0)

    made = torch.Generator().manual_seed(1)
    task = mh.Task(
        model=mlp,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data={"x": torch.randn(96, 6, generator=made), "i": torch.arange(96)},
    )
    train = {"batch": 12, "micro_batch": 4, "steps": 16, "not_finite": "skip", "ema": 0.9}
    plan = FaultPlan().kill(rank=0, at_step=0, at="share").kill(rank=1, at_step=3, at="update")
    prints: set[tuple[str, str]] = set()
    for workers, faults in ((1, FaultPlan()), (3, plan)):
        report = mh.train(
            task,
            to=tmp_path / str(workers),
            workers=workers,
            config={"train": train},
            quiet=True,
            launcher=launcher,
            faults=faults,
        )
        prints.add((report.fingerprint, mh.fingerprint(report.run, weights="ema")))
        with safe_open(Path(report.weights).with_name("ema.safetensors"), "pt") as file:
            assert file.metadata()["n_averaged"] == "12"
    assert len(prints) == 1


def test_it_is_scored_in_the_run_and_afterwards(launcher: Launcher, tmp_path: Path) -> None:
    data = reference_data()

    def accuracy(found: torch.Tensor, right: torch.Tensor) -> float:
        return float((found - right).abs().mean())

    task = mh.Task(
        model=mlp,
        loss=lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.05),
        data=data,
        held_out=data,
        predict=lambda m, b: (m(b["x"])[:, 0], b["y"]),
        scores={"apart": accuracy},
    )
    found: dict[str, dict[str, float]] = {}
    for weights in ("trained", "ema"):
        report = mh.train(
            task,
            to=tmp_path / weights,
            workers=2,
            config={
                "train": {"batch": 12, "micro_batch": 3, "steps": 6, "ema": 0.8},
                "evaluate": {"every_steps": 2, "weights": weights},
            },
            quiet=True,
            launcher=launcher,
        )
        found[weights] = dict(report.scores)
        assert mh.evaluate(report.run, task) == report.scores
    assert found["trained"] != found["ema"]
    assert mh.evaluate(tmp_path / "trained", task, weights="ema") == found["ema"]
    assert mh.evaluate(tmp_path / "ema", task, weights="trained") == found["trained"]
    marks = [mh.fingerprint(tmp_path / run) for run in found]
    averages = [mh.fingerprint(tmp_path / run, weights="ema") for run in found]
    assert marks[0] == marks[1] != averages[0] == averages[1]
    # And by plain safetensors, without us.
    model = mlp()
    load_model(model, tmp_path / "ema/checkpoints/step-00000006/ema.safetensors")
    with torch.no_grad():  # in passes of as many records: another number may be rounded otherwise
        said = torch.cat([model(some)[:, 0] for some in data["x"].split(3)])
        assert found["ema"]["apart"] == accuracy(said, data["y"])


def reference_data() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(40, 6, generator=made)
    return {"x": x, "y": (x.sum(1) > 0).long()}


def test_until_its_epoch_has_ended_an_equal_average_is_the_weights(
    launcher: Launcher, tmp_path: Path
) -> None:
    report = mh.train(
        make("cnn"),
        to=tmp_path / "run",
        workers=2,
        settings=["train.batch=24", "train.steps=3", "train.swa=1"],
        quiet=True,
        launcher=launcher,
    )
    assert mh.fingerprint(report.run, weights="swa") == report.fingerprint


def test_what_is_not_kept_is_said_by_name(launcher: Launcher, tmp_path: Path) -> None:
    report = mh.train(
        make("cnn"),
        to=tmp_path / "run",
        workers=1,
        settings=["train.batch=24", "train.steps=2"],
        quiet=True,
        launcher=launcher,
    )
    with pytest.raises(RunDirError, match=r"no weights 'ema'; there are: trained\. It is"):
        mh.fingerprint(report.run, weights="ema")
    with pytest.raises(ConfigError, match=r"train\.ema is part of the result"):
        mh.resume(report.run, make("cnn"), settings=["train.ema=0.9"], quiet=True)
    with pytest.raises(ConfigError, match=r"does not keep: set train\.ema \(as in 0\.999\)"):
        mh.train(make("cnn"), to=tmp_path / "other", settings=["evaluate.weights=ema"])
    with pytest.raises(ConfigError, match=r"train\.ema is a decay between 0 and 1"):
        mh.train(make("cnn"), to=tmp_path / "other", settings=["train.ema=1.5"])
