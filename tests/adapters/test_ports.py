"""The ports in docs/coming_from.md: what stands there is what the examples are, and each has the
bits of its plain version on the same micro-batches, on any number of workers, through a kill."""

# pyright: basic

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.loaded_task import load_task
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings
from tests.catalogue.test_catalogue import compare

ROOT = Path(mh.__file__).parent.parent
PAGE = (ROOT / "docs" / "coming_from.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_loop_in_the_docs_runs_and_the_port_is_the_example() -> None:
    before, after = blocks()[:2]
    names: dict[str, Any] = {"print": lambda *words: names.setdefault("said", words)}
    exec(compile(before, "before", "exec"), names)
    with torch.random.fork_rng():
        names["main"]()
    assert names["said"][0] == "accuracy" and names["said"][1] > 0.8
    assert after in (ROOT / "examples" / "21_from_a_loop.py").read_text()


def trained(
    path: Path, workers: int, settings: list[str], launcher: Launcher, tmp_path: Path
) -> dict[str, torch.Tensor]:
    """The weights; of three workers one is killed."""
    assert len(path.read_text().splitlines()) < 80
    faults = FaultPlan().kill(rank=1, at_step=5, at="update") if workers == 3 else FaultPlan()
    found = mh.train(
        path,
        to=tmp_path / "run",
        workers=workers,
        settings=settings,
        quiet=True,
        launcher=launcher,
        faults=faults,
    )
    return load_file(found.weights)


def shuffled(seed: int, records: int) -> Any:
    return lambda epoch: order(seed, epoch, records)[range(records)].tolist()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_port_of_a_loop_has_the_bits_of_the_loop(
    workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    path = ROOT / "examples" / "21_from_a_loop.py"
    task = load_task(path).task
    case = Case(
        "loop",
        "",
        model=task.model,
        loss=task.loss,
        optimizer=task.optimizer,
        schedule=task.schedule,
        schedule_every="epoch",
        data=task.data,
        settings=Settings(seed=0, batch=64, micro_batch=8, epochs=2),
    )
    found = trained(path, workers, ["train.epochs=2"], launcher, tmp_path)
    compare(found, reference.train(case, shuffled(0, 1500)))


@pytest.fixture(scope="module")
def plain_gpt() -> dict[str, torch.Tensor]:
    made: Any = load_task(ROOT / "examples" / "15_char_gpt.py").module
    case = Case(
        "gpt",
        "",
        model=made.Gpt,
        loss=made.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, total_steps=300),
        data={"text": made.windows(made.TEXT[:-2000])},
        settings=Settings(seed=0, batch=32, micro_batch=8, epochs=1, clip_norm=1.0),
    )
    return reference.train(case, shuffled(0, len(case.data["text"])))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_gpt_has_the_bits_of_a_plain_loop(
    workers: int, plain_gpt: dict[str, torch.Tensor], launcher: Launcher, tmp_path: Path
) -> None:
    path = ROOT / "examples" / "15_char_gpt.py"
    compare(trained(path, workers, ["train.epochs=1"], launcher, tmp_path), plain_gpt)


@pytest.fixture(scope="module")
def plain_reviews() -> dict[str, torch.Tensor]:
    """Padded, smoothed and scored by hand; the schedule hears the accuracy after each epoch."""
    made: Any = load_task(ROOT / "examples" / "23_tokenizer.py").module
    assert made.words[0] == "[PAD]"
    numbers = {word: k for k, word in enumerate(made.words)}
    kept: dict[str, Any] = {}

    def rows(count: int, seed: int) -> list[tuple[list[int], int]]:
        found = made.reviews(count, seed)
        texts = [[numbers[w] for w in ["[CLS]", *t.split()]] for t in found["text"]]
        return list(zip(texts, found["label"], strict=True))

    def padded(records: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
        ids = pad_sequence([torch.tensor(ids) for ids, _ in records], batch_first=True)
        labels = torch.tensor([label for _, label in records])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    def smoothed(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        labels, count = batch["labels"], len(batch["labels"])
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        costs = -F.log_softmax(logits, dim=-1)
        right, spread = costs.gather(1, labels[:, None]), costs.sum(1)
        return 0.9 * (right.sum() / count) + 0.1 * (spread.sum() / (2 * count)), count

    def optimizer(model: Any) -> Any:
        named = list(model.named_parameters())
        decays = [p for n, p in named if "bias" not in n and "LayerNorm" not in n]
        rest = [p for n, p in named if "bias" in n or "LayerNorm" in n]
        groups = [{"params": decays, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.0}]
        made = torch.optim.AdamW(groups, lr=3e-3, fused=True)
        kept["schedule"] = torch.optim.lr_scheduler.ReduceLROnPlateau(
            made, mode="max", patience=0, threshold=0.1
        )
        return made

    def hear(model: Any, step: int, ends_epoch: bool) -> None:
        if not ends_epoch:
            return
        model.eval()
        with torch.no_grad():
            cut = [padded(held[k : k + 8]) for k in range(0, len(held), 8)]
            said = [model(b["input_ids"], b["attention_mask"]).logits.argmax(1) for b in cut]
        model.train()
        right = sum(int((s == b["labels"]).sum()) for s, b in zip(said, cut, strict=True))
        kept["schedule"].step(right / len(held))
        kept.setdefault("rates", []).append(kept["schedule"].get_last_lr()[0])

    held = rows(200, 2)
    case = Case(
        "reviews",
        "",
        model=made.model,
        loss=smoothed,
        optimizer=optimizer,
        data=rows(600, 1),
        collate=padded,
        settings=Settings(seed=42, batch=32, micro_batch=8, epochs=4, clip_norm=1.0),
    )
    found = reference.train(case, shuffled(42, 600), hear)
    assert kept["rates"][2] < 3e-3, "it is no test unless the rate fell"
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_tokenizer_and_its_collator_have_the_bits_of_a_plain_loop(
    workers: int, plain_reviews: dict[str, torch.Tensor], launcher: Launcher, tmp_path: Path
) -> None:
    path = ROOT / "examples" / "23_tokenizer.py"
    compare(trained(path, workers, ["train.epochs=4"], launcher, tmp_path), plain_reviews)
