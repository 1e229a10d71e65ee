# SPDX-License-Identifier: Apache-2.0
"""How long a pass over a stream is: asked for, counted, or not known and not needed."""

from dataclasses import replace

from manyhands.data.reading.stream_records import count_records, is_stream, refuse_used_up
from manyhands.driver.resolved_run import ResolvedRun
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.errors import RequestError, TaskError
from manyhands.values.user_frames import user_traceback


def with_pass_counted(job: ResolvedRun, *, resumes: bool) -> ResolvedRun:
    """Where epochs of a stream are asked for, and nobody has said how long one is, it is read once
    and counted. The config keeps the number, for those who resume and replay."""
    config, data = job.config, job.loaded.task.data
    if not is_stream(data) or config.data.pass_records is not None:
        return job
    if config.train.steps is not None:
        return job
    if resumes:
        raise RequestError(
            "this run reads its stream without end, so it has no epochs: say how long it should "
            "train with --set train.steps=..."
        )
    refuse_used_up(data, "data")

    def seed(number: int) -> None:
        seed_everything(config.train.seed, 0, number, "stream")

    try:
        count = count_records(data, seed)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"Task: the stream given as data cannot be read.\n{user_traceback(error)}"
        ) from error
    if count == 0:
        raise TaskError("Task: data is empty (the stream gave 0 records).")
    note = (
        f"the stream was read once, to count its {count} records; data.pass_records={count} saves "
        "that, train.steps=... needs no count"
    )
    counted = replace(config, data=replace(config.data, pass_records=count))
    return replace(job, config=counted, notes=[*job.notes, note])
