# SPDX-License-Identifier: Apache-2.0
"""Parts of the records predicted by tasks of Ray: the task, the weights and the encoders travel,
rows come back in order. Raw files and prepared folders must be seen, by their paths, on every
node.

A node whose processor computes other bits would make the result depend on who had which part. So
each says what it computes with, and unlike ones are refused, or told of (`train.unlike`).
"""

import io
import secrets
import tempfile
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.step_files import STATE, weights_file
from manyhands.data.serving.encode_records import RawWork
from manyhands.launch.ray.ray_executor import RayExecutor, open_executor
from manyhands.training.compute.kernel_marks import kernels_here
from manyhands.training.compute.one_thread import one_thread
from manyhands.values.errors import DataTaskFailed, RequestError
from manyhands.values.kernels import Kernels, in_words, unlike
from manyhands.values.loaded_task import Loaded
from manyhands.values.machine import machine
from manyhands.values.predict_options import PredictRequest
from manyhands.worker.predicting import PredictedRows, Predictor, RecordsWork, computing
from manyhands.worker.prediction_part import (
    ORDER,
    TASK,
    PredictionOrder,
    begun,
    put_rows,
    rows_in,
    send,
)
from manyhands.worker.trained_model import TRAINED

SPOOL = "spool"
"""Where records that come from Python are written down, in the folder of the process."""
Work = RawWork | RecordsWork
Files = Mapping[str, NDArray[np.uint8]]
"""Name → bytes; on a node they are in Ray's memory, and not copied."""


def rows_on_ray(
    request: PredictRequest,
    order: PredictionOrder,
    loaded: Loaded,
    work: Sequence[Work],
    folder: Path,
) -> Generator[Iterator[PredictedRows]]:
    """Of each part, in order. `folder`: of this process, for what it writes down on the way."""
    resources = request.worker_resources or f"CPU={order.config.train.threads}"
    with open_executor(request.engine, resources, request.ray_token) as ray:
        try:
            _refuse_blind_nodes(ray, work, folder)
            everything = ray.put(_packed(order, loaded, folder))
            at_once = ray.workers if request.workers == 1 else min(request.workers, ray.workers)
            yield from _in_order(ray, everything, work, at_once, order.config.train.unlike)
        except BaseException:
            ray.shutdown(cancel_futures=True)
            raise


def _packed(order: PredictionOrder, loaded: Loaded, folder: Path) -> dict[str, NDArray[np.uint8]]:
    send(order, loaded, folder, many=True)
    step = Path(order.step)
    paths = [folder / TASK, folder / ORDER, step / STATE]
    paths += [step / weights_file(kind) for kind in {TRAINED, order.weights}]
    paths += step.glob("table-*.arrows")
    return {path.name: np.fromfile(path, np.uint8) for path in paths}


def _refuse_blind_nodes(ray: RayExecutor, work: Sequence[Work], folder: Path) -> None:
    """Better said now than by whoever comes first. One file of each folder is looked for."""
    raw = {id(part.source): part.source for part in work if isinstance(part, RawWork)}
    files = [Path(file).absolute() for source in raw.values() for file in source.files]
    for path in {file.parent: file for file in files if file.exists()}.values():
        if blind := ray.blind_to(path):
            raise RequestError(
                f"Ray's nodes {', '.join(blind)} do not see {path}: predicting on several nodes "
                "needs files that all of them see."
            )
    spool = folder / SPOOL
    if spool.exists() and (blind := ray.blind_to(spool)):
        raise RequestError(
            f"Ray's nodes {', '.join(blind)} do not see records that come from Python: write them "
            "to a file that all of them see, or predict here (--engine local)."
        )


def _in_order(
    ray: RayExecutor, everything: Any, work: Sequence[Work], at_once: int, on_unlike: str
) -> Generator[Iterator[PredictedRows]]:
    """At most twice as many parts are under way, or waiting here, as are computed at once."""
    key, ahead = secrets.token_hex(8), iter(work)
    under_way, first = deque[Future[tuple[str, Kernels, bytes]]](), None
    for number in range(len(work)):
        while len(under_way) < 2 * at_once and (part := next(ahead, None)) is not None:
            under_way.append(ray.submit(predict_part, everything, key, part))
        try:
            node, kernels, rows = under_way.popleft().result()
        except BrokenExecutor as error:
            raise DataTaskFailed(f"part {number + 1:,} was not computed. {error}") from None
        first = first or (node, kernels)
        _compare(first, (node, kernels), on_unlike)
        yield rows_in(io.BytesIO(rows))


def _compare(first: tuple[str, Kernels], other: tuple[str, Kernels], on_unlike: str) -> None:
    if kinds := unlike(first[1], other[1]):
        text = (
            f"{other[0]} computes otherwise than {first[0]}, with {in_words(kinds)} ({other[0]}: "
            f"{other[1].words}; {first[0]}: {first[1].words}), so predictions depend on who has "
            "which records."
        )
        if on_unlike == "refuse":
            raise RequestError(f"{text} Use nodes that are alike, or --engine local.")
        warnings.warn(text, stacklevel=2)


# ---- on a node

_ready: dict[str, tuple[PredictionOrder, Predictor, Kernels]] = {}
"""What this process has built, for whoever asked last."""


def predict_part(files: Files, key: str, work: Work) -> tuple[str, Kernels, bytes]:
    """Who computed, with what, and the rows."""
    if key not in _ready:
        _ready.clear()
        with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
            for name, data in files.items():
                data.tofile(Path(folder, name))
            _ready[key] = _built(Path(folder))
    order, predictor, kernels = _ready[key]
    rows = io.BytesIO()
    with computing(order.config, predictor.model):  # others may use this process after us
        for some in predictor.rows(work):
            put_rows(rows, some)
    return machine().host, kernels, rows.getvalue()


def _built(folder: Path) -> tuple[PredictionOrder, Predictor, Kernels]:
    order, predictor = begun(folder, step=folder, exactly=True)
    train = order.config.train
    with one_thread():
        return order, predictor, kernels_here(portable=train.portable, precision=train.precision)
