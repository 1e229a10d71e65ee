# SPDX-License-Identifier: Apache-2.0
"""How records become batches for a model of Hugging Face: by the collator that was given, or the
one that Trainer would choose. Records of different lengths that this one cannot pad are told apart
by name, with the collators that can."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.values.errors import TaskError
from manyhands.values.user_frames import place_of


def collate_of(given: Any, tokenizer: Any, columns: frozenset[str] | None) -> "HfCollate":
    """As Trainer chooses it; one with a generator of its own is refused."""
    from transformers import (
        DataCollatorWithPadding,
        PreTrainedTokenizerBase,
        SequenceFeatureExtractor,
        default_data_collator,
    )

    if getattr(given, "seed", None) is not None:
        raise TaskError(
            f"from_hf: {type(given).__name__}(seed={given.seed}) draws from a generator of its "
            "own, which goes on from batch to batch. Leave seed out: torch is seeded for every "
            "micro-batch."
        )
    if given is not None:
        return HfCollate(given, columns)
    if not isinstance(tokenizer, PreTrainedTokenizerBase | SequenceFeatureExtractor):
        return HfCollate(default_data_collator, columns, pads=frozenset())
    pad: Any = DataCollatorWithPadding
    names: Any = getattr(tokenizer, "model_input_names", ())
    return HfCollate(pad(tokenizer), columns, pads=frozenset(names))


@dataclass(frozen=True)
class HfCollate:
    """A collator, given what the model's forward takes (remove_unused_columns)."""

    collator: Callable[[list[Any]], Any]
    columns: frozenset[str] | None
    pads: frozenset[str] | None = None
    """What a collator that nobody chose can pad; None: somebody chose it."""

    def __call__(self, records: list[Any]) -> Any:
        keep = self.columns
        if keep is not None and isinstance(records[0], Mapping):
            records = [{k: v for k, v in r.items() if k in keep} for r in records]
        try:
            batch = self.collator(records)
        except (ValueError, TypeError, RuntimeError) as error:
            ragged = None if self.pads is None else _ragged(records, self.pads)
            if ragged is None:
                raise
            raise TaskError(_how_to_pad(*ragged, padding=bool(self.pads))) from error
        if batch is None:
            place = place_of(self.collator) or type(self.collator).__name__
            raise TaskError(f"from_hf: the collator ({place}) returned None, not a batch.")
        return dict(batch)


def _ragged(records: Sequence[Any], pads: frozenset[str]) -> tuple[str, int, int] | None:
    """The first column of different lengths that is not padded, and two of these lengths."""
    first = records[0]
    if not all(isinstance(record, Mapping) and record.keys() == first.keys() for record in records):
        return None
    for name in first:
        lengths = [_length(record[name]) for record in records]
        if name not in pads and len(set(lengths)) > 1:
            return str(name), min(lengths), max(lengths)
    return None


def _length(value: Any) -> int:
    """-1: it is one number, or text."""
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        return -1
    return len(value) if getattr(value, "shape", None) != () else -1


def _how_to_pad(name: str, least: int, most: int, *, padding: bool) -> str:
    how = f"from_hf: '{name}' has {least} values in one record and {most} in another"
    if padding:
        return (
            f"{how}, and DataCollatorWithPadding, which Trainer takes too where none is given, "
            "does not pad it. Give a collator that does: "
            "collator=DataCollatorForTokenClassification(tokenizer), or DataCollatorForSeq2Seq."
        )
    return (
        f"{how}, and default_data_collator, which Trainer takes too where none is given, does not "
        "pad. Give collator=DataCollatorWithPadding(tokenizer), or processing_class=tokenizer "
        "(then it is chosen); for labels as long as the text, "
        "collator=DataCollatorForTokenClassification(tokenizer) or DataCollatorForSeq2Seq; for "
        "a causal model, collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)."
    )
