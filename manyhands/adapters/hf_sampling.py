# SPDX-License-Identifier: Apache-2.0
"""Which records an epoch of Hugging Face's Trainer visits, and which of them are left out because
they are no whole batch (dataloader_drop_last)."""

from types import SimpleNamespace
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler, Subset

from manyhands.adapters.first_records import first_records
from manyhands.values.errors import TaskError


def kept_records(read: SimpleNamespace, records: int) -> int:
    """How many an epoch visits: with drop_last, as many as fill batches of one device. (The last of
    gradient_accumulation_steps batches may then be missing, as in Trainer, and its step is made of
    those that are there.)"""
    return _whole(read, records, read.per_device_train_batch_size, "the data set")


def kept_held_out(read: SimpleNamespace, dataset: Any) -> Any:
    """Trainer's drop_last is one for both: what fills no batch at the end is not scored either."""
    if dataset is None or not read.dataloader_drop_last:
        return dataset
    kept = _whole(read, len(dataset), read.per_device_eval_batch_size, "eval_dataset")
    return dataset if kept == len(dataset) else Subset(dataset, range(kept))


def _whole(read: SimpleNamespace, records: int, batch: int, what: str) -> int:
    kept = records - records % batch if read.dataloader_drop_last else records
    if records and not kept:
        raise TaskError(
            f"from_hf: dataloader_drop_last leaves nothing of the {records} records of {what}: "
            f"they are fewer than one batch of {batch}."
        )
    return kept


def sampler_of(read: SimpleNamespace, dataset: Any, tokenizer: Any) -> Any:
    """None: every record once, shuffled."""
    size, kept = len(dataset), kept_records(read, len(dataset))
    by_length = getattr(read, "group_by_length", False)
    strategy = (
        "group_by_length" if by_length else getattr(read, "train_sampling_strategy", "random")
    )
    match strategy:
        case "random":
            return None if kept == size else first_records(RandomSampler(range(size)), kept)
        case "sequential":
            sampler = SequentialSampler(range(size))
        case "group_by_length":
            sampler = _by_length(read, dataset, tokenizer)
        case _:
            raise TaskError(
                f"from_hf: train_sampling_strategy = {strategy!r} cannot be honoured: it makes "
                "batches itself, and those are cut by train.batch and train.micro_batch."
            )
    return sampler if kept == size else first_records(sampler, kept)


def _by_length(read: SimpleNamespace, dataset: Any, tokenizer: Any) -> Any:
    """Trainer's own, which draws from torch's generator; that is seeded for every epoch."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    name = read.length_column_name
    known = name in getattr(dataset, "column_names", ())
    return LengthGroupedSampler(
        read.per_device_train_batch_size * read.gradient_accumulation_steps,
        dataset=dataset,
        lengths=list(dataset[name]) if known else None,
        model_input_name=None if tokenizer is None else tokenizer.model_input_names[0],
    )
