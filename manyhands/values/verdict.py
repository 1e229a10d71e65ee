# SPDX-License-Identifier: Apache-2.0
"""After a failure, one page: who failed, at which step, why, and what to do about it."""

import errno
from collections.abc import Sequence
from pathlib import Path

import msgspec

from manyhands.values.machine import most_open_files, open_files
from manyhands.values.run_folder import RunDir
from manyhands.values.user_frames import named


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a cause and a verdict both say: who failed, where and why."""

    rank: int | None
    """None: the driver."""
    pid: int
    host: str
    step: int
    what: str
    detail: str = ""
    advice: str = ""
    noticed_by: str = ""
    micro_batch: int | None = None
    held_out: bool = False
    """It is a batch of held-out records."""
    records: tuple[int, ...] = ()
    """Those of the micro-batch that was in work."""
    ranks: tuple[int, ...] = ()
    """All that went with a host; empty: one worker went."""


class Cause(Failure, frozen=True, kw_only=True):
    """The first cause of a failure."""

    worker: int
    request: bool = False
    """The request was wrong, not the run."""


class Verdict(Failure, frozen=True, kw_only=True):
    """A cause, and what came of it."""

    run: str
    log: str
    saved: int | None
    """The newest committed step."""
    outcome: str = "failed"
    """"failed", or "recovered": training went on."""
    decided: str = ""
    seconds: float = 0.0
    """From noticing it to going on."""
    went_on_at: int | None = None
    recomputed: int = 0
    """Micro-batches, at the most."""

    @classmethod
    def of(cls, cause: Cause, *, run: str, log: str, saved: int | None) -> "Verdict":
        known = {name: getattr(cause, name) for name in Failure.__struct_fields__}
        return cls(**known, run=run, log=log, saved=saved)

    def page(self, *, replay: bool = False) -> str:
        """For a terminal; the most important line first. The folder of a replay goes with it: of
        that there is nothing to look at or to go on with."""
        where = "in the driver" if self.rank is None else f"on rank {self.rank}"
        if self.ranks:
            where = f"on host {self.host} with {ranks_in_words(self.ranks)}"
        verb = "recovered from a failure" if self.outcome == "recovered" else "failed"
        what = "replay" if replay else "run"
        lines = [f"The {what} {verb} at step {self.step}, {where}: {self.what}"]
        if self.detail:
            lines += ["", self.detail]
        lines += ["", f"  process   {self.pid} on {self.host}; {self.noticed_by}"]
        if self.micro_batch is not None:
            shown = ", ".join(str(r) for r in self.records[:16])
            more = f" and {len(self.records) - 16} more" if len(self.records) > 16 else ""
            batch = "held-out batch" if self.held_out else "micro-batch"
            records = f": records {shown}{more}" if self.records else ""
            lines.append(f"  data      {batch} {self.micro_batch}{records}")
        if Path(self.log).exists() and not replay:  # an inline worker has none of its own
            lines.append(f"  log       {self.log}")
        if self.advice:
            lines.append(f"  advice    {self.advice}")
        if self.decided:
            lines.append(f"  decided   {self.decided}")
        if self.outcome == "recovered":
            lines.append(
                f"  went on   at step {self.went_on_at}, {self.seconds:.2f} s after it was "
                f"noticed; micro-batches computed again: {self.recomputed}"
            )
        elif not replay:
            first = "when it is mended, " if self.detail else ""  # the user's own frames
            verb = f"{first}begin again" if self.saved is None else f"{first}continue"
            saved = f"{'nothing' if self.saved is None else f'step {self.saved}'}; {verb}"
            again = RunDir(Path(self.run)).how_to_resume()
            lines.append(f"  saved     {saved}: {again}")
        return "\n".join(lines)


_OF_THE_DISK = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EROFS: ("the file system is read-only", "make it writable"),
}
"""What went wrong, and what to do about it."""


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(str(r) for r in ranks)}"


def explain(error: BaseException) -> str:
    """An exception from user code, torch or the machine, with advice where we have some."""
    text = named(error)
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        written = f"writing {error.filename}" if error.filename else "while saving"
        what, cure = _OF_THE_DISK[error.errno]
        return f"{what}: {written}. What was saved before is still there: {cure}, then resume."
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):  # also one of ZeroMQ's
        here, most = open_files(), most_open_files()
        return (
            f"there are no more file descriptors: {here} are open in this process, which may have "
            f"{most}. Raise the limit (ulimit -n 65536), then resume. ({text})"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return f"memory ran out. Lower train.micro_batch or use fewer workers. ({text})"
    if isinstance(error, SystemExit):
        return f"the task called exit({error.code})"
    return text
