# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the others about its micro-batches of a step, and what all learn from it.

A message is a header, one row per micro-batch, and the names of the numbers beside the loss. It is
enough to finish the step: whoever finds the messages of a step that was broken off reads them as
those who wrote them would have.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.accounting.read_digests import joined_digest
from manyhands.training.collective.collective import Bytes
from manyhands.training.compute.micro_batch_gradient import MOST_NUMBERS, Leaf
from manyhands.training.state.replica import StepFacts
from manyhands.training.sync.finite import may_overflow
from manyhands.training.sync.sync import CHANGING_NAMES, MIXED_WEIGHTS
from manyhands.values.errors import (
    AuditMismatch,
    GradientNotFinite,
    LossNotFinite,
    TaskError,
)

# [last command heard, range start, range stop, clip norm or NaN, bytes of names, audited digest,
#  reach of the partial sums (finite.py), by what the losses were multiplied (loss_scale.py)]
HEADER = 8
# Per micro-batch: [loss, weight or NaN, share, records, mark of the names, position, read].
COLUMNS = 7
NAME_BYTES = 2048


@dataclass(slots=True)
class StepTally:
    """A step whose gradients are in place; the same for whoever reads its messages."""

    step: int
    ranges: list[range]
    """Of micro-batches, by rank."""
    rows: NDArray[np.float64]
    """In index order."""
    columns: list[list[float]]
    """The first COLUMNS of them."""
    touched: Sequence[bool]
    """Which parameters received a gradient in any micro-batch."""
    weighted: bool
    clip_norm: float | None
    reaches: list[float]
    """Of the partial sums, by rank."""
    scale: float = 1.0
    """By what all losses were multiplied before backward."""

    @property
    def leaves(self) -> int:
        return len(self.rows)

    @property
    def scales(self) -> list[float]:
        """How much each micro-batch counts: what the loss said, or its share of the records."""
        return self.columns[1] if self.weighted else self.columns[2]

    @property
    def total(self) -> float:
        return sum(self.scales)  # from left to right, always

    @property
    def divisor(self) -> float | None:
        """By what the finished sum is divided, if by anything: the weights' total, the scale."""
        # The scale is a power of two: this is as if by one after the other.
        divisor = (self.total if self.weighted else 1.0) * self.scale
        return divisor if divisor != 1.0 else None

    @property
    def may_overflow(self) -> bool:
        return may_overflow(self.reaches, self.divisor)

    def owner(self, index: int) -> int:
        """The rank that computed a micro-batch."""
        return next(rank for rank, r in enumerate(self.ranges) if index in r)

    def not_finite(self) -> LossNotFinite | GradientNotFinite | None:
        """Why the step must not be taken, if anything is not finite in it."""
        for index, loss in enumerate(self.columns[0]):
            if not math.isfinite(loss):
                return LossNotFinite(self.owner(index), self.step, index, loss, ())
        for rank, reach in enumerate(self.reaches):
            if not math.isfinite(reach):
                return GradientNotFinite(rank, self.step)
        return None


