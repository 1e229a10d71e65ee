"""Interrupted anywhere and resumed with another number of workers: the run that never stopped."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler as lr

import manyhands as mh
from manyhands.accounting import ledger
from manyhands.accounting.proof import check
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.errors import ConfigError, RunDirError
from manyhands.values.events import Saved, read_events
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir, locked
from tests.support.tasks import ConvNet, classify, images, make

BASE = ["train.batch=24", "train.micro_batch=4"]
TOTAL = 9  # 101 records: 5 steps an epoch, the last one short


def run(launcher: Launcher, to: Path, kind: str, workers: int, *settings: str) -> mh.Report:
    return mh.train(
        make(kind),
        to=to,
        workers=workers,
        settings=[*BASE, *settings],
        quiet=True,
        launcher=launcher,
    )


@pytest.mark.parametrize("kind", ["cnn", "cnn-sgd", "transformer", "odd", "augmented"])
def test_resuming_gives_the_bits_of_the_run_that_never_stopped(
    kind: str, launcher: Launcher, tmp_path: Path
) -> None:
    calm = run(launcher, tmp_path / "calm", kind, 2, f"train.steps={TOTAL}")
    for stop in (3, 5):
        folder = tmp_path / f"stopped{stop}"
        run(launcher, folder, kind, 1 + stop % 3, f"train.steps={stop}")
        again = mh.resume(
            folder,
            make(kind),
            workers=stop - 2,
            settings=[f"train.steps={TOTAL}", "train.collective=gloo"],
            quiet=True,
            launcher=launcher,
        )
        assert again.fingerprint == calm.fingerprint


def test_a_killed_run_resumes_from_its_last_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    calm = run(launcher, tmp_path / "calm", "cnn", 3, f"train.steps={TOTAL}")
    with pytest.raises(mh.RunFailed):
        mh.train(
            make("cnn"),
            to=tmp_path / "rough",
            workers=2,
            settings=[
                *BASE,
                f"train.steps={TOTAL}",
                "checkpoint.every_steps=2",
                "recovery.losses=0",
            ],
            quiet=True,
            launcher=launcher,
            faults=FaultPlan().kill(rank=1, at_step=7),
        )
    again = mh.resume(tmp_path / "rough", make("cnn"), quiet=True, launcher=launcher)
    assert again.fingerprint == calm.fingerprint


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = run(launcher, tmp_path / "calm", "cnn", 2, "train.steps=8")
    folder = tmp_path / "run"
    run(launcher, folder, "cnn", 2, "train.steps=6", "checkpoint.every_steps=2")
    weights = folder / "checkpoints" / "step-00000006" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-5] ^= 1
    weights.write_bytes(damaged)
    again = mh.resume(
        folder, make("cnn"), settings=["train.steps=8"], quiet=True, launcher=launcher
    )
    assert again.fingerprint == calm.fingerprint
    said = capsys.readouterr().err
    assert "model.safetensors is damaged" in said and "using step 4 instead" in said


def test_what_cannot_be_resumed_says_why(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(launcher, folder, "cnn", 1, "train.steps=2")

    def resume(**more: object) -> mh.Report:
        return mh.resume(folder, quiet=True, launcher=launcher, **more)  # type: ignore[arg-type]

    with pytest.raises(RunDirError, match="made in Python"):
        resume()
    with pytest.raises(RunDirError, match="is finished"):
        resume(task=make("cnn"))
    with pytest.raises(ConfigError, match=r"train\.batch is part of the result"):
        resume(task=make("cnn"), settings=["train.batch=48"])
    with pytest.raises(
        mh.RequestError, match=r"belongs to another model: 'head.bias' is float32\[5\] there"
    ):
        resume(task=make("lstm"), settings=["train.steps=4"])
    with pytest.raises(RunDirError, match="does not exist"):
        mh.resume(tmp_path / "nowhere", launcher=launcher)


def test_a_run_of_another_torch_says_so_and_how_to_go_on_exactly(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run(launcher, folder, "cnn", 1, "train.steps=2")
    note = folder / "task" / "task.json"
    note.write_text(note.read_text().replace(f'"{torch.__version__}"', '"2.9.1"'))
    mh.resume(folder, make("cnn"), settings=["train.steps=3"], quiet=True, launcher=launcher)
    said = " ".join(capsys.readouterr().err.split())
    assert f"began with torch 2.9.1, this is {torch.__version__}; bits may differ" in said
    assert "pip install torch==2.9.1" in said
    replay(folder, make("cnn"), step=2, launcher=launcher)
    assert "began with torch 2.9.1" in " ".join(capsys.readouterr().err.split())


def test_a_run_can_start_from_the_weights_of_another(launcher: Launcher, tmp_path: Path) -> None:
    first = run(launcher, tmp_path / "first", "cnn", 2, "train.steps=2")
    by_folder, by_file = (
        run(launcher, tmp_path / f"next{i}", "cnn", 2, "train.steps=2", f"train.start_from={p}")
        for i, p in enumerate((tmp_path / "first", first.weights))
    )
    assert by_folder.fingerprint == by_file.fingerprint != first.fingerprint
    with pytest.raises(mh.RequestError, match="another model"):
        run(launcher, tmp_path / "x", "lstm", 1, f"train.start_from={first.weights}")
    assert not (tmp_path / "x").exists(), "a refused request leaves no folder"


SCHEDULES = {
    "multi step": lambda o: lr.MultiStepLR(o, [2, 5, 7]),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, total_iters=3), lr.MultiStepLR(o, [2, 4])], [3]
    ),
    "cosine": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on_where_they_were(name: str, launcher: Launcher, tmp_path: Path) -> None:
    task = mh.Task(
        model=ConvNet,
        loss=classify,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        schedule=SCHEDULES[name],
        data=images(),
    )

    def train(to: Path, steps: int) -> mh.Report:
        return mh.train(
            task,
            to=to,
            workers=2,
            settings=[*BASE, f"train.steps={steps}"],
            quiet=True,
            launcher=launcher,
        )

    calm = train(tmp_path / "calm", TOTAL)
    train(tmp_path / "stopped", 4)
    again = mh.resume(
        tmp_path / "stopped",
        task,
        settings=[f"train.steps={TOTAL}"],
        quiet=True,
        launcher=launcher,
    )
    assert again.fingerprint == calm.fingerprint


def test_one_driver_at_a_time(launcher: Launcher, tmp_path: Path) -> None:
    run(launcher, tmp_path / "run", "cnn", 1, "train.steps=2")
    with (
        locked(RunDir(tmp_path / "run")),
        pytest.raises(RunDirError, match="another process is training in it"),
    ):
        mh.resume(tmp_path / "run", make("cnn"), quiet=True, launcher=launcher)


def test_a_refused_resume_changes_nothing(launcher: Launcher, tmp_path: Path) -> None:
    run(launcher, tmp_path / "run", "cnn", 1, "train.steps=2")
    before = (tmp_path / "run" / "config.toml").read_text()
    for setting in ("checkpoint.keep_best=nope", "train.steps=1"):
        with pytest.raises(mh.RequestError):
            mh.resume(
                tmp_path / "run", make("cnn"), settings=[setting], quiet=True, launcher=launcher
            )
    assert (tmp_path / "run" / "config.toml").read_text() == before


def with_lbfgs() -> mh.Task:
    return mh.Task(
        model=ConvNet,
        loss=classify,
        optimizer=lambda m: torch.optim.LBFGS(m.parameters()),
        data=images(),
    )


def test_a_run_that_died_before_its_first_checkpoint_begins_again(
    launcher: Launcher, tmp_path: Path
) -> None:
    settings = [*BASE, f"train.steps={TOTAL}", "recovery.losses=0"]
    folder, calm = tmp_path / "run", tmp_path / "calm"
    with pytest.raises(mh.RunFailed, match=rf"nothing; begin again: mh.resume\('{folder}'"):
        mh.train(
            make("cnn"),
            to=folder,
            workers=2,
            settings=settings,
            quiet=True,
            launcher=launcher,
            faults=FaultPlan().kill(rank=1, at_step=3),
        )
    with pytest.raises(mh.RequestError, match="LBFGS"):  # that does not cost the run
        mh.resume(folder, with_lbfgs(), quiet=True, launcher=launcher)
    again = mh.resume(folder, make("cnn"), workers=3, quiet=True, launcher=launcher)
    known = mh.train(
        make("cnn"), to=calm, workers=1, settings=settings, quiet=True, launcher=launcher
    )
    assert again.fingerprint == known.fingerprint
    assert check(ledger.read(RunDir(folder).ledger)).ok


@pytest.mark.parametrize("workers", [1, 3])
def test_saving_by_the_clock_changes_no_bit(
    workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    """All workers save after the same step, whichever that is; one of them is killed on the way."""
    folder, long = tmp_path / "run", [*BASE, "train.steps=60", "checkpoint.keep_last=1000"]
    faults = FaultPlan().kill(rank=workers - 1, at_step=25)
    by_clock = [*long, "checkpoint.every_s=0.01"]
    report = mh.train(
        make("cnn"),
        to=folder,
        workers=workers,
        settings=by_clock,
        quiet=True,
        launcher=launcher,
        faults=faults,
    )
    saved = [e.step for e in read_events(RunDir(folder).events) if isinstance(e, Saved)]
    assert len(saved) > 2 and saved[-1] == 60
    calm = run(launcher, tmp_path / "calm", "cnn", 2, *long[2:])
    assert report.fingerprint == calm.fingerprint
    kept = [p.name for p in (tmp_path / "calm" / "checkpoints").iterdir()]
    assert kept == ["step-00000060"], "a run that is over in five minutes saves its last step"
    for step in saved[2:]:
        shutil.rmtree(RunDir(folder).step(step))
    again = mh.resume(folder, make("cnn"), workers=2, quiet=True, launcher=launcher)
    assert again.fingerprint == calm.fingerprint
