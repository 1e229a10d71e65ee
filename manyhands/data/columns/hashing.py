# SPDX-License-Identifier: Apache-2.0
"""Values and records as 64-bit hashes: what splits, samples and duplicates are decided by.

Equal values hash alike whatever their type or chunk: 3 and 3.0, 0.0 and -0.0, every NaN, a list
and a fixed list. Nothing here depends on rows beside the one that is hashed, and no hash may ever
change between releases: prepared data would fall into other splits.
"""

import hashlib
import itertools
import unicodedata
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from manyhands.data.columns.arrays import compute, inner, is_bytes, is_list, is_text, nulls, numbers

Hashes = NDArray[np.uint64]

NULL = np.uint64(0x6E756C6C6E756C6C)
"""The hash of a missing value, of any type."""

_NAN = np.uint64(0x7FF8000000000000)
_START = np.uint64(0x9E3779B97F4A7C15)
_ODD = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_INT_LIMIT = float(1 << 63)
_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
"""The one way in which a whole number is printed: 007 and 7 may be two people."""
_SAMPLED = 4096
"""Values looked at to see whether a column repeats itself."""

_BLOCK = 1 << 18
"""Elements of lists that are looked at together."""


def hash_values(column: pa.ChunkedArray | pa.Array) -> Hashes:
    """One hash per value."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_hash_array(chunk) for chunk in chunks]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint64), *parts])


def hash_rows(table: pa.Table, columns: Iterable[str]) -> Hashes:
    """One hash per row, of these columns in the order of their names."""
    hashes = np.full(table.num_rows, _START)
    places = {name: i for i, name in enumerate(table.column_names)}
    for name in sorted(columns):
        hashes ^= hash_values(table.column(places[name]))
        hashes *= _ODD[0]
        hashes ^= hashes >> np.uint64(32)
    return _scatter(hashes)


def mix64(seed: int | str, ids: NDArray[np.integer]) -> Hashes:
    """A bijection on 64 bits that `seed` names: distinct ids get distinct keys."""
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=16).digest()
    first, second = np.frombuffer(digest, np.uint64)
    values = ids.astype(np.uint64) if ids.dtype != np.int64 else ids.view(np.uint64)
    return _scatter(_scatter(values ^ first) + second)


def fraction(hashes: Hashes) -> NDArray[np.float64]:
    """Hashes as numbers in [0, 1)."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def near(column: pa.ChunkedArray | pa.Array) -> Hashes:
    """One hash per key, alike for keys that people would take for the same.

    Text is compared without case, outer or repeated white space and Unicode variants (NFKC), and
    a whole number written as text equals the number.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_near_array(chunk) for chunk in chunks]
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _near_array(values: pa.Array) -> Hashes:
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if not is_text(values.type):
        return hash_values(values)
    known = values.dictionary_encode()
    texts = pa.array(map(_folded, known.dictionary.to_pylist()), values.type)
    hashes = hash_values(texts)
    whole = compute.match_substring_regex(texts, _WHOLE)
    if compute.any(whole).as_py():
        places = whole.to_numpy(zero_copy_only=False)
        hashes[places] = hash_values(texts.filter(whole).cast(pa.int64()))
    return _looked_up(hashes, known.indices)


def _folded(text: str) -> str:
    if text.isascii():
        return " ".join(text.lower().split())
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", text).split())


# ---- arrays without chunks


def _hash_array(values: pa.Array) -> Hashes:
    codes = _codes(values)
    if is_bytes(values.type) or is_list(values.type) or pa.types.is_dictionary(values.type):
        return codes
    return _with_nulls(_scatter(codes), values)


def _codes(values: pa.Array) -> Hashes:
    """64 bits that are the same exactly for equal values (text and lists: almost surely)."""
    kind = values.type
    if pa.types.is_null(kind):
        return np.full(len(values), NULL)
    if pa.types.is_dictionary(kind):
        return _looked_up(_hash_array(values.dictionary), values.indices)
    if is_bytes(kind):
        return _byte_codes(values)
    if is_list(kind):
        return _list_codes(values)
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    found = numbers(values)
    if found.dtype.kind == "f":
        return _with_nulls(_float_codes(found.astype(np.float64)), values)
    return _with_nulls(found.astype(np.int64, copy=False).view(np.uint64), values)


def _float_codes(numbers: NDArray[np.float64]) -> Hashes:
    whole = (np.floor(numbers) == numbers) & (np.abs(numbers) < _INT_LIMIT)
    bits = numbers.view(np.uint64)
    codes = np.where(np.isnan(numbers), _NAN, bits) * _START  # far from all small integers
    codes[whole] = numbers[whole].astype(np.int64).view(np.uint64)
    return codes


def _byte_codes(values: pa.Array) -> Hashes:
    """Each distinct value is hashed once, where values repeat."""
    beginning = values.slice(0, _SAMPLED)
    if len(values) > _SAMPLED and len(beginning.unique()) < _SAMPLED // 2:
        known = values.dictionary_encode()
        return _looked_up(_byte_codes(known.dictionary), known.indices)
    wide = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    texts = values.cast(pa.large_binary() if wide else pa.binary())
    if values.null_count:
        texts = texts.fill_null(b"")
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, texts.to_pylist()), np.uint64, len(values))
    return _with_nulls(hashes, values)


def _list_codes(values: pa.Array) -> Hashes:
    """Some lists at a time: codes are up to eight times as large as what they stand for."""
    if not len(values):
        return np.empty(0, np.uint64)
    flat, cuts = inner(values)
    rows = max(1, _BLOCK * len(values) // (len(flat) + 1))
    parts: list[Hashes] = []
    for start in range(0, len(values), rows):
        ends = cuts[start : start + rows + 1].tolist()
        codes = _codes(flat.slice(ends[0], ends[-1] - ends[0])).data
        lists = (codes[i - ends[0] : j - ends[0]] for i, j in itertools.pairwise(ends))
        parts.append(np.fromiter(map(xxhash.xxh3_64_intdigest, lists), np.uint64))
    return _with_nulls(np.concatenate(parts), values)


# ---- small things


def _scatter(values: Hashes) -> Hashes:
    """A bijection that spreads any difference over all bits (the end of splitmix64)."""
    values = values + _START
    for odd, shift in zip(_ODD, (30, 27), strict=True):
        values ^= values >> np.uint64(shift)
        values *= odd
    values ^= values >> np.uint64(31)
    return values


def _with_nulls(hashes: Hashes, values: pa.Array) -> Hashes:
    if values.null_count:
        return np.where(nulls(values), NULL, hashes)
    return hashes


def _looked_up(hashes: Hashes, indices: pa.Array) -> Hashes:
    last = len(hashes)
    places = indices.cast(pa.int64()).fill_null(last)
    return np.append(hashes, NULL)[places.to_numpy()]
