# SPDX-License-Identifier: Apache-2.0
"""A run's encoders in the hand: a few raw records → the batch that its model takes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from manyhands.data.encoding.encoders import Encoders
from manyhands.data.encoding.vocabulary import KnownValue
from manyhands.data.serving.encode_records import EncodedBatches, RawReader
from manyhands.data.serving.stored_encoders import Serving
from manyhands.data.sources.cutting.source import AskedTypes, TablePiece
from manyhands.data.sources.values.arrow_casting import piece_of
from manyhands.values.errors import DataError


class RunEncoders:
    """Call it with raw records: dicts, columns, a table of Arrow or a DataFrame. It gives the batch
    that training would have had of them, the label a placeholder where there is none."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @property
    def fitted(self) -> Encoders:
        """By column: how it is encoded, with what was fitted."""
        return self._serving.encoders

    @property
    def label(self) -> str | None:
        return self._serving.label

    @property
    def classes(self) -> list[KnownValue] | None:
        """The names of the classes in the order of their numbers, where the label has any."""
        return self._serving.classes

    def __call__(self, records: Any) -> dict[str, Any]:
        table = _table(records)
        labelled = self.label is not None and self.label in table.column_names
        reader = RawReader(self._serving, with_label=labelled)
        asked = AskedTypes(reader.types())
        piece: TablePiece = piece_of(
            table, np.arange(table.num_rows), file="the records", types=asked
        )
        found = reader.encoded(piece, "the records", 0, loose=False)
        if found.bad:
            raise DataError("\n".join(bad.told(first=0) for bad in found.bad[:5]))
        return EncodedBatches(self._serving, found.table).batch(0, table.num_rows, 0)


def _table(records: Any) -> pa.Table:
    try:
        if isinstance(records, Mapping):
            return pa.table(dict(cast(Mapping[str, Sequence[Any]], records)))
        if hasattr(records, "__arrow_c_stream__"):  # tables of pyarrow, pandas, polars and others
            return pa.table(records)
        return pa.Table.from_pylist(list(cast(Iterable[Any], records)))
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, AttributeError) as error:
        raise DataError(f"these are no records; give dicts, columns or a table: {error}") from None
