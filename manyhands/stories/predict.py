# SPDX-License-Identifier: Apache-2.0
"""What a trained model says of records: read, encoded as in training, predicted, named, written.

The rows are in the order of the records and their bytes do not depend on how many processes there
are. Memory holds a few parts of the files at a time; the file appears whole, or not at all.
"""

import warnings
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pyarrow as pa

from manyhands.data.encoding.unseen_values import UnseenValues, merged
from manyhands.data.mapreduce.ordered_tasks import in_order
from manyhands.data.open_data import open_task
from manyhands.data.preparing.lineage import notes_on_unseen
from manyhands.data.preparing.recipe import choice, read_on_error
from manyhands.data.reading.sampled_records import each_once
from manyhands.data.serving.encode_records import RawWork
from manyhands.data.serving.stored_encoders import Serving
from manyhands.data.sources.cutting.source import Bad
from manyhands.data.sources.staging import SHOWN, too_many
from manyhands.driver.task_files import reload
from manyhands.evaluation import scores
from manyhands.monitor.prediction_bar import PartsDone, prediction_bar
from manyhands.prediction.named_predictions import Naming
from manyhands.prediction.output_meaning import Meaning
from manyhands.prediction.prediction_files import (
    PredictionFile,
    fitted,
    refuse_target,
    whole_file,
)
from manyhands.prediction.predictions import Predictions
from manyhands.stories.load import committed
from manyhands.stories.predicted_data import (
    OwnRecords,
    is_raw,
    own_records,
    raw_files,
    serving_of,
)
from manyhands.values.byte_sizes import parse_bytes
from manyhands.values.config import RunConfig, read_toml
from manyhands.values.errors import DataError, RequestError, TaskError
from manyhands.values.loaded_task import Loaded
from manyhands.values.local_folders import local_folder
from manyhands.values.option_fields import taking
from manyhands.values.predict_options import PredictRequest
from manyhands.values.run_folder import open_run
from manyhands.values.scratch_folder import Scratch, sweep
from manyhands.worker.predicting import PredictedRows, RecordsWork, Wishes, computing
from manyhands.worker.prediction_part import (
    PredictionOrder,
    compute_part,
    part_rows,
    predictor_of,
    send,
)
from manyhands.worker.scoring import evaluation_of, score_portably

LEVEL = 4
"""From a warning here to the line that called `mh.predict`."""
BATCHES = 32
"""Of a task's own records, in a part."""


@taking(PredictRequest)
def predict(request: PredictRequest) -> Predictions:
    """What the model of a run says of records, a row for each, in their order.

    `data` are raw files as `mh.prepare` reads them, records (dicts, a DataFrame) or a prepared
    folder; for a task whose data is columns or a Dataset, likewise. Left out: the records that the
    task holds out. With `to` they are written to a file as they come, otherwise they are in memory:
    `mh.predict("runs/first", "test.csv").to_pandas()`. docs/predict.md says what the columns are.
    """
    return predict_request(replace(request, quiet=True) if request.to is None else request)


@dataclass(slots=True)
class _Tally:
    """What is known of the rows so far."""

    limit: int | None
    """More bad records than this end it; None: any number may be bad."""
    records: int = 0
    bad: list[Bad] = field(default_factory=list[Bad])
    bad_count: int = 0
    absent: frozenset[str] | None = None
    """Columns that no record has had."""
    unseen: dict[str, UnseenValues] = field(default_factory=dict[str, UnseenValues])
    results: list[scores.BatchResult] = field(default_factory=list[scores.BatchResult])

    def add(self, rows: PredictedRows) -> None:
        self.records += rows.table.num_rows
        self.bad_count += len(rows.bad)
        self.bad += rows.bad[: SHOWN - len(self.bad)]
        if self.limit is not None and self.bad_count > self.limit:
            raise DataError(_too_many(self.bad, self.limit, self.bad_count))
        self.absent = rows.absent if self.absent is None else self.absent & rows.absent
        self.unseen = merged([self.unseen, rows.unseen])
        for result in rows.results:
            self.results.append(msgspec.structs.replace(result, index=len(self.results)))


