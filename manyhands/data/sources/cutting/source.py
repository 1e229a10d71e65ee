# SPDX-License-Identifier: Apache-2.0
"""What every source of raw records does: say how it is cut, and read any cut.

Invariant: the records of a source are numbered from 0 in the order of its file. Every record is
either a row of exactly one piece or named in exactly one `Bad`: rows in = rows out + rows reported.
How a file is cut never changes which rows it has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.schema import form_of, type_of


class Chunk(msgspec.Struct, frozen=True):
    """The part of one file that one task reads."""

    file: int
    """Which of the source's files."""
    start: int
    stop: int
    """Bytes, or whatever the source counts in; the source alone looks at them."""
    first: int
    """The number of its first record in the file."""
    nbytes: int
    """Roughly how many bytes of raw data it is, for progress and memory."""


class Bad(msgspec.Struct, frozen=True):
    """A record that cannot be used."""

    file: str
    """Its path or URL, without secrets."""
    record: int
    """Its number in the file, from 0."""
    byte: int
    """Where it begins in the (decompressed) file; -1 where a format has no such place."""
    what: str
    text: str = ""
    """The beginning of it, made printable."""

    def __str__(self) -> str:
        return self.told(first=1)

    def told(self, *, first: int) -> str:
        """`first`: the number that the first record of a file has for those who are told."""
        place = f", byte {self.byte:,}" if self.byte >= 0 else ""
        shown = f": {self.text}" if self.text else ""
        return f"{self.file}, record {self.record + first:,}{place}: {self.what}{shown}"


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Some neighbouring records as a table."""

    table: pa.Table
    numbers: NDArray[np.int64]
    """Of each row: the record's number in its file."""
    bad: list[Bad] = field(default_factory=list[Bad])


Types = Mapping[str, pa.DataType]
"""Columns whose type is known; the others are inferred from the piece that is read."""


class AskedTypes(dict[str, pa.DataType]):
    """Types by the names that people give them, which may say how times are written."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__({name: type_of(kind) for name, kind in names.items()})
        self.forms = {name: form_of(kind) for name, kind in names.items()}


def form_asked(types: Types, name: str) -> str:
    """How a column's times are written, as `time_forms` has it; "" where it is not known."""
    return types.forms.get(name, "") if isinstance(types, AskedTypes) else ""


class Source(Protocol):
    """Files of one format. Small and picklable: it travels to the tasks that read."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths or URLs without secrets, in the order in which they are numbered."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was guessed or left out, for people."""
        ...

    def chunks(self, target_bytes: int) -> list[Chunk]:
        """All files cut in parts of about this size, in order. Damage that hides where records
        begin (a torn TFRecord, say) is left to `read` to name."""
        ...

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        """The chunk's records in pieces of at most about `target_bytes` of raw data each."""
        ...
