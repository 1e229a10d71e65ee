# SPDX-License-Identifier: Apache-2.0
"""Which records of a batch hold NaN or infinity themselves: looked for after a loss became that.

NaN comes first: where there is one, infinities are not told; and where each record has those, they
are meant to be there (a mask is made of them).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from manyhands.values.printable_text import printable

MOST_PLACES, MOST_NAMED, DEEPEST = 3, 8, 5


def not_finite_values(batch: Any, records: Sequence[int]) -> str:
    """`record 7 holds nan in batch['x']`; empty where all values are finite. Of a tensor without a
    row for each record it is told without them."""
    tensors = list(_tensors(batch, "batch", 0))
    for word, looks_so in (("nan", torch.isnan), ("infinite values", torch.isinf)):
        found = [text for place in tensors if (text := _told(place, records, word, looks_so))]
        if found:
            return "; ".join(found[:MOST_PLACES])
    return ""


def _told(
    place: tuple[str, Tensor],
    records: Sequence[int],
    word: str,
    looks_so: Callable[[Tensor], Tensor],
) -> str:
    name, tensor = place
    marked = looks_so(tensor)
    if not bool(marked.any()):
        return ""
    if tensor.dim() == 0 or len(tensor) != len(records):
        return f"{name} holds {word}"
    rows = marked.reshape(len(records), -1).any(1).nonzero().reshape(-1).tolist()
    if looks_so is torch.isinf and len(rows) == len(records) > 1:
        return ""
    named = ", ".join(str(records[row]) for row in rows[:MOST_NAMED])
    more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
    who = f"record {named} holds" if len(rows) == 1 else f"records {named}{more} hold"
    return f"{who} {word} in {name}"


def _tensors(value: Any, place: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Those of a batch that could hold such values, with where they are."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout == torch.strided:
            yield place, value.detach()
    elif depth < DEEPEST:
        for name, inside in _parts(value):
            yield from _tensors(inside, f"{place}{name}", depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return [(f"[{printable(repr(key), 100)}]", inside) for key, inside in items]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names: Sequence[str] = cast("Any", value)._fields
        return [(f".{name}", getattr(value, name)) for name in names]
    if isinstance(value, list | tuple):
        return [(f"[{k}]", inside) for k, inside in enumerate(cast("Sequence[Any]", value))]
    return [(f".{name}", inside) for name, inside in getattr(value, "__dict__", {}).items()]
