"""Checkpoints: plain files that others can read, written while training goes on."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model

import manyhands as mh
from manyhands.checkpoint import commit
from manyhands.checkpoint.commit import (
    FileRecord,
    FolderStorage,
    StepManifest,
    newest_good,
    to_delete,
)
from manyhands.checkpoint.safetensors_files import encode, fingerprint
from manyhands.checkpoint.saver import Content, Saver
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import CheckpointDamaged
from manyhands.values.run_folder import RunDir
from tests.support.tasks import Tied, make


def test_a_trained_model_loads_in_two_lines(launcher: Launcher, tmp_path: Path) -> None:
    report = mh.train(
        make("transformer"),
        to=tmp_path / "run",
        workers=2,
        settings=["train.batch=32", "train.steps=2"],
        quiet=True,
        launcher=launcher,
    )
    model = Tied()
    missing, unexpected = load_model(model, report.weights)
    assert not missing and not unexpected
    assert model.head.weight is model.embed.weight
    other = report.load_into(Tied())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor(3),
    "c": torch.zeros(0, 4, dtype=torch.bfloat16),
    "d": torch.tensor([True, False]),
    "e": torch.randn(5).to(torch.float16),
}


def test_our_files_are_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(encode(TENSORS, {"format": "pt"})))
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_fingerprint_sees_names_shapes_types_and_bytes(tmp_path: Path) -> None:
    def mark(tensors: dict[str, torch.Tensor]) -> str:
        path = tmp_path / "x.safetensors"
        path.write_bytes(b"".join(encode(tensors, {})))
        return fingerprint(path)

    x = torch.arange(6, dtype=torch.int32)
    marks = {
        mark({"a": x}),
        mark({"b": x}),
        mark({"a": x.view(2, 3)}),
        mark({"a": x.view(torch.float32)}),
        mark({"a": x + (x == 5)}),
    }
    assert len(marks) == 5
    assert mark({"a": x, "b": x}) == mark({"b": x, "a": x})
    (tmp_path / "y").write_bytes(b"garbage")
    with pytest.raises(CheckpointDamaged):
        fingerprint(tmp_path / "y")


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.checkpoints.mkdir()
    written: dict[tuple[int, int], dict[str, FileRecord]] = {}
    progress: list[int] = []
    saver = Saver(
        FolderStorage(run),
        lambda step, attempt, files, blocked: written.update({(step, attempt): files}),
        lambda: progress.append(1),
    )
    x = torch.zeros(1 << 18)
    for step in range(4):
        x.fill_(step)
        saver.save(step, 7, [Content("model", {"x": x}, {})])
        x.fill_(-1)
    saver.drain()
    for step in range(4):
        draft = run.checkpoints / f".step-{step:08d}.7.draft" / "model"
        assert load_file(draft)["x"].unique().tolist() == [step]
    assert written.keys() == {(step, 7) for step in range(4)}
    assert len(progress) >= 4, "whoever watches can see that something is being written"


def test_a_save_that_fails_is_raised_in_the_training_thread(tmp_path: Path) -> None:
    saver = Saver(
        FolderStorage(RunDir(tmp_path / "nowhere")), lambda step, attempt, files, blocked: None
    )
    saver.save(1, 1, [Content("model", {"x": torch.zeros(3)}, {})])
    with pytest.raises(FileNotFoundError):
        saver.drain()


def test_which_steps_are_deleted() -> None:
    assert to_delete([1, 2, 3, 4], keep_last=2, best=None).keys() == {1, 2}
    assert to_delete([4, 3, 2, 1], keep_last=2, best=1).keys() == {2}
    assert to_delete([1], keep_last=3, best=None) == {}


def test_the_newest_good_step_skips_damaged_ones(tmp_path: Path) -> None:
    from manyhands.testing.contracts import StorageContract

    run = RunDir(tmp_path)
    run.checkpoints.mkdir()
    storage = FolderStorage(run)
    for step in (1, 2, 3):
        StorageContract.save(storage, step)
    (run.step(3) / "manifest.json").write_text("{")
    (run.step(2) / "model").unlink()
    step, problems = newest_good(storage)
    assert step == 1 and len(problems) == 2
    assert "manifest.json cannot be read" in problems[0]


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("at", range(5))
def test_a_kill_while_a_step_is_replaced_leaves_one_of_them_whole(
    exchanges: bool, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FolderStorage(RunDir(tmp_path / "run").create())
    first = storage.put(4, 1, "model", [b"before"])
    storage.commit(StepManifest(4, {"model": first}, 1))
    second = storage.put(4, 2, "model", [b"after!"])
    calls = iter(range(100))

    def deadly(do: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **more: object) -> object:
            if next(calls) == at:
                raise Killed
            return do(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        if not exchanges:
            patch.setattr(commit, "_RENAME_EXCHANGE", 1 << 30)  # no file system knows that
        patch.setattr(commit.os, "replace", deadly(os.replace))
        patch.setattr(commit.shutil, "rmtree", deadly(shutil.rmtree))
        with suppress(Killed):
            storage.commit(StepManifest(4, {"model": second}, 2))
    storage.sweep()
    assert newest_good(storage) == (4, [])
    assert storage.get(4, "model").read_bytes() in (b"before", b"after!")
    assert sorted(p.name for p in storage.run.checkpoints.iterdir()) == ["step-00000004"]
