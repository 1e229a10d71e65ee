# SPDX-License-Identifier: Apache-2.0
"""What a saved step says of records: of raw files through the run's encoders, or of a task's own.

Work is cut by the files (or by the records' numbers) alone, and a batch never holds records of two
pieces of it. So what is said of a record does not depend on how many processes there are, on which
of them has it, or on what it did before.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.nn import Module

from manyhands.data.columns.schema import RECORD_BITS
from manyhands.data.encoding.unseen_values import UnseenValues
from manyhands.data.open_data import open_task
from manyhands.data.ordering.epoch_order import RecordVisit
from manyhands.data.reading.records import Records
from manyhands.data.reading.sampled_records import each_once
from manyhands.data.serving.encode_records import (
    EncodedBatches,
    EncodedPiece,
    RawReader,
    RawWork,
    merged_rows,
)
from manyhands.data.serving.stored_encoders import Serving
from manyhands.data.sources.cutting.source import Bad
from manyhands.evaluation import scores
from manyhands.prediction.named_predictions import PREDICTION, Naming, Outputs, outputs_of
from manyhands.prediction.output_meaning import meaning_of
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.config import RunConfig
from manyhands.values.errors import DataError, ManyhandsError, RunFailed, TaskError
from manyhands.values.forked_children import one_process
from manyhands.values.half_precision import autocast
from manyhands.values.task import Task
from manyhands.values.user_frames import user_traceback
from manyhands.worker.scoring import evaluation_of
from manyhands.worker.trained_model import randomness_kept

ERROR, FILE, RECORD = "error", "file", "record"
_NUMBER = (1 << RECORD_BITS) - 1


class RecordsWork(msgspec.Struct, frozen=True):
    """Some of a task's own records, by their numbers."""

    start: int
    stop: int


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """How predictions are made and what is said of them: the same for every process."""

    batch: int
    naming: Naming
    keep: tuple[str, ...] = ()
    scored: bool = False
    held_out: bool = False
    """Of the task's own records: those that are held out, not those in `data`."""
    files: tuple[str, ...] | None = None
    """What the records of a prepared folder came from; None: their numbers are their own."""
    name_files: bool = False
    """Rows say which file they are of."""
    target_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True)
class PredictedRows:
    """Rows of the result, in order."""

    table: pa.Table
    predicted: bool
    """Whether it has columns of predictions: not where all records are bad."""
    bad: list[Bad]
    absent: frozenset[str]
    """Columns that none of these records has."""
    results: list[scores.BatchResult] = field(default_factory=list[scores.BatchResult])
    unseen: dict[str, UnseenValues] = field(default_factory=dict[str, UnseenValues])
    """By column: values that encoders do not know, where records are scored."""


class Predictor:
    """A model at work. Use it inside of `computing`."""

    def __init__(
        self, task: Task, config: RunConfig, model: Module, serving: Serving | None, wishes: Wishes
    ) -> None:
        if task.predict is None:
            raise TaskError(
                "the task says nothing of how to predict; give it "
                "predict=lambda model, batch: (predictions, targets)."
            )
        self._task, self._config, self.model = task, config, model
        self._predict, self._serving, self._wishes = task.predict, serving, wishes
        self._naming = wishes.naming
        self._own: Records | None = None

    def rows(self, work: RawWork | RecordsWork) -> Iterator[PredictedRows]:
        if isinstance(work, RecordsWork):
            yield from self._of_records(work)
            return
        for piece in self._reader().pieces(work, self._wishes.target_bytes):
            yield self._of_piece(piece)

    def nothing(self) -> PredictedRows:
        """The columns that predictions would have, if there were records."""
        piece = self._reader().nothing()
        try:
            assert self._serving is not None
            batch = EncodedBatches(self._serving, piece.table).batch(0, 0, 0)
            named, _ = self._one(batch, piece.numbers, "nothing")
        except RunFailed:  # a model that wants records
            named = {PREDICTION: pa.nulls(0, pa.float32())}
        table = _in_order(piece, [named], named_file=self._wishes.name_files)
        return PredictedRows(table, True, [], frozenset())

    # ---- raw files

    def _reader(self) -> RawReader:
        assert self._serving is not None
        scored = self._wishes.scored
        return RawReader(self._serving, self._wishes.keep, with_label=scored, counts=scored)

    def _of_piece(self, piece: EncodedPiece) -> PredictedRows:
        assert self._serving is not None
        batches, size = EncodedBatches(self._serving, piece.table), self._wishes.batch
        outputs: list[dict[str, pa.Array]] = []
        results: list[scores.BatchResult] = []
        for start in range(0, len(piece.numbers), size):
            numbers = piece.numbers[start : start + size]
            batch = batches.batch(start, start + size, self._config.train.seed)
            named, result = self._one(batch, numbers, piece.file)
            outputs.append(named)
            results += result
        table = _in_order(piece, outputs, named_file=self._wishes.name_files)
        return PredictedRows(table, bool(outputs), piece.bad, piece.absent, results, piece.unseen)

    # ---- records of the task's own

    def _of_records(self, work: RecordsWork) -> Iterator[PredictedRows]:
        records = self.own()
        for start in range(work.start, work.stop, self._wishes.batch):
            ids = np.arange(start, min(start + self._wishes.batch, work.stop))
            visit = RecordVisit(self._config.train.seed, training=False)
            seed_everything(self._config.train.seed, start, "fetch")
            batch = records.batch(ids, visit)
            named, results = self._one(batch, ids, "the data")
            keys = _keys(np.asarray(records.names(ids), np.int64), self._wishes.files)
            nothing = {ERROR: pa.nulls(len(ids), pa.string())}
            table = pa.table({**keys, **named, **nothing})
            yield PredictedRows(table, True, [], frozenset(), results)

    def own(self) -> Records:
        """The records of the task itself."""
        if self._own is None:
            data, held_out = open_task(self._task, self._config)
            found = held_out if self._wishes.held_out else each_once(data)
            if found is None:
                raise TaskError(
                    "the task holds no records out, so there is nothing to predict; give files."
                )
            self._own = found
        return self._own

    # ---- one batch

    def _one(
        self, batch: Any, numbers: NDArray[np.int64], where: str
    ) -> tuple[dict[str, pa.Array], list[scores.BatchResult]]:
        seed, first = self._config.train.seed, int(numbers[0]) if len(numbers) else 0
        try:
            seed_everything(seed, first, "predict")
            outputs = outputs_of(self._predict(self.model, batch), len(numbers))
            if self._naming.is_open(outputs):
                self._find_meaning(batch, len(numbers))
            named = self._naming.columns(outputs)
            if not self._wishes.scored or not len(numbers):
                return named, []
            seed_everything(seed, first, "score")
            evaluation = evaluation_of(self._task, self._config)
            return named, scores.measure(evaluation, self.model, [(0, len(numbers), batch)])
        except ManyhandsError:
            raise
        except Exception as error:
            raise RunFailed(
                f"predicting records {first:,} to {max(numbers, default=0):,} of {where} failed.\n"
                f"{user_traceback(error)}"
            ) from error

    def _find_meaning(self, batch: Any, records: int) -> None:
        """Once, by a pass of its own: with gradients, torch may take other kernels."""
        with torch.enable_grad():
            outputs: Outputs = outputs_of(self._predict(self.model, batch), records)
        assert isinstance(outputs, torch.Tensor)
        self._naming = replace(self._naming, meaning=meaning_of(outputs))


