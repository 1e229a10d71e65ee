# SPDX-License-Identifier: Apache-2.0
"""Values that encoders have no place for, counted: labels without a class, words not in a list.

Invariant: what is found of all records does not depend on how they were cut in pieces. Examples are
therefore the first ones in the order of their text, not the first that were met.
"""

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import compute, inner, nulls, whole
from manyhands.data.encoding.column_facts import plain_numbers
from manyhands.data.encoding.fitted_encoders import NO_CLASS, Classes, Fitted, Tokens, Vocabulary
from manyhands.data.encoding.vocabulary import MISSING, UNKNOWN

EXAMPLES = 5


class UnseenValues(msgspec.Struct, frozen=True):
    """Of one column."""

    values: int
    """That there are; missing ones are not counted."""
    unknown: int
    """Of these: what its encoder does not know."""
    examples: list[str] = []
    """Of unknown values, as text; of text that is cut in tokens, none."""


def unseen(
    fitted: Mapping[str, Fitted], raw: pa.Table, encoded: pa.Table
) -> dict[str, UnseenValues]:
    """Of every column with a list of known values. The tables have the same rows."""
    found: dict[str, UnseenValues] = {}
    for name, fit in fitted.items():
        match fit:
            case Classes() | Vocabulary():
                values = plain_numbers(whole(raw.column(name)))
                unknown = NO_CLASS if isinstance(fit, Classes) else UNKNOWN
                strange = (encoded.column(name).to_numpy() == unknown) & ~nulls(values)
                there = len(values) - values.null_count
                found[name] = UnseenValues(there, int(strange.sum()), _examples(values, strange))
            case Tokens() if fit.by != "bytes":
                tokens = inner(whole(encoded.column(name)))[0].to_numpy()
                there = int((tokens != MISSING).sum())
                found[name] = UnseenValues(there, int((tokens == UNKNOWN).sum()))
            case _:
                pass
    return found


def merged(parts: Iterable[Mapping[str, UnseenValues]]) -> dict[str, UnseenValues]:
    """Of all pieces together."""
    found: dict[str, UnseenValues] = {}
    for part in parts:
        for name, new in part.items():
            old = found.get(name, UnseenValues(0, 0))
            examples = sorted({*old.examples, *new.examples})[:EXAMPLES]
            found[name] = UnseenValues(old.values + new.values, old.unknown + new.unknown, examples)
    return found


def _examples(values: pa.Array, strange: NDArray[np.bool_]) -> list[str]:
    if not strange.any() or pa.types.is_binary(values.type):
        return []
    texts = values.filter(pa.array(strange)).unique().cast(pa.string())
    return texts.take(compute.array_sort_indices(texts)[:EXAMPLES]).to_pylist()
