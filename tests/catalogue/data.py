"""Data: what a record may be, and where it may come from."""

# pyright: basic

import dataclasses
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from tests.catalogue.case import RECORDS, Case, Settings, classify, rows

X, Y = rows()["x"], rows()["y"]

Pair = namedtuple("Pair", ["x", "y"])


class Made(Dataset):
    """Items by a function of their number."""

    def __init__(self, item: Callable[[int], Any], records: int = RECORDS) -> None:
        self.item, self.records = item, records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


class ManyAtOnce(Made):
    """`__getitems__`, which DataLoader would call."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self.item(i) for i in ids]


class NoDataset:
    """It has a length and can be indexed, and that is all."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": X[i], "y": Y[i]}


def pair(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def augmented(i: int) -> dict[str, Any]:
    x = X[i] + 0.1 * torch.randn(6) + float(np.random.normal(0, 0.1))
    return {"x": x.flip(0) if random.random() < 0.5 else x, "y": Y[i]}


def padded(i: int) -> dict[str, Any]:
    """As long as its number says, filled up with zeros."""
    length = 1 + i % 6
    return {"x": F.pad(X[i, :length], (0, 6 - length)), "y": Y[i], "length": length}


def by_length(model: Any, batch: Any) -> Any:
    return classify(model, batch), batch["length"].sum()


def nested(i: int) -> Any:
    return {"in": [X[i, :3], {"rest": (X[i, 3:], i)}], "y": int(Y[i])}


def from_nested(model: Any, batch: Any) -> Tensor:
    first, inner = batch["in"]
    assert inner["rest"][1].dtype == torch.int64
    return F.cross_entropy(model(torch.cat([first, inner["rest"][0]], 1)), batch["y"])


def with_text(model: Any, batch: Any) -> Tensor:
    """Strings stay strings."""
    long = torch.tensor([[float(len(text))] for text in batch["text"]])
    return F.cross_entropy(model(batch["x"] + 0.1 * long), batch["y"])


def python_numbers(i: int) -> Any:
    return {"x": X[i].tolist(), "y": int(Y[i])}


def from_lists(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(torch.stack(batch["x"], 1).float()), batch["y"])


def numpy_scalars(i: int) -> Any:
    return {"x": X[i].numpy(), "y": np.int64(Y[i]), "w": np.float32(1 + i)}


def weighted(model: Any, batch: Any) -> Any:
    return classify(model, batch), batch["w"].sum()


def small_types(model: Any, batch: Any) -> Tensor:
    kinds = {name: column.dtype for name, column in batch.items()}
    assert kinds["flag"] == torch.bool and kinds["byte"] == torch.uint8, kinds
    assert kinds["short"] == torch.int16 and kinds["wave"] == torch.complex64, kinds
    extra = batch["flag"].float() + batch["byte"].float() / 255 + batch["short"].float() / 100
    x = batch["half"].float() + (extra + batch["wave"].abs())[:, None]
    return F.cross_entropy(model(x), batch["y"])


def row_of_numbers(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"].long())


def long_or_short(i: int) -> dict[str, Any]:
    return {"x": X[i, : 1 + i % 6], "y": int(Y[i])}


def pads(records: list[Any]) -> dict[str, Tensor]:
    """To the longest of them, and then to what the model takes."""
    x = pad_sequence([r["x"] for r in records], batch_first=True)
    return {"x": F.pad(x, (0, 6 - x.shape[1])), "y": torch.tensor([r["y"] for r in records])}


def masks(records: list[Any]) -> dict[str, Tensor]:
    """As masking collators do, with randomness of all three."""
    batch = default_collate(records)
    keep = torch.rand(batch["x"].shape) < 0.7 + 0.1 * np.random.random() + 0.1 * random.random()
    return {"x": batch["x"] * keep, "y": batch["y"]}


def spoils(records: list[Any]) -> dict[str, Tensor]:
    """It writes to its records."""
    return {"x": torch.stack([r["x"].mul_(0.5) for r in records]),
            "y": torch.stack([r["y"] for r in records])}  # fmt: skip


def mapped() -> Any:
    """Memory-mapped, from a file that is gone by now."""
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        column = np.memmap(file.name, dtype=np.float32, mode="w+", shape=(RECORDS, 6))
        column[:] = X.numpy()
    return column


small = {
    "flag": X[:, 0] > 0,
    "byte": (X[:, 1].abs() * 50).to(torch.uint8),
    "short": (X[:, 2] * 100).to(torch.int16),
    "wave": torch.complex(X[:, 3], X[:, 4]),
    "half": X.half(),
    "y": Y,
}

CASES = [
    Case("dict-of-numpy", "Columns that are arrays.", data={"x": X.numpy(), "y": Y.numpy()}),
    Case("dict-of-lists", "Columns that are lists.", data={"x": X.double().tolist(), "y": Y},
         loss=lambda m, b: F.cross_entropy(m(b["x"].float()), b["y"])),
    Case("small-types", "bool, uint8, int16, half and complex stay what they are.", data=small,
         loss=small_types),
    Case("strided-columns", "Columns that are views with gaps.", data={
        "x": torch.stack([X, X], 2)[..., 0], "y": torch.stack([Y, Y], 1)[:, 1]}),
    Case("expanded-column", "A column that is one row, repeated.",
         data={"x": X[:1].expand(RECORDS, 6), "y": Y}),
    Case("backward-numpy", "A numpy column with negative strides.",
         data={"x": X.numpy()[::-1], "y": Y.numpy()}, loss=classify),
    Case("column-wants-gradient", "A column that requires_grad is data all the same.",
         data={"x": X.clone().requires_grad_(), "y": Y}),
    Case("mapped-column", "Memory-mapped numpy.", data={"x": mapped(), "y": Y}),
    Case("float-labels", "Labels of another type than the loss wants.",
         data={"x": X, "y": Y.double()}, loss=row_of_numbers),
    Case("tensor-dataset", "Tuples make lists.", data=TensorDataset(X, Y), loss=pair),
    Case("tuples", "Items that are tuples.", data=Made(lambda i: (X[i], Y[i])), loss=pair),
    Case("namedtuples", "They stay namedtuples.", data=Made(lambda i: Pair(X[i], Y[i])),
         loss=lambda m, b: F.cross_entropy(m(b.x), b.y)),
    Case("nested", "Dicts in lists in dicts.", data=Made(nested), loss=from_nested),
    Case("texts", "Strings in a record.", loss=with_text,
         data=Made(lambda i: {"x": X[i], "y": Y[i], "text": "a" * (i % 5)})),
    Case("python-numbers", "Lists of floats: one column for each place.", data=Made(python_numbers),
         loss=from_lists),
    Case("numpy-scalars", "Numbers of numpy.", data=Made(numpy_scalars), loss=weighted),
    Case("padded", "Records of many lengths, filled up, which count by their length.",
         data=Made(padded), loss=by_length),
    Case("augmented", "Randomness of torch, numpy and random in a record.", data=Made(augmented)),
    Case("many-at-once", "__getitems__.", data=ManyAtOnce(lambda i: {"x": X[i], "y": Y[i]})),
    Case("collate-pads", "A collate of one's own, for records of many lengths.", collate=pads,
         data=Made(long_or_short)),
    Case("collate-masks", "A collate that draws random numbers.", collate=masks,
         data=Made(lambda i: {"x": X[i], "y": Y[i]})),
    Case("collate-rows", "Rows of columns are records, too.", collate=masks),
    Case("collate-spoils", "What a collate writes to is not the data.", collate=spoils,
         data={"x": X.clone(), "y": Y}),
    Case("subset", "Part of another.", data=Subset(TensorDataset(X, Y), list(range(27, 1, -1))),
         loss=pair),
    Case("concatenated", "Two, one after the other.", loss=pair,
         data=ConcatDataset([TensorDataset(X[:9], Y[:9]), TensorDataset(X[9:], Y[9:])])),
    Case("views", "Items that are views of one tensor.", loss=pair,
         data=Made(lambda i: (X.t()[:, i], Y[i]))),
    Case("no-dataset", "Anything with a length and an index.", data=NoDataset()),
    Case("a-list", "A list of records.", data=[(X[i], Y[i]) for i in range(RECORDS)], loss=pair),
    Case("records-written-to", "A loss that writes into its batch writes into nothing else.",
         loss=lambda m, b: F.cross_entropy(m(b["x"].mul_(2.0)), b["y"])),
    Case("fewer-than-a-batch", "All records make one step.", data=rows(7)),
    Case("fewer-than-a-micro-batch", "And here one micro-batch.", data=rows(2)),
    Case("one-record", "One record in all.", data=rows(1)),
    Case("no-rest", "Batches that come out even.", data=rows(24)),
    Case("a-rest-of-one", "A single record joins the batch before it.", data=rows(25)),
    Case("micro-batches-of-one", "As many micro-batches as records.",
         settings=Settings(batch=6, micro_batch=1)),
    Case("seven-micro-batches", "A tree that is not full.",
         settings=Settings(batch=14, micro_batch=2)),
    Case("other-seed", "A seed of 63 bits.", settings=Settings(seed=2**62 + 12345)),
    Case("dataclass-items", "What default collation cannot do is answered with the remedy.",
         data=Made(lambda i: dataclasses.make_dataclass("Item", ["x"])(X[i])),
         refused=r"record \d+ is of type Item, of which no batch can be made.*collate="),
    Case("none-in-a-record", "So is None.", data=Made(lambda i: {"x": X[i], "y": None}),
         refused=r"record \d+\['y'\] is None, of which no batch can be made.*collate="),
    Case("ragged", "And records of unequal length.", data=Made(lambda i: (X[i, : 1 + i % 5], Y[i])),
         loss=pair, refused=r"record \d+\[0\] has the shape \(\d,\), where record \d+\[0\] has the "
                            r"shape \(\d,\).*collate="),
]  # fmt: skip
