# SPDX-License-Identifier: Apache-2.0
"""Any step again, here: recomputed from the nearest checkpoint before it, and compared.

A replay is a run of its own in a temporary folder. It begins with a checkpoint of the run that is
replayed (or with nothing, as that one did), uses its config and the changes of its ledger, and may
have any number of workers. What it computes must be what was computed then: the loss of every step
and the weights that were saved, to the last bit.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from manyhands.accounting import ledger, ledger_lines
from manyhands.accounting.proof import check
from manyhands.checkpoint.commit import FolderStorage, newest_good, problem_of, saved_steps
from manyhands.checkpoint.safetensors_files import fingerprint
from manyhands.checkpoint.step_files import MODEL, weights_files
from manyhands.checkpoint.table_files import fingerprint_tables
from manyhands.driver.drive import drive
from manyhands.driver.resolved_run import ResolvedRun
from manyhands.driver.task_files import reload
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.train import launched
from manyhands.training.compute.kernel_marks import fix_kernels
from manyhands.values import events
from manyhands.values.config import CheckpointConfig, RunConfig, of_the_result, read_toml
from manyhands.values.errors import RequestError
from manyhands.values.kernels import otherwise
from manyhands.values.run_folder import RunDir, open_run
from manyhands.values.run_options import Where
from manyhands.values.scratch_folder import Scratch, sweep
from manyhands.values.task import Task


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found."""

    first: int
    """It began after this many steps: a checkpoint, or 0."""
    to: int
    fingerprint: str
    """Of the weights after `to` steps."""
    losses: dict[int, float]
    """Of every step that was computed again: after so many steps."""
    compared_losses: list[int] = field(default_factory=list[int])
    compared_weights: list[int] = field(default_factory=list[int])
    differences: list[str] = field(default_factory=list[str])
    passed_over: list[str] = field(default_factory=list[str])
    """Damaged checkpoints that it could have begun with: it began with an earlier one."""
    damaged: list[str] = field(default_factory=list[str])
    """Damaged checkpoints that it should have been compared with."""
    otherwise: str | None = None
    """This machine computes other bits than those that trained: then differences mean nothing."""

    @property
    def same(self) -> bool:
        return not self.differences


def replay(
    run: str | Path,
    task: Task | None = None,
    *,
    step: int,
    to: int | None = None,
    workers: int = 1,
    debug: int | None = None,
    quiet: bool = True,
    audit: bool = False,
    launcher: Launcher | None = None,
) -> Replayed:
    """Compute steps `step` (counted from 0) up to `to` of a run again, and compare.

    `debug` stops in a debugger at that micro-batch of step `step`. `audit` has a micro-batch of
    every step computed by two workers.
    """
    folder = open_run(Path(run))
    last = step + 1 if to is None else to
    _refuse_steps_not_done(folder, step, last)
    config, _ = read_toml(folder.config)
    if config.train.portable and debug is not None:
        fix_kernels()  # here, before the task's own code has computed something
    loaded, notes = reload(folder, task, config)
    nearest, passed_over = newest_good(FolderStorage(folder), at_most=step)
    first = nearest or 0
    _refuse_what_depends_on_timing(folder, first, last)
    engine = Where(engine="local" if debug is None else "inline")
    losses: dict[int, float] = {}
    sweep()
    with closing(Scratch("replay")) as scratch, launched(engine, launcher) as hands:
        again = _copy(folder, scratch.path / "run", first)
        job = ResolvedRun(
            run=again,
            loaded=loaded,
            config=_config(config, last, audit=audit),
            workers=workers,
            on_step=lambda event: losses.__setitem__(event.step, event.loss),
            quiet=quiet,
            changes=ledger_lines.changes_by_step(ledger.read(folder.ledger)),
            replays=True,
            debug=None if debug is None else (step, debug),
            notes=notes,
        )
        report = drive(job, hands, resume=first or None)
        found = Replayed(
            first,
            last,
            report.fingerprint,
            losses,
            passed_over=passed_over,
            otherwise=_otherwise(folder, again, last),
        )
        return _compare(folder, again, found)


def _refuse_steps_not_done(run: RunDir, step: int, last: int) -> None:
    if step < 0 or last <= step:
        raise RequestError(f"steps {step} to {last}: nothing to replay.")
    done = _steps_done(run)
    if last > done:
        raise RequestError(f"{run.root} has done {done} steps; step {last - 1} is not among them.")


def _otherwise(then: RunDir, now: RunDir, last: int) -> str | None:
    there, here = (ledger_lines.computing_at(ledger.read(run.ledger), last) for run in (then, now))
    return otherwise(there, here)


