"""Data sets of Hugging Face: the bits of a plain loop, one copy for all workers, splits by name."""

import importlib.util
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from manyhands.data.open_data import open_data
from manyhands.data.reading.records import sampled_digest
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.shipping.ship_task import _pickled
from manyhands.values.errors import TaskError
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings
from tests.catalogue.test_catalogue import compare

EXAMPLE = Path(mh.__file__).parent.parent / "examples" / "10_hugging_face.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("hugging_face_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("workers", [1, 3])
def test_the_example_ends_at_the_bits_of_a_plain_loop(
    workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    from manyhands.data.ordering.epoch_order import order

    port = example()
    data = port.sentences(40, seed=3)
    plan = FaultPlan().kill(rank=1, at_step=1, at="gather") if workers > 1 else FaultPlan()
    task = mh.Task(
        model=port.build,
        loss=port.task.loss,
        optimizer=port.task.optimizer,
        data=data,
        collate=port.collate,
    )
    report = mh.train(
        task,
        to=tmp_path / "run",
        workers=workers,
        config={"train": {"batch": 12, "micro_batch": 3, "epochs": 1, "seed": 5}},
        quiet=True,
        launcher=launcher,
        faults=plan,
    )
    case = Case(
        "bert",
        "A port.",
        model=port.build,
        loss=port.task.loss,
        optimizer=port.task.optimizer,
        data=data,
        collate=port.collate,
        settings=Settings(epochs=1),
    )
    expected = reference.train(case, lambda epoch: order(5, epoch, 40)[range(40)].tolist())
    compare(load_file(report.weights), expected)


def made(count: int = 6000) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": [[float(i)] * 4 for i in range(count)]})


def test_workers_have_no_copy(tmp_path: Path) -> None:
    def sent(data: Any) -> tuple[int, int]:
        task = mh.Task(model=torch.nn.Identity(), loss=print, optimizer=print, data=data)
        pickled, outside = _pickled(task, [])
        return len(pickled), sum(raw.nbytes for raw in outside)

    inside, outside = sent(made())
    assert inside < 10_000 and outside > 6000 * 4 * 8  # in memory: what all workers share
    made().save_to_disk(str(tmp_path / "saved"))
    inside, outside = sent(datasets.load_from_disk(str(tmp_path / "saved")))
    assert inside < 10_000 and outside == 0  # on disk: by its name


def test_formats_transforms_and_fingerprints_are_honoured() -> None:
    torched, _ = open_data(made().with_format("torch"), None)
    assert torch.equal(torched.batch(np.asarray([2, 5]))["x"][:, 0], torch.tensor([2.0, 5.0]))
    changed, _ = open_data(
        made().with_transform(lambda batch: {"n": [row[0] * 2 for row in batch["x"]]}), None
    )
    assert changed.batch(np.asarray([2, 5]))["n"].tolist() == [4.0, 10.0]
    plain, again = (open_data(made(), None)[0] for _ in range(2))
    assert sampled_digest(plain) == sampled_digest(again) != sampled_digest(torched)


def test_a_dict_of_splits_is_answered_with_them() -> None:
    both = datasets.DatasetDict({"train": made(3), "test": made(2)})
    says = r"DatasetDict with the splits train, test; choose one: data=...\['train'\], held_out="
    with pytest.raises(TaskError, match=says):
        open_data(both, None)
    with pytest.raises(TaskError, match=r"held_out=...\['test'\]"):
        open_data(made(3), both)
