# SPDX-License-Identifier: Apache-2.0
"""Every exception of manyhands. Each says what happened, where, and what to do.

    ManyhandsError
    ├── RequestError              the request was wrong; exit code 2
    │   ├── ConfigError           a setting
    │   ├── TaskError             the task, or the file that should define it
    │   │   └── EmbeddingsDiffer  a micro-batch was embedded twice, with two outcomes
    │   ├── WrongArguments        a call of ours with a keyword that it has not; a TypeError too
    │   ├── RunDirError           a run folder that is missing, taken or of another kind
    │   ├── CheckpointMismatch    a checkpoint of another model
    │   ├── DataError             raw records, or what was asked to be done with them
    │   │   └── DataTaskFailed    work on them that crashed; `manyhands prepare` exits with 1
    │   └── OptimizerRefused      an optimizer that cannot be shared out
    ├── TrainError                trouble while running; exit code 1
    │   ├── LossNotFinite         a loss became NaN or infinite
    │   ├── GradientNotFinite     a gradient did, under a finite loss
    │   ├── UnevenBuffer          a model's buffer that no merge rule fits
    │   ├── TableFull             more rows than an embedding table may have
    │   ├── CallbackFailed        the caller's own function raised
    │   ├── DataDamaged           prepared data that is not what was written
    │   ├── CheckpointDamaged     bytes on disk are not the bytes that were written
    │   └── Broken                this worker was told to stop waiting
    │       └── AuditMismatch     two workers computed the same micro-batch differently
    ├── RunFailed                 the run is over; carries the verdict; exit code 1
    └── Interrupted               stopped by a person and saved; exit code 130

Errors cross processes, so the parameters go to `super().__init__` and the sentence is built in
`__str__`: such an exception survives pickling.
"""

from collections.abc import Sequence


class ManyhandsError(Exception):
    """Anything manyhands raises on purpose."""


class RequestError(ManyhandsError):
    """What was asked for cannot be done as asked. Exit code 2."""


class ConfigError(RequestError):
    """A setting that is misspelt, of the wrong type, or contradicts another."""


class TaskError(RequestError):
    """The task is incomplete, or the file that should define it does not."""


class EmbeddingsDiffer(TaskError):
    """A batch loss goes through its micro-batches twice, and both times must find the same."""

    def __init__(self, step: int, index: int) -> None:
        super().__init__(step, index)

    def __str__(self) -> str:
        step, index = self.args
        return (
            f"embed gave other rows for micro-batch {index} of step {step} when it was called for "
            "the second time. With batch_loss every micro-batch is computed twice: once for the "
            "loss of the whole batch, and again for its own gradient. Draw from torch, "
            "numpy.random or random themselves (a generator of one's own is not seeded), keep no "
            "state outside buffers, and leave the batch as it is (x = x + 1, not x += 1)."
        )


class WrongArguments(RequestError, TypeError):
    """A function of ours was called with something that it does not take."""


class RunDirError(RequestError):
    """A run folder that does not exist, exists already, or holds nothing to work with."""


class CheckpointMismatch(RequestError):
    """Weights that belong to another model."""


class DataError(RequestError):
    """Raw records that cannot be read, or a way of preparing them that makes no sense."""


class DataTaskFailed(DataError):
    """Work on raw records that crashed: a process was killed, the disk is full, or the user's own
    code raised. What was asked for may be right, so `manyhands prepare` exits with 1, not 2."""


class TrainError(ManyhandsError):
    """Trouble while running. Exit code 1, with a verdict."""


class DataDamaged(TrainError):
    """Prepared data that is missing, shorter than it was, or not the bytes that were written."""


class CallbackFailed(TrainError):
    """A function that the caller gave (`on_step`) raised; the error itself is the `__cause__`."""


def _records(records: Sequence[int]) -> str:
    more = f" and {len(records) - 32} more" if len(records) > 32 else ""
    return f"records {', '.join(str(r) for r in records[:32])}{more}"


class LossNotFinite(TrainError):
    """In micro-batch `index` of a step; None: a batch loss, over embeddings that are finite.
    `because`: which of the records hold such values themselves, if any do."""

    def __init__(
        self,
        rank: int,
        step: int,
        index: int | None,
        loss: float,
        records: Sequence[int],
        because: str = "",
    ) -> None:
        super().__init__(rank, step, index, loss, list(records), because)

    def __str__(self) -> str:
        _, step, index, loss, records, because = self.args
        if index is None:
            return (
                f"the batch loss is {loss} at step {step}, though all embeddings are finite. Look "
                "in batch_loss for log(0), 0/0 and exp of a temperature that has grown; otherwise "
                "lower the learning rate, or set train.clip_norm."
            )
        which, look = f" ({_records(records)})", "at those records"
        if because:
            which, look = f": {because} (of {_records(records)})", "there"
        return (
            f"the loss is {loss} at step {step}, micro-batch {index}{which}. "
            f"Look {look} first; otherwise lower the learning rate, set train.clip_norm, "
            "or check the loss for log(0) and 0/0."
        )