def _refuse_what_depends_on_timing(run: RunDir, first: int, last: int) -> None:
    lines = ledger_lines.surviving(ledger.read(run.ledger))
    if any(c.computed is not None and c.first < last and c.stop > first for c in lines):
        raise RequestError(
            f"steps {first} to {last} of {run.root} were computed by workers at different steps "
            '(server.mode "stale" or "async"): what they read depended on timing, and cannot be '
            "had again. `manyhands ledger RUN --check` proves that each was applied once."
        )


def replay_last_steps(run: Path, *, workers: int) -> Replayed:
    """From the last checkpoint but one, with workers that check each other."""
    saved = FolderStorage(open_run(run)).steps()
    if not saved:
        raise RequestError(f"{run} holds no checkpoint to compare with.")
    first = saved[-2] if len(saved) > 1 else 0
    return replay(run, step=first, to=saved[-1], workers=workers, audit=True)


def _steps_done(run: RunDir) -> int:
    return check(ledger.read(run.ledger)).steps


def _copy(run: RunDir, scratch: Path, first: int) -> RunDir:
    """Enough of a run to begin another from its checkpoint."""
    again = RunDir(scratch)
    if not first:
        return again
    again.create()
    for name in ("config.toml", "task"):
        source = run.root / name
        target = again.root / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    _copy_ledger(run.ledger, again.ledger)
    shutil.copytree(run.step(first), again.step(first))
    return again


def _copy_ledger(ledger_then: Path, ledger_now: Path) -> None:
    """Without what a stream gave then: what it gives now is compared with that afterwards."""
    entries = ledger.read(ledger_then)
    kept = [e for e in entries if not isinstance(e, ledger_lines.StreamRead)]
    ledger_now.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in kept))


def _config(config: RunConfig, last: int, *, audit: bool) -> RunConfig:
    """All that the weights follow from. How they were computed then does not matter: a run over MPI
    is replayed without it, and one that was `alone` by two workers, if so many are asked for."""
    every = config.checkpoint.every_steps or last
    same = of_the_result(config)
    train = replace(same.train, steps=last, audit_every=1 if audit else None)
    kept = CheckpointConfig(every_steps=every, keep_last=1 << 30)
    return replace(same, train=train, checkpoint=kept)


def _compare(run: RunDir, again: RunDir, found: Replayed) -> Replayed:
    """Bit for bit, wherever the run left something to compare with."""
    then = events.read_losses(run.losses)
    for step in sorted(then.keys() & found.losses.keys()):
        found.compared_losses.append(step)
        if then[step] != found.losses[step]:
            found.differences.append(
                f"step {step}: the loss was {then[step]!r}, now it is {found.losses[step]!r}"
            )
    drawn_then, drawn_now = (ledger_lines.drawn(ledger.read(r.ledger)) for r in (run, again))
    found.differences.extend(
        f"epoch {epoch}: the sampler gave other records than then"
        for epoch in sorted(drawn_then.keys() & drawn_now.keys())
        if drawn_then[epoch] != drawn_now[epoch]
    )
    found.differences.extend(_other_records(run, again))
    then_saved = saved_steps(run) | set(FolderStorage(run).steps())
    common = then_saved & set(FolderStorage(again).steps())
    for step in sorted(s for s in common if s > found.first):
        if (problem := problem_of(FolderStorage(run), step)) is not None:
            if problem not in found.passed_over:
                found.damaged.append(problem)
            continue
        found.compared_weights.append(step)
        for file in weights_files(run.step(step)):
            before, now = (fingerprint(r.step(step) / file) for r in (run, again))
            if before != now:
                what = "weights" if file == MODEL else file
                found.differences.append(
                    f"step {step}: the {what} were {before[:16]}…, now they are {now[:16]}…"
                )
        before, now = (fingerprint_tables(r.step(step)) for r in (run, again))
        if before != now:
            found.differences.append(f"step {step}: the rows of tables are other ones than then")
    return found


def _other_records(run: RunDir, again: RunDir) -> Iterator[str]:
    """Steps for which a stream gave something else than then."""
    entries = ledger.read(run.ledger)
    then, now = (ledger_lines.read_from(e) for e in (entries, ledger.read(again.ledger)))
    for step in sorted(then.keys() & now.keys()):
        if then[step] != now[step]:
            which = ledger_lines.records_of(ledger_lines.opening(entries), step)
            yield f"step {step}: the stream gave other {which} than then"
