# SPDX-License-Identifier: Apache-2.0
"""Saving while training goes on: copy now, write later.

`Saver.save` copies the tensors into buffers that are reused from save to save (the only time that
training stands still) and hands them to a thread that writes, hashes and syncs them; all three let
go of the GIL. A second save waits until the first is written, so memory stays bounded.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from manyhands.checkpoint.commit import Buffer, FileRecord
from manyhands.checkpoint.safetensors_files import encode


@dataclass(frozen=True, slots=True)
class Content:
    """One file to be: tensors by name, and strings beside them."""

    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Streamed:
    """One file to be whose bytes are made as they are written, of something that stays as it is."""

    name: str
    chunks: Iterator[Buffer]


OnWritten = Callable[[int, int, dict[str, FileRecord], float], None]


class Putting(Protocol):
    """All that a saver needs of a Storage."""

    def put(self, step: int, attempt: int, name: str, chunks: Iterable[Buffer]) -> FileRecord: ...


class Saver:
    """One per worker. `written(step, attempt, files, blocked_s)` is called from the writing thread,
    and so is `progress`, with every piece that has been written."""

    def __init__(
        self, storage: Putting, written: OnWritten, progress: Callable[[], None] = lambda: None
    ) -> None:
        self.storage, self.written, self.progress = storage, written, progress
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.writing_s = 0.0
        """How long it took to write the last save."""

    def save(self, step: int, attempt: int, contents: Sequence[Content | Streamed]) -> None:
        started = time.perf_counter()
        self.drain()
        copied = [self._copied(c) if isinstance(c, Content) else c for c in contents]
        blocked_s = time.perf_counter() - started
        self._thread = threading.Thread(
            target=self._write, args=(step, attempt, copied, blocked_s), name="saver", daemon=True
        )
        self._thread.start()

    def _copied(self, c: Content) -> Content:
        tensors = {k: self._copy(c.name, k, t) for k, t in c.tensors.items()}
        return Content(c.name, tensors, c.metadata)

    def _copy(self, file: str, name: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get((file, name))
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copies[file, name] = copy
        return copy.copy_(tensor.detach())

    def _write(
        self, step: int, attempt: int, contents: Sequence[Content | Streamed], blocked_s: float
    ) -> None:
        started = time.perf_counter()
        try:
            files = {
                c.name: self.storage.put(step, attempt, c.name, self._watched(c)) for c in contents
            }
            self.writing_s = time.perf_counter() - started
            self.written(step, attempt, files, blocked_s)
        except BaseException as error:
            self._error = error

    def _watched(self, content: Content | Streamed) -> Iterator[Buffer]:
        streamed = isinstance(content, Streamed)
        chunks = content.chunks if streamed else encode(content.tensors, content.metadata)
        for chunk in chunks:
            yield chunk
            self.progress()

    def check(self) -> None:
        """Raise what the writing thread ran into, if anything."""
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Wait until the last save is written; raise if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