@dataclass(frozen=True, slots=True)
class Form:
    """How messages are laid out: depends on the model alone."""

    parameters: int
    """That can receive gradients."""
    buffer_columns: int

    @property
    def width(self) -> int:
        return COLUMNS + MOST_NUMBERS + self.parameters + self.buffer_columns

    def size_bytes(self, rows: int) -> int:
        return 8 * (HEADER + rows * self.width) + NAME_BYTES

    def sheet(self, rows: int) -> "Sheet":
        return Sheet(self, rows)

    def of_buffers(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The columns of rows that are the buffers'."""
        return rows[..., self.width - self.buffer_columns :]

    def read(self, step: int, everyone: Sequence[Bytes]) -> StepTally:
        """All workers' messages, put in index order."""
        messages = [m.view(np.float64) for m in everyone]
        headers: list[list[float]] = [m[:HEADER].tolist() for m in messages]
        ranges = [range(int(h[1]), int(h[2])) for h in headers]
        width = self.width
        told = [
            m[HEADER : HEADER + len(r) * width] for m, r in zip(messages, ranges, strict=True) if r
        ]
        rows = np.concatenate(told).reshape(-1, width)
        columns: list[list[float]] = rows[:, :COLUMNS].T.tolist()
        unweighted = [math.isnan(w) for w in columns[1]]
        if any(unweighted) and not all(unweighted):
            raise TaskError(MIXED_WEIGHTS)
        at = COLUMNS + MOST_NUMBERS
        touched: list[bool] = rows[:, at : at + self.parameters].max(axis=0).astype(bool).tolist()
        clip, scale = headers[0][3], headers[0][7]
        clip_norm = None if math.isnan(clip) else clip
        reaches = [h[6] for h in headers]
        return StepTally(
            step, ranges, rows, columns, touched, not unweighted[0], clip_norm, reaches, scale
        )

    def learn(
        self,
        cut: Cut,
        tally: StepTally,
        everyone: Sequence[Bytes],
        audited: int | None,
        *,
        skips: bool,
    ) -> StepFacts:
        """The facts of a step that is about to be taken; raises what forbids to take it. `skips`:
        what is not finite does not forbid to go on."""
        headers = [m.view(np.float64)[:HEADER].tolist() for m in everyone]
        if audited is not None and len({h[5] for h in headers} - {0.0}) > 1:
            raise AuditMismatch(cut.step, audited)
        if not skips and (error := tally.not_finite()) is not None:
            raise error
        _see_that_all_was_read(cut, tally)
        if len(set(tally.columns[4])) > 1:
            raise TaskError(CHANGING_NAMES)
        if tally.total == 0:
            raise TaskError(f"all weights that the loss returned in step {cut.step} are 0.")
        return self.facts(tally, everyone)

    def facts(self, tally: StepTally, everyone: Sequence[Bytes]) -> StepFacts:
        """Of a step that may be taken, or was."""
        scales, total = tally.scales, tally.total
        names = _names_of(tally, everyone)
        values: list[list[float]] = tally.rows[:, COLUMNS : COLUMNS + len(names)].T.tolist()
        return StepFacts(
            step=tally.step,
            loss=_mean(tally.columns[0], scales, total),
            records=int(sum(tally.columns[3])),
            agreed=int(min(m.view(np.float64)[0] for m in everyone)),
            numbers={n: _mean(v, scales, total) for n, v in zip(names, values, strict=True)},
            skipped=_in_short(tally),
            read=joined_digest(tally.columns[6]),
        )


class Sheet:
    """The message of one worker, being written."""

    def __init__(self, form: Form, rows: int) -> None:
        self.form = form
        self.message = np.zeros(form.size_bytes(rows) // 8)
        self.rows = self.message[HEADER : HEADER + rows * form.width].reshape(rows, form.width)
        self.names: list[str] = []
        self.digest = 0

    def fill(
        self,
        row: NDArray[np.float64],
        micro_batch: MicroBatch,
        leaf: Leaf,
        parameters: Sequence[Tensor],
    ) -> None:
        weight = math.nan if leaf.weight is None else leaf.weight
        self.names = sorted(leaf.numbers)
        mark = zlib.crc32("\n".join(self.names).encode())
        batch = micro_batch
        told = leaf.loss, weight, batch.share, batch.records, mark, batch.start, batch.read
        row[:COLUMNS] = told
        row[COLUMNS : COLUMNS + len(self.names)] = [leaf.numbers[n] for n in self.names]
        at = COLUMNS + MOST_NUMBERS
        for k, parameter in enumerate(parameters):
            row[at + k] = parameter.grad is not None

    def signed(
        self, heard: int, mine: range, clip_norm: float | None, reach: float, scale: float
    ) -> Bytes:
        """With its header: ready to be sent."""
        names = "\n".join(self.names).encode()[:NAME_BYTES]
        clip = math.nan if clip_norm is None else clip_norm
        told = heard, mine.start, mine.stop, clip, len(names), self.digest, reach, scale
        self.message[:HEADER] = told
        message = self.message.view(np.uint8)
        if names:
            message[-NAME_BYTES:][: len(names)] = np.frombuffer(names, np.uint8)
        return message


def _in_short(tally: StepTally) -> str:
    """What is not finite, if anything."""
    match tally.not_finite():
        case LossNotFinite(args=(_, _, index, loss, *_)):
            if tally.leaves > 1 and not any(math.isfinite(x) for x in tally.columns[0]):
                return f"the loss is {loss} in all micro-batches"
            return f"the loss is {loss} in micro-batch {index}"
        case GradientNotFinite(args=(rank, *_)):
            mine = tally.ranges[rank]
            scaled = f" (loss scale {tally.scale:g})" if tally.scale != 1.0 else ""
            last = mine.stop - 1
            return f"a gradient is not finite in micro-batches {mine.start} to {last}{scaled}"
        case _:
            return ""


def _see_that_all_was_read(cut: Cut, tally: StepTally) -> None:
    """Workers say which positions they fetched; together they must be those of the step."""
    starts, counts, sizes = tally.columns[5], tally.columns[3], cut.sizes
    due = list(accumulate(sizes[:-1], initial=cut.start))
    right = starts == due and counts == list(sizes)
    assert right, f"{cut} was to be read, but from positions {starts} {counts} records were"


def _names_of(tally: StepTally, everyone: Sequence[Bytes]) -> list[str]:
    """The names of the numbers, from the first worker that computed anything."""
    message = next(m for m, r in zip(everyone, tally.ranges, strict=True) if r)
    length = int(message.view(np.float64)[4])
    text = message[-NAME_BYTES:][:length].tobytes().decode(errors="ignore")
    return text.split("\n") if text else []


def _mean(values: Sequence[float], scales: Sequence[float], total: float) -> float:
    """Summed from left to right (numpy's own sum is pairwise and depends on its version)."""
    return sum(v * s for v, s in zip(values, scales, strict=True)) / total