def predict_request(request: PredictRequest) -> Predictions:
    folder = open_run(Path(request.run))
    to = _target(request)
    step = committed(folder, request.step)
    config, _ = read_toml(folder.config)
    if request.workers < 1 or (request.batch is not None and request.batch < 1):
        raise RequestError("--workers and --batch are at least 1.")
    if not _on_ray(request) and request.workers == 1:
        score_portably(config, LEVEL + 1)  # before the task's own code has computed something
    loaded, notes = reload(folder, request.task, config, with_data=False)
    for note in notes:
        warnings.warn(note, stacklevel=LEVEL)
    serving = serving_of(folder, loaded.task, config)
    wishes = _wishes(request, config, serving)
    sweep()
    with closing(Scratch("predict")) as scratch:
        given = _given(request.data)
        work: Sequence[RawWork | RecordsWork]
        if given is not None and is_raw(given, serving):
            assert serving is not None
            wishes, work = _of_files(given, request, to, serving, wishes, scratch.path / "spool")
        else:
            own = own_records(given, request.split, loaded.task, config, serving)
            if request.keep:
                raise DataError("--keep is for raw files: other records have no raw columns.")
            if given is not None:
                config = replace(config, data=replace(config.data, fold=None))
            loaded, wishes, work = _of_own(own, loaded, config, wishes)
        manifest = None if serving is None else serving.manifest
        order = PredictionOrder(config, str(folder.step(step)), request.weights, manifest, wishes)
        tally = _Tally(None if request.on_error == "list" else read_on_error(request.on_error))
        with (
            _writer(to) as out,
            prediction_bar(_sizes(work), quiet=request.quiet) as done,
            closing(_rows(request, order, loaded, work, scratch.path, done)) as rows,
        ):
            for some in rows:
                tally.add(some)
                out.write(some.table, predicted=some.predicted)
        table = None if to is not None else cast(_InMemory, out).table()
    for note in _notes(tally, serving if request.score else None):
        warnings.warn(note, stacklevel=LEVEL)
    found_scores = None
    if request.score:
        found_scores = scores.combine(evaluation_of(loaded.task, config), tally.results)
    return Predictions(
        path=to,
        records=tally.records,
        bad=tally.bad_count,
        examples=[bad.told(first=0) for bad in tally.bad],
        scores=found_scores,
        made=table,
    )


# ---- what was asked for


def _on_ray(request: PredictRequest) -> bool:
    from manyhands.launch.ray.ray_session import is_ray

    if is_ray(request.engine):
        return True
    if request.engine != "local" or request.worker_resources or request.ray_token_file:
        raise RequestError(
            f"--engine {request.engine}: predict runs on local processes, or on ray, which "
            "--worker-resources and --ray-token-file are for."
        )
    return False


def _given(data: Any) -> Any:
    return None if isinstance(data, list | tuple) and not data else data


def _target(request: PredictRequest) -> Path | None:
    if request.to is None:
        return None
    to = local_folder(request.to, "predictions")
    refuse_target(to)
    return to


def _refuse_own(to: Path | None, files: Sequence[str]) -> None:
    for file in files:
        if to is not None and to.exists() and Path(file).exists() and to.samefile(file):
            raise RequestError(f"--to {to} is one of the files that are read.")


def _wishes(request: PredictRequest, config: RunConfig, serving: Serving | None) -> Wishes:
    classes: Any = request.classes
    if isinstance(classes, str):
        classes = classes.split(",")
    if classes is None and serving is not None:
        classes = serving.classes
    meaning = None
    if request.outputs is not None:
        meaning = cast(Meaning, choice("outputs", request.outputs, get_args(Meaning)))
    keep = [request.keep] if isinstance(request.keep, str) else request.keep
    kept = dict.fromkeys(name for text in keep for name in text.split(","))
    if serving is not None and (name := serving.names_a_record) is not None:
        kept = {name: None, **kept}
    if request.score and serving is not None and serving.label is None:
        raise DataError("--score: the run was trained without a label.")
    evaluate = config.evaluate.batch if config.evaluate else None
    return Wishes(
        batch=request.batch or evaluate or config.train.batch,
        naming=Naming(None if classes is None else tuple(classes), meaning, request.every_class),
        keep=tuple(kept),
        scored=request.score,
    )


