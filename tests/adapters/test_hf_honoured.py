"""Arguments of Hugging Face's Trainer that change what is computed: each has the bits of a plain
loop that does the same, on several workers, through a kill. And Trainer itself, given the records
in the same order, comes to the same weights (to rounding) and scores."""

# pyright: basic

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ProgressCallback,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.trainer_pt_utils import LengthGroupedSampler

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import ManyhandsError, TaskError
from manyhands.values.planned_faults import FaultPlan
from tests.adapters.test_from_hf import plain_optimizer
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings
from tests.catalogue.test_catalogue import compare

RECORDS, HELD, VOCABULARY = 46, 21, 19
BASE = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "learning_rate": 3e-3,
    "weight_decay": 0.01,
    "seed": 5,
}
SETTINGS = Settings(seed=5, batch=12, micro_batch=4, clip_norm=1.0)


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Of different lengths; the first labels are not to be learnt."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [draw.randrange(1, VOCABULARY) for _ in range(draw.randrange(4, 10))]
        made.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return made


def pad(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def rows(values: list[list[int]], fill: int) -> torch.Tensor:
        longest = max(map(len, values))
        return torch.tensor([v + [fill] * (longest - len(v)) for v in values])

    ids = rows([r["input_ids"] for r in records], 0)
    labels = rows([r["labels"] for r in records], -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def llama() -> LlamaForCausalLM:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCABULARY, intermediate_size=16, attention_dropout=0.1, pad_token_id=0, **small
    )
    return LlamaForCausalLM(config)


def noisy() -> LlamaForCausalLM:
    model = llama()
    embed: Any = model.get_input_embeddings()
    embed.neftune_noise_alpha = 5.0
    embed.register_forward_hook(neftune_post_forward_hook)
    return model


def checkpointed() -> LlamaForCausalLM:
    """As Trainer has it. It also leaves out the cache of keys and values, and so their copies: on
    some processors attention has other bits then."""
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def loss(model: Any, batch: Any) -> Any:
    items = batch["labels"][:, 1:].ne(-100).sum()
    return model(**batch, num_items_in_batch=items).loss, items


def smoothed(model: Any, batch: Any) -> Any:
    """Written out: a tenth of the probability is spread over all tokens."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels, costs = batch["labels"][:, 1:], -F.log_softmax(logits[:, :-1].contiguous(), dim=-1)
    there = labels.ne(-100)
    right = costs.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(~there, 0.0)
    spread = costs.sum(-1).masked_fill(~there, 0.0)
    count = there.sum()
    return 0.9 * (right.sum() / count) + 0.1 * (spread.sum() / (count * VOCABULARY)), count


def shuffled(epoch: int) -> list[int]:
    return order(5, epoch, RECORDS)[range(RECORDS)].tolist()


def by_length(epoch: int) -> list[int]:
    lengths = [len(r["input_ids"]) for r in texts(RECORDS, 1)]
    with torch.random.fork_rng():
        reference.seed(5, epoch, "sampler")
        return list(LengthGroupedSampler(12, lengths=lengths))


CASES: dict[str, tuple[dict[str, Any], Any, Any, Callable[[int], list[int]], int]] = {
    "smoothing": ({"label_smoothing_factor": 0.1}, llama, smoothed, shuffled, 4),
    "drop last": ({"dataloader_drop_last": True}, llama, loss, lambda e: shuffled(e)[:44], 4),
    "noise": ({"neftune_noise_alpha": 5.0}, noisy, loss, shuffled, 4),
    "checkpointed": ({"gradient_checkpointing": True}, checkpointed, loss, shuffled, 4),
    "in order": (
        {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
        *(llama, loss, lambda _: list(range(44)), 4),
    ),
    "by length": ({"train_sampling_strategy": "group_by_length"}, llama, loss, by_length, 4),
    "by length, whole": (
        {"train_sampling_strategy": "group_by_length", "dataloader_drop_last": True},
        *(llama, loss, lambda e: by_length(e)[:44], 4),
    ),
}
"""The arguments, and what a plain loop has in place of them: model, loss, records and steps of an
epoch."""


@pytest.mark.parametrize("name", CASES)
def test_arguments_have_the_bits_of_a_plain_loop(
    name: str, launcher: Launcher, tmp_path: Path
) -> None:
    arguments, model, plain_loss, visits, steps = CASES[name]
    case = Case(
        name,
        "",
        model=model,
        loss=plain_loss,
        optimizer=plain_optimizer,
        schedule=lambda optimizer: get_scheduler("linear", optimizer, 0, 2 * steps),
        data=texts(RECORDS, 1),
        collate=pad,
        settings=SETTINGS,
    )
    task, config = mh.from_hf(llama, texts(RECORDS, 1), pad, {**BASE, **arguments})
    killed = FaultPlan().kill(rank=1, at_step=5, at="update")
    found = mh.train(
        task,
        config=config,
        to=tmp_path / "run",
        workers=3 if name == "smoothing" else 2,
        quiet=True,
        launcher=launcher,
        faults=killed if name in ("smoothing", "by length", "noise") else FaultPlan(),
    )
    assert found.step == 2 * steps
    compare(load_file(found.weights), reference.train(case, visits))


# ---- Trainer itself


class Ordered(Trainer):
    """Visits the records in our order, and so can be compared."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return OurOrder(self.args.seed, len(self.train_dataset))


class OurOrder(torch.utils.data.Sampler[int]):
    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size, self.epoch = seed, size, -1

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(order(self.seed, self.epoch, self.size)[range(self.size)].tolist())

    def __len__(self) -> int:
        return self.size


def tags() -> Any:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForTokenClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            intermediate_size=16,
            max_position_embeddings=16,
            num_labels=VOCABULARY,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **small,
        )
    )