@contextmanager
def computing(config: RunConfig, model: Module) -> Generator[None]:
    """As scores are computed: the run's threads and precision, no gradients. It ends with all as
    it was."""
    threads = torch.get_num_threads()
    device = next((p.device.type for p in model.parameters()), "cpu")
    half = autocast(device, config.train.precision)
    torch.set_num_threads(config.train.threads)  # part of the bits
    try:
        with randomness_kept(), one_process(), torch.no_grad(), half:
            yield
    finally:
        torch.set_num_threads(threads)


def _in_order(
    piece: EncodedPiece, outputs: Sequence[dict[str, pa.Array]], *, named_file: bool
) -> pa.Table:
    """Good and bad records of a piece, in the order of the file."""
    good, bad = len(piece.numbers), len(piece.bad)
    keys: dict[str, Any] = {RECORD: pa.array(piece.numbers)}
    keys |= dict(zip(piece.kept.column_names, piece.kept.columns, strict=True))
    named: dict[str, Any] = {}
    if outputs:
        named = {name: pa.chunked_array([o[name] for o in outputs]) for name in outputs[0]}
    if twice := sorted({*keys, ERROR, FILE} & named.keys()):
        raise DataError(
            f"a column of the predictions is called '{twice[0]}', as is one that is kept or ours; "
            "leave it out of --keep, or let predict return a dict with another name."
        )
    table = pa.table({**keys, **named, ERROR: pa.nulls(good, pa.string())})
    if bad:
        said = {
            RECORD: pa.array([b.record for b in piece.bad], pa.int64()),
            ERROR: pa.array([_said(b) for b in piece.bad]),
        }
        rest = {
            name: pa.nulls(bad, table.schema.field(name).type)
            for name in table.column_names
            if name not in said
        }
        rest |= dict(zip(piece.kept.column_names, piece.kept_of_bad.columns, strict=True))
        both = pa.table({name: (said | rest)[name] for name in table.column_names})
        order = merged_rows(piece.numbers, [b.record for b in piece.bad])
        table = pa.concat_tables([table, both]).take(pa.array(order))
    if named_file:
        file = pa.array([piece.file]).take(pa.array(np.zeros(good + bad, np.int64)))
        table = table.add_column(0, FILE, file)
    return table.combine_chunks()


def _said(bad: Bad) -> str:
    return f"{bad.what}: {bad.text}" if bad.text else bad.what


def _keys(numbers: NDArray[np.int64], files: Sequence[str] | None) -> dict[str, pa.Array]:
    """Which records these are: by file and number there, where that is known."""
    if files is None:
        return {RECORD: pa.array(numbers)}
    place = (numbers >> RECORD_BITS) & ((1 << (55 - RECORD_BITS)) - 1)
    return {
        FILE: pa.array(list(files), pa.string()).take(pa.array(place)),
        RECORD: pa.array(numbers & _NUMBER),
    }