def _of_files(
    given: Any,
    request: PredictRequest,
    to: Path | None,
    serving: Serving,
    wishes: Wishes,
    spool: Path,
) -> tuple[Wishes, Sequence[RawWork]]:
    memory = parse_bytes(request.memory)
    found = raw_files(given, request, serving, spool=spool, memory=memory)
    _refuse_own(to, found.files)
    several = len(found.files) > 1
    wishes = msgspec.structs.replace(wishes, name_files=several, target_bytes=found.target_bytes)
    return wishes, found.work


def _of_own(
    own: OwnRecords, loaded: Loaded, config: RunConfig, wishes: Wishes
) -> tuple[Loaded, Wishes, list[RecordsWork]]:
    loaded = replace(loaded, task=own.task)
    data, held_out = open_task(own.task, config)
    records = held_out if own.held_out else each_once(data)
    if records is None:
        raise TaskError("the task holds no records out; say of which to predict.")
    wishes = msgspec.structs.replace(wishes, held_out=own.held_out, files=own.files, keep=())
    size, step = len(records), BATCHES * wishes.batch
    work = [RecordsWork(start, min(start + step, size)) for start in range(0, size, step)]
    return loaded, wishes, work


def _notes(tally: _Tally, scored: Serving | None) -> list[str]:
    """What is odd about the records; `scored`: with these encoders."""
    absent = sorted(tally.absent or ())
    found = [f"no record has a '{name}': all are taken for missing" for name in absent]
    return found if scored is None else [*found, *notes_on_unseen(tally.unseen, scored.used)]


def _sizes(work: Sequence[RawWork | RecordsWork]) -> list[int]:
    return [w.chunk.nbytes if isinstance(w, RawWork) else w.stop - w.start for w in work]


def _too_many(bad: Sequence[Bad], limit: int, total: int) -> str:
    told, _, _ = too_many(bad, limit, total, first=0).rpartition("\n")
    return f"{told}\nMend them, or have each listed in its row: --on-error list"


# ---- rows, in order


def _rows(
    request: PredictRequest,
    order: PredictionOrder,
    loaded: Loaded,
    work: Sequence[RawWork | RecordsWork],
    folder: Path,
    done: PartsDone,
) -> Generator[PredictedRows]:
    """Of all parts; made here, by processes, or by Ray."""
    if work and _on_ray(request):
        from manyhands.stories.predict_on_ray import rows_on_ray

        with closing(rows_on_ray(request, order, loaded, work, folder)) as parts:
            for part in parts:
                yield from part
                done()
        return
    if request.workers == 1 or len(work) < 2:
        predictor = predictor_of(order, loaded.task)
        with computing(order.config, predictor.model):
            for part in work:
                yield from predictor.rows(part)
                done()
            if not work:
                yield predictor.nothing()
        return
    send(order, loaded, folder)
    calls = ((str(folder), number, part) for number, part in enumerate(work))
    workers = min(request.workers, len(work))
    with closing(in_order(compute_part, calls, workers, what="part")) as parts:
        for part in parts:
            yield from part_rows(part)
            done()


class _InMemory:
    """For those who did not name a file."""

    def __init__(self) -> None:
        self._tables: list[tuple[pa.Table, bool]] = []

    def write(self, table: pa.Table, *, predicted: bool) -> None:
        self._tables.append((table, predicted))

    def table(self) -> pa.Table:
        first = next((t for t, predicted in self._tables if predicted), self._tables[0][0])
        return pa.concat_tables([fitted(t, first.schema) for t, _ in self._tables])


@contextmanager
def _writer(to: Path | None) -> Generator[PredictionFile | _InMemory]:
    with nullcontext(_InMemory()) if to is None else whole_file(to) as out:
        yield out
