# SPDX-License-Identifier: Apache-2.0
"""Embeddings of micro-batches, as bytes that workers pass to each other.

How large they are is known only when they have been computed, and collectives have room for
messages of a fixed size: so workers first tell each other how much they have, and then send it in
pieces. Every worker ends with the rows of all micro-batches, bit for bit as they were computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from manyhands.training.collective.collective import Bytes
from manyhands.training.sync.leaf_gradients import GatherBytes
from manyhands.values.byte_sizes import shown_bytes
from manyhands.values.errors import TaskError

PIECE_BYTES = 256 << 10
"""What one worker tells the others at a time."""

MOST_BYTES = 4 << 30
"""Of one worker's embeddings. Every worker holds those of all."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """What `embed` made of one micro-batch."""

    tensors: tuple[Tensor, ...]
    """Detached."""
    trained: tuple[bool, ...]
    """Which of them lead back to weights that are trained."""


class _Sheet(msgspec.Struct, array_like=True):
    """How the bytes of a tensor are to be read."""

    dtype: str
    shape: tuple[int, ...]
    trained: bool


def share_embeddings(mine: Sequence[Embedded], gather: GatherBytes) -> list[Embedded]:
    """Those of all workers, in the order of their ranks: called by each of them."""
    sheets = [
        [
            _Sheet(_name(t), tuple(t.shape), need)
            for t, need in zip(e.tensors, e.trained, strict=True)
        ]
        for e in mine
    ]
    head = np.frombuffer(msgspec.msgpack.encode(sheets), dtype=np.uint8)
    parts = [_bytes_of(tensor) for e in mine for tensor in e.tensors]
    everyone = gather_pieces([head, *parts], gather)
    return [found for message in everyone for found in _read(message)]


def gather_pieces(parts: Sequence[Bytes], gather: GatherBytes) -> list[tuple[Bytes, Bytes]]:
    """Everyone's first part, and all others one after the other: of any size, in pieces."""
    lengths = np.array([len(parts[0]), sum(len(part) for part in parts[1:])], dtype=np.int64)
    told = [tuple(m.view(np.int64).tolist()) for m in gather(lengths.view(np.uint8))]
    most = max(first + rest for first, rest in told)
    if most > MOST_BYTES:
        raise TaskError(
            f"embed gave {shown_bytes(most)} for the micro-batches of one worker, and every worker "
            f"is to hold those of all. {shown_bytes(MOST_BYTES)} is the most: return fewer numbers "
            "per record, what batch_loss compares and nothing else, or set a smaller train.batch."
        )
    mine = np.zeros(most, dtype=np.uint8)
    np.concatenate(parts, out=mine[: int(lengths.sum())])
    rows = np.empty((len(told), most), dtype=np.uint8)
    for start in range(0, most, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, most)
        for row, piece in zip(rows, gather(mine[start:stop]), strict=True):
            row[start:stop] = piece
    return [
        (row[:first], row[first : first + rest])
        for row, (first, rest) in zip(rows, told, strict=True)
    ]


def _read(message: tuple[Bytes, Bytes]) -> list[Embedded]:
    head, data = message
    found: list[Embedded] = []
    at = 0
    for sheets in msgspec.msgpack.decode(head.tobytes(), type=list[list[_Sheet]]):
        tensors: list[Tensor] = []
        for sheet in sheets:
            tensor = torch.empty(sheet.shape, dtype=getattr(torch, sheet.dtype))
            raw = _bytes_of(tensor)
            raw[:] = data[at : at + len(raw)]
            at += len(raw)
            tensors.append(tensor)
        found.append(Embedded(tuple(tensors), tuple(sheet.trained for sheet in sheets)))
    assert at == len(data), f"{len(data) - at} bytes of embeddings belong to nothing"
    return found


def same_rows(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """To the last bit: NaN equals itself."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and np.array_equal(_bytes_of(x), _bytes_of(y))
        for x, y in zip(a, b, strict=True)
    )


def joined(everyone: Sequence[Embedded], device: torch.device) -> list[Tensor]:
    """The rows of a whole batch, each tensor as `embed` would have made it of all records; those
    that need a gradient say so."""
    first = everyone[0]
    for index, other in enumerate(everyone):
        if (here := _kinds(other)) != (there := _kinds(first)):
            raise TaskError(
                f"embed gave {_told(there)} for micro-batch 0 and {_told(here)} for micro-batch "
                f"{index}. Rows of all micro-batches are put below each other, so they must be "
                "equally many tensors, alike but for the number of rows. Pad to a fixed size."
            )
    found: list[Tensor] = []
    for k in range(len(first.tensors)):
        # As they come from other workers, however they lay where they were made.
        lying = [e.tensors[k].contiguous(memory_format=torch.contiguous_format) for e in everyone]
        rows = torch.cat(lying).to(device)
        found.append(rows.requires_grad_(any(e.trained[k] for e in everyone)))
    return found


def _kinds(embedded: Embedded) -> list[tuple[str, tuple[int, ...]]]:
    return [(_name(t), tuple(t.shape[1:])) for t in embedded.tensors]


def _told(kinds: list[tuple[str, tuple[int, ...]]]) -> str:
    return " and ".join(f"{name}[{', '.join(['rows', *map(str, rest)])}]" for name, rest in kinds)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> Bytes:
    """The memory of what is dense already, a copy's of what is not."""
    plain = tensor if tensor.is_contiguous() else tensor.contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()
