# SPDX-License-Identifier: Apache-2.0
"""A BERT classifier of Hugging Face over text, with a tokenizer and `DataCollatorWithPadding`.

As it was written for Trainer: the collator pads each batch, labels are smoothed, the rate falls
when the accuracy rises by less than a tenth. The tokenizer is made of the words that there are.

manyhands train examples/23_tokenizer.py --to runs/text --workers 2
"""

import random
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

import manyhands as mh

GOOD, BAD = ["fine", "lovely", "great", "bright"], ["dull", "awful", "grey", "sad"]
REST = ["the", "film", "was", "a", "and", "very", "not", "music", "story", "end"]


def reviews(count: int, seed: int) -> Dataset:
    """Good if there are more good words than bad ones."""
    draw = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        words = draw.choices(GOOD + BAD + REST, k=draw.randint(4, 12))
        texts.append(" ".join(words))
        labels.append(int(sum((w in GOOD) - (w in BAD) for w in words) > 0))
    return Dataset.from_dict({"text": texts, "label": labels})


words = ["[PAD]", "[UNK]", "[CLS]", *GOOD, *BAD, *REST]
plain = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
)


def tokenized(data: Dataset) -> Dataset:
    return data.map(lambda some: tokenizer(["[CLS] " + t for t in some["text"]]), batched=True)


def model() -> BertForSequenceClassification:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=64, **small)
    return BertForSequenceClassification(config)


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(found.predictions.argmax(1) == found.label_ids))}


task, config = mh.from_hf(
    model,
    tokenized(reviews(600, seed=1)),
    DataCollatorWithPadding(tokenizer),
    {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 5,
        "learning_rate": 3e-3,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"mode": "max", "patience": 0, "threshold": 0.1},
        "metric_for_best_model": "accuracy",
        "eval_strategy": "epoch",
    },
    eval_dataset=tokenized(reviews(200, seed=2)),
    compute_metrics=accuracy,
)