def seq2seq() -> Any:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        keys_to_ignore_at_inference=["past_key_values", "encoder_last_hidden_state"],
    )
    return T5ForConditionalGeneration(config)


def calm_llama() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: k for k, word in enumerate(["[PAD]", *"abcdefghijklmnopqr"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[PAD]")), pad_token="[PAD]"
    )


def for_tags(model: Any) -> Any:
    return DataCollatorForTokenClassification(tokenizer())


def for_seq2seq(model: Any) -> Any:
    """It asks the model for the decoder's inputs."""
    return DataCollatorForSeq2Seq(tokenizer(), model=model)


def right(found: Any) -> dict[str, float]:
    """Of labels that are there; the batches were padded to different lengths."""
    there = found.label_ids != -100
    said = found.predictions.argmax(-1)
    return {"right": float(np.mean((said == found.label_ids)[there])), "all": float(there.sum())}


RAGGED = [
    {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": 0},
    {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": 1},
]
TAGGED = [{**r, "labels": r["input_ids"]} for r in RAGGED]
UNPADDED = r"'input_ids' has 2 values in one record and 3 in another, and default_data_collator"


def test_without_a_collator_records_of_different_lengths_are_padded_or_told() -> None:
    def collated(records: list[Any], **given: Any) -> Any:
        task, _ = mh.from_hf(llama, records, arguments={"max_steps": 1}, **given)
        assert task.collate is not None
        return task.collate(records)

    with pytest.raises(TaskError, match=UNPADDED + r".*collator=DataCollatorWithPadding"):
        collated(RAGGED)
    with pytest.raises(TaskError, match=UNPADDED + r".*DataCollatorForLanguageModeling"):
        collated(TAGGED)
    padded = collated(RAGGED, processing_class=tokenizer())
    assert padded["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert padded["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert padded["labels"].tolist() == [0, 1]
    with pytest.raises(TaskError, match=r"'labels' has 2 .* collator=DataCollatorForTokenClass"):
        collated(TAGGED, processing_class=tokenizer())
    even = [RAGGED[0], RAGGED[0]]
    assert collated(even)["input_ids"].tolist() == [[1, 2], [1, 2]]
    words = [{**r, "labels": ["a"]} for r in even]
    with pytest.raises(ValueError):  # which is about something else
        collated(words)


def test_a_collator_that_was_given_fails_in_its_own_words() -> None:
    def own(records: list[Any]) -> Any:
        if len(records) > 1:
            raise ValueError("mine")
        return None

    task, _ = mh.from_hf(llama, RAGGED, own, {"max_steps": 1})
    assert task.collate is not None
    with pytest.raises(ValueError, match=r"^mine$"):
        task.collate(RAGGED)
    line = own.__code__.co_firstlineno
    with pytest.raises(
        TaskError, match=rf"test_hf_honoured.py:{line}\) returned None, not a batch"
    ):
        task.collate(RAGGED[:1])


def test_a_run_says_how_records_are_padded(launcher: Launcher, tmp_path: Path) -> None:
    task, config = mh.from_hf(llama, RAGGED, arguments={"max_steps": 1})
    with pytest.raises(ManyhandsError, match=UNPADDED):
        mh.train(task, config=config, to=tmp_path / "run", workers=1, quiet=True, launcher=launcher)


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
    "num_train_epochs": 4,
}
ALONE = {"gradient_accumulation_steps": 1}
"""Where a model does not divide by the items of the whole batch, Trainer adds up means."""


@pytest.mark.parametrize(
    ("model", "collator", "given"),
    [
        (calm_llama, lambda _: pad, {"label_smoothing_factor": 0.1, "dataloader_drop_last": True}),
        (calm_llama, lambda _: pad, {**PLATEAU, "learning_rate": 3e-2}),
        (tags, for_tags, {**ALONE, **PLATEAU, "metric_for_best_model": "right"}),
        (tags, for_tags, {**ALONE, "label_smoothing_factor": 0.2}),
        (seq2seq, for_seq2seq, {**ALONE, "label_smoothing_factor": 0.1}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_trainer_itself_comes_to_the_same(
    model: Any, collator: Any, given: dict[str, Any], launcher: Launcher, tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = model()
    collate = collator(first)
    asked = {**BASE, "eval_strategy": "epoch", **given}
    full = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, **asked
    )
    train, held = texts(RECORDS, 1), texts(HELD, 2)
    task, config = mh.from_hf(first, train, collate, full, eval_dataset=held, compute_metrics=right)
    seen: list[dict[str, float]] = []
    found = mh.train(
        task,
        config=config,
        to=tmp_path / "run",
        workers=min(2, asked["gradient_accumulation_steps"]),
        quiet=True,
        launcher=launcher,
        on_evaluate=lambda event: seen.append(dict(event.scores)),
    )
    theirs = Ordered(first, full, collate, train, held, compute_metrics=right)
    with torch.random.fork_rng():
        theirs.train()
    assert theirs.state.global_step == found.step
    if given.keys() >= PLATEAU.keys():
        rate = theirs.optimizer.param_groups[0]["lr"]
        assert rate < asked["learning_rate"], "it is no test unless the rate fell"
    evaluations = [each for each in theirs.state.log_history if "eval_loss" in each]
    assert len(evaluations) == len(seen)
    for their, ours in zip(evaluations, seen, strict=True):
        assert ours["loss"] == pytest.approx(their["eval_loss"], rel=1e-4)
        assert ours["eval/right"] == pytest.approx(their["eval_right"], abs=0.02)
        assert ours["eval/all"] == their["eval_all"]
    for name, weights in load_file(found.weights).items():
        torch.testing.assert_close(
            weights, theirs.model.state_dict()[name].detach(), rtol=1e-3, atol=1e-4
        )


# ---- settings


def test_a_schedule_on_plateaus_and_early_stopping_are_settings() -> None:
    records = texts(24, 1)
    given = {**BASE, **PLATEAU, "eval_strategy": "steps", "eval_steps": 3}
    with pytest.warns(UserWarning, match="takes eval_right for one to be made small"):
        _, config = mh.from_hf(
            llama,
            records,
            pad,
            {**given, "metric_for_best_model": "eval_right", "torch_compile": True},
            eval_dataset=records,
            compute_metrics=right,
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        )
    assert config["evaluate"] == {
        **{"batch": 8, "every_steps": 3, "by": "eval/right:max", "stop_early": 2}
    }
    assert config["train"]["compile"]
    _, config = mh.from_hf(llama, records, pad, given, eval_dataset=records)
    assert config["evaluate"]["by"] == "loss"


def test_a_micro_batch_without_labels_counts_nothing() -> None:
    """Trainer divides by the items of the whole batch; a mean over no labels would be NaN."""
    records = [{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}] * 2
    task, _ = mh.from_hf(llama, records, pad, {"max_steps": 1})
    found: Any = task.loss(task.model(), pad(records))  # pyright: ignore
    assert found[0] == 0 and found[1] == 0


def test_what_is_given_beside_the_arguments_is_refused_by_name() -> None:
    class Own(TrainerCallback):
        pass

    class Silent(ProgressCallback):
        pass

    class Patient(EarlyStoppingCallback):
        pass

    class Seeded:
        seed = 7

    records, scored = texts(24, 1), {"eval_strategy": "epoch", "metric_for_best_model": "loss"}
    late = EarlyStoppingCallback(early_stopping_threshold=0.1)
    for given, said in [
        ({"callbacks": [Own()]}, "the callback Own"),
        ({"callbacks": [Silent()]}, "the callback Silent"),
        ({"callbacks": [Patient()]}, "the callback Patient"),
        ({"callbacks": [late]}, "early_stopping_threshold"),
        ({"callbacks": [EarlyStoppingCallback()], "arguments": {}}, "needs scores"),
        ({"collator": Seeded()}, "Seeded(seed=7)"),
        ({"eval_dataset": {"a": records}}, "the eval_dataset is dict"),
    ]:
        with pytest.raises(TaskError, match=re.escape(said)):
            mh.from_hf(llama, records, **{"arguments": scored, "eval_dataset": records, **given})


def test_metrics_are_given_one_tensor_or_told_how() -> None:
    model = seq2seq()
    task, _ = mh.from_hf(
        model, texts(9, 1), pad, {}, eval_dataset=texts(9, 2), compute_metrics=right
    )
    assert task.predict is not None
    said, labels = task.predict(model, pad(texts(9, 2)))
    assert said.shape[:2] == labels.shape
    model.config.keys_to_ignore_at_inference = ["past_key_values"]
    with pytest.raises(TaskError, match="logits, encoder_last_hidden_state"):
        task.predict(model, pad(texts(9, 2)))


def test_a_tokenizer_pads_and_its_special_tokens_are_the_models() -> None:
    records = [{"input_ids": ids, "label": 1} for ids in ([3, 4], [5, 6, 7])]

    def model() -> Any:
        made = tags()
        made.config.pad_token_id = 9
        return made

    task, _ = mh.from_hf(model, records, processing_class=tokenizer())
    assert task.collate is not None and task.model().config.pad_token_id == 0  # pyright: ignore
    batch = task.collate(records)
    assert batch["input_ids"].tolist() == [[3, 4, 0], [5, 6, 7]]
    assert batch["labels"].tolist() == [1, 1]
