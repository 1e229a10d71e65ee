# SPDX-License-Identifier: Apache-2.0
"""Text as tokens: words, characters or bytes. All tokens of a column in one array, and the cuts.

Words are runs of letters, marks and digits, and every other sign by itself, in lower case and
Unicode's compatible form (NFKC). Lists of text are taken as they are, an element being a word.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import compute, inner, is_list

Cuts = NDArray[np.int64]
"""Where each record's tokens begin, and where the last one's end."""

_SIGNS = r"([^\p{L}\p{M}\p{N}\s])"


def words(values: pa.Array) -> tuple[pa.Array, Cuts]:
    """Records without a text have no words."""
    if is_list(values.type):
        values = values.cast(pa.list_(pa.string()))
        return inner(values.fill_null([]) if values.null_count else values)
    values = values.fill_null("")
    if not compute.all(compute.string_is_ascii(values), min_count=0).as_py():
        values = compute.utf8_normalize(values, "NFKC")
    spaced = compute.replace_substring_regex(compute.utf8_lower(values), _SIGNS, r" \1 ")
    flat, cuts = inner(compute.utf8_split_whitespace(spaced))
    there = compute.not_equal(flat, "")
    kept = np.insert(np.cumsum(there.to_numpy(zero_copy_only=False)), 0, 0)
    return flat.filter(there), kept[cuts]


def chars(values: pa.Array) -> tuple[NDArray[np.uint32], Cuts]:
    """Unicode code points."""
    values = values.fill_null("")
    data, _ = byte_tokens(values)
    points = np.frombuffer(data.tobytes().decode().encode("utf-32-le"), np.uint32)
    return points, _cuts(compute.utf8_length(values))


def byte_tokens(values: pa.Array) -> tuple[NDArray[np.uint8], Cuts]:
    values = values.cast(pa.large_binary()).fill_null(b"")
    if not len(values):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = values.buffers()
    cuts = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    flat = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return flat[cuts[0] : cuts[-1]], cuts - cuts[0]


def shortened(tokens: NDArray[np.int32], cuts: Cuts, length: int) -> tuple[NDArray[np.int32], Cuts]:
    """At most `length` tokens of each record; 0 for all."""
    sizes = np.diff(cuts)
    if not length or not len(sizes) or sizes.max() <= length:
        return tokens, cuts
    places = np.arange(len(tokens)) - np.repeat(cuts[:-1], sizes)
    return tokens[places < length], _cuts(pa.array(np.minimum(sizes, length)))


def token_lists(
    tokens: NDArray[np.int32], cuts: Cuts, missing: NDArray[np.bool_], token: int
) -> pa.Array:
    """list<int32>; a record that is missing (and so has no tokens) gets the one given."""
    if missing.any():
        tokens = np.insert(tokens, cuts[:-1][missing], token).astype(np.int32)
        cuts = cuts + np.insert(np.cumsum(missing), 0, 0)
    return pa.ListArray.from_arrays(pa.array(cuts.astype(np.int32)), pa.array(tokens))


def _cuts(sizes: pa.Array) -> Cuts:
    return np.insert(np.cumsum(sizes.to_numpy().astype(np.int64)), 0, 0)
