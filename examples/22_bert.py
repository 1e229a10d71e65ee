# SPDX-License-Identifier: Apache-2.0
"""A BERT classifier of Hugging Face, with its collator, as it was written for Trainer.

The last lines stood as `Trainer(model, TrainingArguments(...), collator, train, ...).train()`. The
arguments may be TrainingArguments, or a dict of them, as here. The model is small and built from a
config; `model=AutoModelForSequenceClassification.from_pretrained(...)` brings its weights.

manyhands train examples/22_bert.py --to runs/bert --workers 2
"""

import random
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

import manyhands as mh


def sentences(count: int, seed: int) -> Dataset:
    """Tokens of different lengths; the label says whether 7 is among them."""
    draw = random.Random(seed)
    rows = [[draw.randrange(1, 12) for _ in range(draw.randrange(3, 9))] for _ in range(count)]
    return Dataset.from_dict({"input_ids": rows, "label": [int(7 in row) for row in rows]})


def collate(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(record["input_ids"]) for record in records]
    ids = pad_sequence(rows, batch_first=True)
    labels = torch.tensor([record["label"] for record in records])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def model() -> BertForSequenceClassification:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=12, intermediate_size=64, max_position_embeddings=16, **small)
    )


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(found.predictions.argmax(1) == found.label_ids))}


task, config = mh.from_hf(
    model,
    sentences(400, seed=1),
    collate,
    {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 4,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "warmup_steps": 0.1,
        "eval_strategy": "epoch",
    },
    eval_dataset=sentences(100, seed=2),
    compute_metrics=accuracy,
)
