# SPDX-License-Identifier: Apache-2.0
"""A process that predicts: it is told once what to do, and then part by part of what.

The task comes through a file that all processes map (its arrays are there once), and what a part
came to goes back through a file: rows in the order of the part, each table by itself.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec
import pyarrow as pa

from manyhands.data.open_data import prepared_of
from manyhands.data.reading.batch_columns import with_features_named
from manyhands.data.serving.encode_records import RawWork
from manyhands.data.serving.stored_encoders import Serving
from manyhands.data.shards.manifest import Manifest
from manyhands.data.sources.cutting.source import Bad
from manyhands.evaluation import scores
from manyhands.launch.shipping import ship_task
from manyhands.training.compute.kernel_marks import fix_kernels
from manyhands.values.config import RunConfig
from manyhands.values.errors import TaskError
from manyhands.values.loaded_task import Loaded
from manyhands.values.task import Task
from manyhands.worker.predicting import (
    PredictedRows,
    Predictor,
    RecordsWork,
    Wishes,
    computing,
)
from manyhands.worker.scoring import score_portably
from manyhands.worker.trained_model import trained_model

TASK, ORDER = "task", "order"


class PredictionOrder(msgspec.Struct, frozen=True):
    """What every process needs to know."""

    config: RunConfig
    step: str
    """The folder of the saved step."""
    weights: str
    manifest: Manifest | None
    """Of the data that it was trained on, where that was prepared."""
    wishes: Wishes


class PredictedPart(msgspec.Struct, frozen=True):
    """What a part came to."""

    file: str
    nbytes: int


def predictor_of(order: PredictionOrder, task: Task) -> Predictor:
    """In whichever process."""
    model = trained_model(task, Path(order.step), order.config.train.seed, order.weights)
    serving = None
    if order.manifest is not None:
        data = prepared_of(task.data)
        assert data is not None
        serving = Serving(order.manifest, with_features_named(data, order.manifest.schema))
    return Predictor(task, order.config, model, serving, order.wishes)


# ---- there and back


def send(order: PredictionOrder, loaded: Loaded, folder: Path, *, many: bool = False) -> None:
    """Put down what processes need. `many`: some are on other hosts."""
    fd = os.open(folder / TASK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        parcel = ship_task.pack(loaded, fd, many=many)
    finally:
        os.close(fd)
    if parcel.source is not None and order.wishes.held_out:
        raise TaskError(
            "the task's data cannot be sent to other processes; predict with one, here: "
            "--workers 1 --engine local."
        )
    (folder / ORDER).write_bytes(pickle.dumps((order, parcel)))


_ready: dict[str, tuple[Predictor, ExitStack]] = {}
"""By folder: what this process has built."""


def compute_part(folder: str, number: int, work: RawWork | RecordsWork) -> PredictedPart:
    """In a process of its own."""
    if folder not in _ready:
        order, predictor = begun(Path(folder))
        for_good = ExitStack()
        for_good.enter_context(computing(order.config, predictor.model))
        _ready[folder] = predictor, for_good
    predictor, _ = _ready[folder]
    path = Path(folder) / f"{number:08}.part"
    with open(path, "wb") as file:
        for rows in predictor.rows(work):
            put_rows(file, rows)
        nbytes = file.tell()
    return PredictedPart(str(path), nbytes)


def begun(
    folder: Path, *, step: Path | None = None, exactly: bool = False
) -> tuple[PredictionOrder, Predictor]:
    """What was put down there, built. `step`: where the saved step is here. `exactly`: a portable
    run is refused, not warned about, where this process cannot compute so any more."""
    order: PredictionOrder
    order, parcel = pickle.loads((folder / ORDER).read_bytes())  # by our own driver
    if step is not None:
        order = msgspec.structs.replace(order, step=str(step))
    if exactly and order.config.train.portable:
        fix_kernels()
    score_portably(order.config, 2)
    fd = os.open(folder / TASK, os.O_RDONLY)
    try:
        task = ship_task.unpack(parcel, fd)
    finally:
        os.close(fd)
    return order, predictor_of(order, task)


class _RowsHeader(msgspec.Struct, frozen=True, array_like=True):
    predicted: bool
    bad: list[Bad]
    absent: list[str]
    results: bytes
    nbytes: int


def put_rows(file: BinaryIO, rows: PredictedRows) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.table.schema) as writer:
        writer.write_table(rows.table)
    table = sink.getvalue()
    header = msgspec.msgpack.encode(
        _RowsHeader(
            rows.predicted, rows.bad, sorted(rows.absent), scores.encode(rows.results), table.size
        )
    )
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    file.write(table)


def part_rows(part: PredictedPart) -> Iterator[PredictedRows]:
    """What a process put down; the file is gone when all of it has been read."""
    with open(part.file, "rb") as file:
        os.unlink(part.file)
        yield from rows_in(file)


def rows_in(file: BinaryIO) -> Iterator[PredictedRows]:
    """What `put_rows` wrote."""
    while size := file.read(8):
        header = msgspec.msgpack.decode(file.read(int.from_bytes(size, "little")), type=_RowsHeader)
        table = pa.ipc.open_stream(pa.py_buffer(file.read(header.nbytes))).read_all()
        results = scores.decode([header.results])
        yield PredictedRows(table, header.predicted, header.bad, frozenset(header.absent), results)
