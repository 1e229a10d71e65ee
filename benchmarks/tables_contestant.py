# SPDX-License-Identifier: Apache-2.0
"""A work of benchmarks/tables.py as a task: `manyhands train` this file, with --param work=..."""

import torch
from clock import Clock
from tables_work import model, recommender, records

import manyhands as mh


def task(work: str = "movielens") -> mh.Task:
    return mh.Task(
        model=lambda: model(work, mh.Embedding),
        loss=recommender.loss,
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
        schedule=lambda optimizer: Clock(),
        data=records(work),
    )
