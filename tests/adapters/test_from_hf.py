"""Models of Hugging Face as tasks: the bits of a plain loop with transformers' own groups and
schedule, on any number of workers, through a kill; or refused by name."""

# pyright: basic

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.config import from_dict
from manyhands.values.errors import TaskError
from manyhands.values.loaded_task import load_task
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings
from tests.catalogue.test_catalogue import compare

EXAMPLE = Path(mh.__file__).parent.parent / "examples" / "22_bert.py"
STEPS = 2 * math.ceil(400 / 24)


def plain_optimizer(model: Any) -> Any:
    """Written out, as Trainer's documentation has it."""
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decays = get_parameter_names(model, [torch.nn.LayerNorm], patterns)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n in decays], "weight_decay": 0.01},
        {"params": [p for n, p in named if n not in decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.999), eps=1e-8, fused=True)


def plain_schedule(optimizer: Any) -> Any:
    return get_scheduler("linear", optimizer, math.ceil(0.1 * 4 * STEPS / 2), 4 * STEPS // 2)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    made = load_task(EXAMPLE).module
    assert made is not None

    def loss(model: Any, batch: Any) -> Any:
        return model(**batch).loss, len(batch["labels"])

    case = Case(
        "bert",
        "",
        model=made.model,
        loss=loss,
        optimizer=plain_optimizer,
        schedule=plain_schedule,
        data=list(made.sentences(400, seed=1)),
        collate=made.collate,
        settings=Settings(seed=42, batch=24, micro_batch=8, clip_norm=1.0),
    )
    return reference.train(case, lambda epoch: order(42, epoch, 400)[range(400)].tolist())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_example_has_the_bits_of_a_plain_loop(
    workers: int, expected: Any, launcher: Launcher, tmp_path: Path
) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
    faults = FaultPlan().kill(rank=1, at_step=5, at="update") if workers == 3 else FaultPlan()
    found = mh.train(
        EXAMPLE,
        to=tmp_path / "run",
        workers=workers,
        settings=["train.epochs=2"],
        quiet=True,
        launcher=launcher,
        faults=faults,
    )
    compare(load_file(found.weights), expected)
    assert 0 <= found.scores["eval/accuracy"] <= 1


def gpt() -> LlamaForCausalLM:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, intermediate_size=8, **small))


def test_a_causal_model_counts_the_labels_that_it_predicts() -> None:
    records = [{"input_ids": [1, 2, 3, 4], "labels": [5, 2, -100, 4], "other": 1}] * 3
    task, config = mh.from_hf(gpt, records, arguments={"max_steps": 5})
    batch = task.collate(records)  # pyright: ignore[reportOptionalCall]
    assert set(batch) == {"input_ids", "labels"}
    _, weight = task.loss(task.model(), batch)  # pyright: ignore
    assert weight == 3 * 2
    assert config["train"]["steps"] == 5


def test_arguments_are_settings() -> None:
    given = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1.5,
        "max_grad_norm": 0.0,
        "bf16": True,
        "seed": 7,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_f1",
        "dataloader_num_workers": 1,
        "logging_steps": 0.5,
    }
    records = [{"input_ids": [1, 2], "labels": [1, 2]}] * 80
    _, config = mh.from_hf(gpt, records, arguments=given, eval_dataset=records)
    assert config == {
        "train": {"batch": 8, "micro_batch": 4, "seed": 7, "steps": 15, "precision": "bf16"},
        "log": {"every_steps": 8},
        "data": {"readers": 1},
        "evaluate": {"batch": 8, "every_steps": 5},
        "checkpoint": {"every_steps": 10, "keep_last": 2, "keep_best": "eval/f1:max"},
    }
    from_dict(config)


def half(_: Any) -> dict[str, float]:
    return {"accuracy": 0.5}


def test_the_best_step_is_reported_and_a_score_that_nobody_gives_ends_the_run(
    launcher: Launcher, tmp_path: Path
) -> None:
    records = [{"input_ids": [1, 2], "labels": [1, 2]}] * 4
    given = {
        **{"max_steps": 6, "per_device_train_batch_size": 2, "save_total_limit": 1},
        **{"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
        **{"load_best_model_at_end": True, "metric_for_best_model": "accuracy"},
    }

    def train(name: str, **more: Any) -> mh.Report:
        ready = mh.from_hf(
            gpt,
            records,
            arguments={**given, **more},
            eval_dataset=records,
            compute_metrics=half,
        )
        return mh.train(ready, to=tmp_path / name, workers=1, quiet=True, launcher=launcher)

    found = train("right")
    assert (found.step, found.best_step) == (6, 2), "of equal ones the first"
    assert "best step" in repr(found) and mh.report(found.run).best_step == 2
    found.load(step=found.best_step)
    said = "checkpoint.keep_best = eval/acuracy:max: the task's scores are loss, eval/accuracy."
    with pytest.raises(mh.ManyhandsError, match=re.escape(said)):
        train("wrong", metric_for_best_model="acuracy")


def test_the_names_of_trainer_will_do() -> None:
    records, full = [{"input_ids": [1, 2], "labels": [1, 2]}] * 8, {"max_steps": 3}
    ours = mh.from_hf(gpt, records, default_data_collator, full)
    theirs = mh.from_hf(
        gpt, args=full, data_collator=default_data_collator, train_dataset=records, tokenizer=None
    )
    assert ours.config == theirs.config and theirs.task.data is records
    assert ours.task.collate == theirs.task.collate
    for given, named, said in [
        ((gpt, records), {"train_dataset": records}, "train_dataset and dataset are the same"),
        ((gpt, full, None, records), {}, "the data set is a dict of arguments. Trainer takes"),
        ((gpt, {"train": records}), {}, "the data set is dict"),
        ((gpt,), {"args": full}, "no data set"),
        ((gpt, records), {"argument": full}, "no 'argument'; did you mean arguments?"),
        ((gpt, records), {"compute_loss_func": half}, "compute_loss_func cannot be honoured"),
    ]:
        with pytest.raises(TaskError, match=re.escape(said)):
            mh.from_hf(*given, **named)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"deepspeed": {"stage": 2}}, "deepspeed"),
        ({"fsdp": "full_shard"}, "fsdp"),
        ({"optim": "adamw_bnb_8bit"}, "optim = 'adamw_bnb_8bit'"),
        ({"train_sampling_strategy": "batch_rebalance"}, "it makes batches itself"),
        ({"torch_compile_backend": "eager"}, "torch_compile_backend = 'eager'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "hears scores: give eval_strategy"),
        ({"lr_scheduler_type": "greedy"}, "reduce_lr_on_plateau can be"),
        ({"dataloader_drop_last": True, "per_device_train_batch_size": 16}, "leaves nothing"),
        ({"learning_rat": 1.0}, "no 'learning_rat'; did you mean learning_rate"),
        ({"eval_strategy": "epoch"}, "needs eval_dataset"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=re.escape(said)):
        mh.from_hf(gpt, [{"input_ids": [1], "labels": [1]}] * 9, arguments=given)
