"""One worker and one micro-batch per step: a hand-written PyTorch loop, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from manyhands.accounting.deal_micro_batches import steps_per_epoch
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.training.compute.seeds import seed_everything
from tests.support.tasks import RECORDS, make

BATCH, EPOCHS, SEED = 16, 2, 3


def by_hand(task: mh.Task, clip_norm: float | None) -> dict[str, torch.Tensor]:
    assert callable(task.model) and task.optimizer and task.loss
    seed_everything(SEED, "model")
    model = task.model().train()
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer) if task.schedule else None
    per_epoch = steps_per_epoch(RECORDS, BATCH)
    for step in range(EPOCHS * per_epoch):
        epoch, k = divmod(step, per_epoch)
        ids = order(SEED, epoch, RECORDS)[np.arange(k * BATCH, min((k + 1) * BATCH, RECORDS))]
        batch = {name: column[torch.from_numpy(ids)] for name, column in task.data.items()}
        seed_everything(SEED, step, 0, "forward")
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if schedule:
            schedule.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("kind", "clip_norm"),
    [
        ("cnn", None),
        ("cnn-sgd", 0.3),
        ("lstm", 0.1),
        ("transformer", None),
        ("odd", 0.5),
        ("max_norm", 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
def test_it_equals_the_loop_one_would_write(
    kind: str, clip_norm: float | None, launcher: Launcher, tmp_path: Path
) -> None:
    settings = [f"train.batch={BATCH}", f"train.micro_batch={BATCH}", f"train.epochs={EPOCHS}"]
    settings += [f"train.seed={SEED}"] + [f"train.clip_norm={clip_norm}"] * bool(clip_norm)
    report = mh.train(
        make(kind), to=tmp_path / "run", settings=settings, quiet=True, launcher=launcher
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = by_hand(make(kind), clip_norm)
    finally:
        torch.set_num_threads(threads)
    found = load_file(report.weights)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert expected.keys() - found.keys() <= {"head.weight"}  # tied, stored once
