# SPDX-License-Identifier: Apache-2.0
"""A folder of images. The files are kept as they are: decoding is an encoder's work.

A record is a file; records are numbered in the order of the sorted paths below the folder, other
files not counted. Columns: `image` (the bytes), `label` (the first sub-folder, if the folder has
any) and `file` (the path below the folder). A file that Pillow cannot decode is a bad record.
"""

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from PIL import Image, UnidentifiedImageError

from manyhands.data.sources.access.files import (
    local_path,
    name_of_file,
    open_bytes,
    shown,
    size_of,
)
from manyhands.data.sources.cutting.source import Bad, Chunk, TablePiece, Types
from manyhands.data.sources.values.arrow_casting import piece_of

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")
SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff"}
)

_SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.string()), ("file", pa.string())])


@dataclass(frozen=True, slots=True)
class Images:
    root: str = field(repr=False)  # it may hold secrets
    urls: tuple[str, ...] = field(repr=False)
    """The images below it, sorted."""
    labelled: bool
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, root: str, urls: Sequence[str]) -> "Images":
        """These images, which are below the folder."""
        return cls(root, tuple(urls), any("/" in _below(root, url) for url in urls))

    @property
    def files(self) -> tuple[str, ...]:
        return (shown(self.root),)

    def chunks(self, target_bytes: int) -> list[Chunk]:
        found: list[Chunk] = []
        start = size = 0
        for number, url in enumerate(self.urls):
            nbytes = size_of(url)
            if start < number and size + nbytes > target_bytes:
                found.append(Chunk(0, start, number, start, size))
                start, size = number, 0
            size += nbytes
        return [*found, Chunk(0, start, len(self.urls), start, size)]

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        rows: list[tuple[int, bytes, str | None, str]] = []
        bad: list[Bad] = []
        size = 0
        for number in range(chunk.start, chunk.stop):
            with open_bytes(self.urls[number]) as file:
                data = file.read()
            if (rows or bad) and size + len(data) > target_bytes:
                yield self._piece(rows, bad, types)
                rows, bad, size = [], [], 0
            name = _below(self.root, self.urls[number])
            size += len(data)
            trouble = undecodable(data)
            if trouble:
                bad.append(Bad(shown(self.root), number, -1, f"{name} {trouble}"))
            else:
                rows.append((number, data, self._label(name), name))
        yield self._piece(rows, bad, types)

    def _label(self, name: str) -> str | None:
        folder, slash, _ = name.partition("/")
        return folder if slash else None

    def _piece(
        self, rows: Sequence[tuple[int, bytes, str | None, str]], bad: list[Bad], types: Types
    ) -> TablePiece:
        numbers = np.array([row[0] for row in rows], dtype=np.int64)
        columns = [pa.array([row[i] for row in rows], _SCHEMA.field(i - 1).type) for i in (1, 2, 3)]
        table = pa.table(columns, schema=_SCHEMA)
        table = table if self.labelled else table.drop_columns(["label"])
        return piece_of(table, numbers, file=shown(self.root), types=types, bad=bad)


def undecodable(data: bytes) -> str:
    """Why these bytes are no image; "" when they are one, and whole."""
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            warnings.simplefilter("ignore")
            image.draft("L", (1, 1))  # a JPEG is read to its end, but made as small as can be
            image.load()
    except UnidentifiedImageError:
        return "is no image that can be read" if data else "is empty"
    except Exception as error:  # decoders raise whatever they meet
        return f"cannot be decoded ({str(error) or type(error).__name__})"
    return ""


def _below(root: str, url: str) -> str:
    """The path of a file below the folder, with slashes."""
    path, base = local_path(url), local_path(root)
    if path is not None and base is not None:
        return shown(os.path.relpath(path, base).replace(os.sep, "/"))
    clean, base = shown(url), shown(root).rstrip("/") + "/"
    return clean.removeprefix(base) if clean.startswith(base) else name_of_file(url)
