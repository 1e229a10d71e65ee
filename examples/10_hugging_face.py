# SPDX-License-Identifier: Apache-2.0
"""A small BERT over a Hugging Face data set, with a collator that pads.

Sentences have different lengths; every micro-batch is padded to its own longest, and the attention
mask says what is padding. The model is built from a config, so nothing is downloaded; with
`BertForSequenceClassification.from_pretrained(...)` in place of it, weights would be.

pip install datasets transformers
manyhands train examples/10_hugging_face.py --to runs/bert --workers 2
"""

import random

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification

import manyhands as mh

GOOD, BAD = range(10, 40), range(40, 70)


def sentences(count: int, seed: int) -> Dataset:
    """Tokens of which most are good, or most are bad."""
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(count)]
    tokens = [
        [draw.choice(GOOD if (draw.random() < 0.7) == label else BAD) for _ in range(length)]
        for label, length in zip(labels, (draw.randint(4, 24) for _ in labels), strict=True)
    ]
    return Dataset.from_dict({"input_ids": tokens, "label": labels})


def collate(records):
    ids = pad_sequence([torch.tensor(r["input_ids"]) for r in records], batch_first=True)
    labels = torch.tensor([r["label"] for r in records])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def build():
    small = BertConfig(
        vocab_size=70,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return BertForSequenceClassification(small)


task = mh.Task(
    model=build,
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    data=sentences(600, seed=1),
    held_out=sentences(200, seed=2),
    collate=collate,
    predict=lambda model, batch: (model(**batch).logits, batch["labels"]),
    scores={"accuracy": MulticlassAccuracy(2, average="micro")},
)

config = mh.RunConfig(train=mh.TrainConfig(batch=32, micro_batch=8, epochs=4))