class GradientNotFinite(TrainError):
    """Of what is called `name` in micro-batch `index` of a step; None: in their sum, or it is not
    known yet. `apart`: others are at other steps, and it was not pushed."""

    def __init__(
        self,
        rank: int | None,
        step: int,
        index: int | None = None,
        name: str | None = None,
        records: Sequence[int] = (),
        apart: bool = False,
    ) -> None:
        super().__init__(rank, step, index, name, list(records), apart)

    def __str__(self) -> str:
        _, step, index, name, records, apart = self.args
        kept = f"The step was not taken: the weights are those after {step} steps. "
        skip = ' train.not_finite = "skip" leaves such steps out.'
        if apart:
            kept, skip = "It was not pushed: the weights are as if it had not been computed. ", ""
        if index is None:
            return (
                f"the gradients of step {step} add up to a number that is not finite, though the "
                f"loss is finite. {kept}Lower the learning rate, or train in a wider dtype."
            )
        return (
            f"the gradient of {name} is not finite at step {step}, micro-batch {index} "
            f"({_records(records)}), though the loss is. {kept}Look at those records, and in the "
            "loss for sqrt at 0, 0/0 or log(0) behind a where (torch.autograd.detect_anomaly names "
            f"the operation).{skip}"
        )


class UnevenBuffer(TrainError):
    def __init__(self, name: str, step: int) -> None:
        super().__init__(name, step)

    def __str__(self) -> str:
        name, step = self.args
        return (
            f"the integer buffer '{name}' changed differently in different micro-batches of step "
            f"{step}, so no value of it is right for all of them. Make it a float buffer (merged "
            "by weighted mean), or update it outside forward."
        )


class TableFull(TrainError):
    """`coming` more rows (or ids that wait to become rows) than there is room for."""

    def __init__(
        self, table: str, room: int, there: int, coming: int, step: int, kind: str
    ) -> None:
        super().__init__(table, room, there, coming, step, kind)

    def __str__(self) -> str:
        table, room, there, coming, step, kind = self.args
        what = {
            "rows": f"it may have {room:,} rows, and has {there:,}",
            "bucket": (
                f"one of its buckets has {there:,} rows of {room:,}, and {coming:,} more came: its "
                "ids are not spread as ids are"
            ),
            "waiting": (
                f"{there:,} ids wait to be admitted, {coming:,} more came, and there is room for "
                f"about {room:,}"
            ),
        }[kind]
        return (
            f"the table '{table}' is full in step {step}: {what}. "
            "Give the table more rows in the task and resume: how many there may be is no part of "
            "the result. Or begin anew, and let rows expire (expire=), or admit only ids that come "
            "again (admit=)."
        )


class OptimizerRefused(RequestError):
    """An optimizer whose step cannot be shared between workers."""


class CheckpointDamaged(TrainError):
    """Bytes that were read are not the bytes that were written."""


class Broken(TrainError):
    """This worker was waiting for others, and they will not come."""

    def __init__(self, *args: object, lost: tuple[int, ...] = ()) -> None:
        super().__init__(*args)
        self.lost = lost
        """Hosts (their numbers in the view) to which the connection failed, if that is why."""


class AuditMismatch(Broken):
    """Two workers computed the same micro-batch differently; the step was not taken."""

    def __init__(self, step: int, index: int) -> None:
        super().__init__(step, index)

    def __str__(self) -> str:
        step, index = self.args
        return f"two workers computed micro-batch {index} of step {step} differently"


class RunFailed(ManyhandsError):
    """The run is over and did not succeed. `verdict` is the page for people."""

    def __init__(self, verdict: str) -> None:
        super().__init__(verdict)

    @property
    def verdict(self) -> str:
        return self.args[0]


class Interrupted(ManyhandsError):
    """Stopped by a person. `run` is the folder, `step` the last saved step, if any; `again` is what
    goes on with it; empty: nothing does, it was a replay."""

    def __init__(self, run: str, step: int | None, again: str) -> None:
        super().__init__(run, step, again)

    def __str__(self) -> str:
        _, step, again = self.args
        if not again:
            return "interrupted"
        if step is None:
            return f"interrupted before anything was saved. Begin again: {again}"
        return f"interrupted; step {step} is saved. Continue with: {again}"
