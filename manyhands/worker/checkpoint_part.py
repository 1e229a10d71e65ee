# SPDX-License-Identifier: Apache-2.0
"""A worker's part of a checkpoint: what it writes, and how everything comes back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.checkpoint import step_files
from manyhands.checkpoint.commit import FileRecord, FolderStorage
from manyhands.checkpoint.safetensors_files import decode
from manyhands.checkpoint.saver import Content, Saver, Streamed
from manyhands.checkpoint.table_files import (
    encode_batches,
    read_batches,
    table_file,
    tables_in,
)
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.training.state.param_groups import groups_to_json
from manyhands.training.state.phased_optimizer import kind_name
from manyhands.training.state.replica import Replica
from manyhands.training.state.rows.part_arrow import from_batch, to_batch
from manyhands.training.state.rows.table_part import WEIGHTS, TablePart
from manyhands.training.state.rows.tables import Tables
from manyhands.training.state.sharded_optimizer import OptimizerEntry
from manyhands.training.state.weight_average import SavedAverage
from manyhands.values.errors import CheckpointDamaged, CheckpointMismatch, ConfigError
from manyhands.values.messages import SavedFile, Written
from manyhands.values.run_folder import RunDir
from manyhands.worker.carried_files import CarriedStorage


def saver(
    run: RunDir, line: WorkerChannel, moment: Callable[[str], None], *, shares: bool
) -> Saver:
    """Saves while training goes on, and tells the supervisor when a step is written. `shares`:
    this host sees the run's folder."""

    def written(step: int, attempt: int, files: dict[str, FileRecord], blocked_s: float) -> None:
        moment("written")
        listed = [SavedFile(name, f.size_bytes, f.sha256) for name, f in files.items()]
        line.send(
            Written(
                worker=line.heartbeat.worker,
                step=step,
                attempt=attempt,
                files=listed,
                blocked_s=blocked_s,
                writing_s=made.writing_s,
            )
        )

    def progress() -> None:
        line.heartbeat.progress += 1

    made = Saver(FolderStorage(run) if shares else CarriedStorage(line), written, progress)
    return made


def optimizer_part(worker: int, entries: Iterable[OptimizerEntry]) -> Content:
    """The state of what this worker updates."""
    return step_files.optimizer_content(
        worker, ((e.key, e.name, e.offset, e.value) for e in entries)
    )


def common_part(replica: Replica, stream: list[Any] | None = None) -> list[Content]:
    """What all workers have alike, and one of them writes; and where its stream is."""
    state = {
        "step": replica.step,
        "optimizer": kind_name(replica.optimizer),
        "groups": groups_to_json(replica.optimizer),
        "schedule": replica.schedules.to_json(),
    }
    if stream is not None:
        state["stream"] = stream
    averages = replica.averages.items()
    return [
        step_files.model_content(replica.tensors()),
        *(step_files.average_content(n, replica.averaged(n), a.count) for n, a in averages),
        step_files.state_content(replica.passing_buffers(), state),
    ]


def table_parts(tables: Tables, worker: int) -> list[Streamed]:
    """Rows of the buckets that this worker has, as they are now; read while training goes on."""
    return [
        Streamed(table_file(name, worker), encode_batches(map(to_batch, parts)))
        for name, parts in tables.snapshots().items()
    ]


def tables_of(
    folder: Path, tables: Tables, *, state: bool = True
) -> Iterator[tuple[str, TablePart]]:
    """The rows of a committed step, from however many workers; whatever does not fit is named.
    `state`: with what the optimizer keeps, which must be the same one then."""
    ours = {table.name: dict(table.store.slots.columns) for table in tables}
    theirs = set(tables_in(folder))
    problems = [f"it lacks table '{name}'" for name in sorted(ours.keys() - theirs)]
    problems += [
        f"it has table '{name}', which the model has not" for name in sorted(theirs - ours.keys())
    ]
    if problems:
        raise CheckpointMismatch(f"{folder} belongs to another model: {'; '.join(problems)}.")
    for name, columns in ours.items():
        for batch in read_batches(folder, name):
            part = from_batch(batch)
            if not state:
                # Nor when they were last seen: that is by another run's clock.
                part = replace(part, lanes={WEIGHTS: part.lanes[WEIGHTS]}, last=None)
                columns = {WEIGHTS: columns[WEIGHTS]}
            there = {lane: values.shape[1] for lane, values in part.lanes.items()}
            if there != columns:
                raise CheckpointMismatch(
                    f"{folder} has table '{name}' with {_lanes(there)}; it now has "
                    f"{_lanes(columns)} (dim or optimizer differ)."
                )
            yield name, part


def _lanes(columns: Mapping[str, int]) -> str:
    return ", ".join(f"{name}[{width}]" for name, width in columns.items())


def load_model(replica: Replica, folder: Path, weights: str = "trained") -> dict[str, Any]:
    """Weights (or an average of them) and buffers of a committed step; returns the rest of its
    state."""
    replica.load(step_files.read_model(folder, weights), where=str(folder))
    passing, state = step_files.read_state(folder)
    replica.buffers.load(passing)
    return state


def load_tables(replica: Replica, folder: Path) -> None:
    """To look at, not to go on from."""
    if replica.tables:
        replica.tables.reset(0, tables_of(folder, replica.tables, state=False))


def load_all(replica: Replica, folder: Path) -> Any:
    """A committed step of this run; what the optimizer keeps is read later (`entries_of`). Returns
    where its stream was, if that was written down."""
    state = load_model(replica, folder)
    kind = kind_name(replica.optimizer)
    if state["optimizer"] != kind:
        raise CheckpointMismatch(
            f"{folder} was saved with {state['optimizer']}, the task now uses {kind}. "
            "To keep the weights only, start a new run with train.start_from."
        )
    replica.schedules.restore(state["groups"], state["schedule"], state["step"])
    replica.step = state["step"]
    replica.change(replica.changes.get(replica.step, {}))
    return state.get("stream")


def load_weights(replica: Replica, file: str) -> None:
    """Weights of another run, to start from."""
    try:
        tensors, _ = decode(Path(file))
    except CheckpointDamaged as error:
        raise ConfigError(f"train.start_from: {error}") from error
    replica.load(tensors, where=file)


def averages_of(folder: Path, names: Iterable[str]) -> dict[str, SavedAverage]:
    """The averages of a committed step."""
    return {name: SavedAverage(*step_files.read_average(folder, name)) for name in names}


def entries_of(folder: Path) -> Iterator[OptimizerEntry]:
    """What the optimizer kept, from however many workers."""
    return (OptimizerEntry(*e) for e in step_files.read_optimizer(folder))
