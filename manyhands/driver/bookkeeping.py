# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping: everything the supervisor reports is dealt with here.

Events are passed on to whoever is told of them (run_outputs.py), the ledger is kept, checkpoints
are committed and deleted, scores judged; and at the end there is a report, a verdict or a word
about how to resume.
"""

import math
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from manyhands.accounting import ledger
from manyhands.accounting.deal_micro_batches import epochs_done
from manyhands.accounting.ledger_lines import records_of
from manyhands.accounting.merged_steps import added_up, staleness_in_words
from manyhands.checkpoint.commit import FileRecord, FolderStorage, StepManifest, to_delete
from manyhands.checkpoint.step_files import fingerprint_step
from manyhands.driver.callbacks import call_back
from manyhands.driver.live.live_settings import LiveSettings
from manyhands.driver.resolved_run import ResolvedRun
from manyhands.driver.run_outputs import RunOutputs
from manyhands.driver.server_loads import ServerLoads
from manyhands.driver.speed_meter import SpeedMeter
from manyhands.driver.status_writer import write_status
from manyhands.driver.supervise.run_outcome import Done, Incident
from manyhands.evaluation.early_stopping import (
    best_step,
    criterion,
    see_that_it_was_scored,
    should_stop,
)
from manyhands.monitor.terminal import Progress
from manyhands.planning.planner import Plan
from manyhands.values import events
from manyhands.values.blame import blame
from manyhands.values.config import HEARD_SCORE, EvaluateConfig, live_settings
from manyhands.values.errors import (
    ConfigError,
    Interrupted,
    RequestError,
    RunFailed,
    TaskError,
)
from manyhands.values.kernels import Kernels, otherwise
from manyhands.values.messages import Beat, Merged, SavedFile
from manyhands.values.report import Report
from manyhands.values.run_folder import write_whole
from manyhands.values.task_params import params_text
from manyhands.values.verdict import Cause, Verdict
from manyhands.values.view import Settings, View
from manyhands.values.worker_status import HostStatus, Link, WorkerStatus


class Bookkeeping:
    """The driver's side of everything the supervisor reports."""

    def __init__(
        self,
        job: ResolvedRun,
        made: Plan,
        resume: int | None,
        book: ledger.Book,
    ) -> None:
        """`resume`: the step from which a run goes on that was begun before."""
        first_step = resume or 0
        self.job, self.plan, self.started, self.book = job, made, job.asked, book
        live = [s for c in book.changes if c.step <= first_step for s in live_settings(c.settings)]
        self.live = LiveSettings(job.config.with_settings(live))
        last = book.last_loss
        self.losses: dict[int, float] = {} if last is None else {first_step: last}
        self.logged = first_step
        self.passed_over = -1
        """The last step that was written down."""
        self.incidents = 0
        self.compared = False
        """Whether these machines were compared with those of the run so far."""
        self.unlike = False
        """They compute other bits, or do so among themselves: it was said."""
        self.other_records = False
        self.doing = "running"
        self.storage = FolderStorage(job.run)
        self.outputs = RunOutputs(job.run, job.config.log, quiet=job.quiet)
        self.speed = SpeedMeter()
        self.state = "running"
        self.status_of: list[WorkerStatus] = []
        self.outlook: Callable[[], dict[str, str]] = dict[str, str]
        """The wished speed and the forecast, while there are any."""
        self.staleness: dict[int, list[int]] = {}
        """By view, where workers are at different steps: how many steps were so stale."""
        self.loads = ServerLoads(time.monotonic())
        self.hosts: list[HostStatus] = []
        self.links: list[Link] = []
        self.first_step, self.new = first_step, resume is None
        # By step: what was evaluated again after a resume counts once.
        past = {
            e.step: events.numbers_of(e.scores)
            for e in events.read_events(job.run.events)
            if isinstance(e, events.Evaluated) and e.step <= first_step
        }
        self.history = sorted(past.items())
        self.progress = Progress(
            step=first_step,
            total_steps=made.steps.value,
            epoch=self._epochs(first_step),
            batch=job.config.train.batch,
            workers=made.workers.value,
        )
        verb = "training" if resume is None else f"resuming at step {first_step}"
        lines = made.lines()
        if job.loaded.params:
            lines = [f"params: {params_text(job.loaded.params)}", *lines]
        self.outputs.note("\n  ".join([f"{verb} in {job.run.root}", *lines]))
        self.event(
            events.Started(
                step=first_step,
                total_steps=made.steps.value,
                workers=made.workers.value,
                pid=os.getpid(),
                host=platform.node(),
            )
        )

    def _epochs(self, step: int) -> float:
        """How many are done."""
        return epochs_done(step, **self.book.opened.shape)

    # ---- what the supervisor tells

    def event(self, event: events.AnyEvent) -> None:
        self.outputs.event(event)

    def beat(self, beat: Beat) -> None:
        self.outputs.losses(beat.losses)
        for step, digest in beat.reads:
            self.read(beat.worker, step, digest)
        if beat.load is not None:
            self.loads.hear(beat.worker, beat.load, time.monotonic())
        if beat.loss is None:
            return
        self.speed.measure(beat.records)
        self.progress.samples_per_s = self.speed.lately
        self.progress.step, self.progress.loss = beat.step, beat.loss
        self.progress.epoch = self._epochs(beat.step)
        self.losses = {beat.step: beat.loss}
        self.outputs.progress(self.progress)
        for record in beat.steps:
            if record.step <= self.logged:  # who came later does not know who has told it
                continue
            self.logged = record.step
            event = events.Stepped(
                step=record.step,
                epoch=record.epoch,
                loss=record.loss,
                lr=record.lr,
                samples_per_s=self.progress.samples_per_s,
                numbers=record.numbers,
            )
            self.event(event)
            call_back("on_step", self.job.on_step, event)

    def status(
        self,
        workers: list[WorkerStatus],
        hosts: list[HostStatus],
        links: list[Link],
        doing: str,
    ) -> None:
        self.status_of, self.hosts, self.links, self.doing = workers, hosts, links, doing
        self.progress.servers = sum(worker.serves for worker in workers)
        self.progress.workers = len(workers) - self.progress.servers
        self._write_status()
        if self.loads.due(time.monotonic()):
            self._tell_of_servers()

    def _tell_of_servers(self) -> None:
        if servers := self.loads.untold(time.monotonic()):
            staleness = added_up(self.staleness.values())
            self.event(events.Served(step=self.progress.step, servers=servers, staleness=staleness))

    def begun(
        self,
        view: View,
        step: int,
        groups: list[dict[str, Any]],
        schedule: list[str],
        kernels: list[Kernels],
    ) -> None:
        self.live.groups, self.live.schedule = groups, schedule
        self.logged = min(self.logged, step)
        workers = [m.worker for m in view.members]
        if not self.compared:
            self.compared = True
            if (text := otherwise(self.book.kernels, kernels)) is not None:
                self.unlike = True
                self.event(events.Warned(text=f"{text}; bits may differ from here on"))
        self.unlike |= len(kernels) > 1
        self.loads.begin(view)
        self.book.begin(step, view.generation, workers, view.speeds)
        self.book.computed_by(step, kernels)
        servers = [rank for rank, speed in enumerate(view.speeds) if speed == 0]
        self.progress.workers, self.progress.servers = len(workers) - len(servers), len(servers)
        self.event(
            events.Viewed(
                generation=view.generation,
                first_step=step,
                members={m.rank: m.pid for m in view.members},
                because=view.because,
                servers=servers,
            )
        )

    def merged(self, told: Merged) -> None:
        """Workers are at different steps: which are in, and who computed them."""
        self.book.merge(told.step, told.of, told.applied, told.computed)
        self.staleness[told.of] = told.staleness

    def changed(self, step: int, changes: Settings) -> None:
        self.book.change(step, changes)
        self.live.change(changes)
        self.event(events.Changed(step=step, settings=changes))

    def skipped(self, step: int, why: str) -> None:
        if step != self.passed_over:  # whoever takes over tells of it again
            self.passed_over = step
            self.book.skip(step, why)
            self.event(events.Skipped(step=step, why=why))

    def drew(self, worker: int, step: int, digest: str) -> None:
        """A sampler of the user's own has run in a worker: it must give everybody the same."""
        if (epoch := self.book.draw(step, digest)) is not None:
            raise TaskError(
                f"Task: the sampler gave worker {worker} other records for epoch {epoch} than it "
                "gave before, or to others. It must follow from torch, numpy.random and random "
                "alone, which are seeded for every epoch: not from the time, the process, a file "
                "that changes, or the order of a set of strings."
            )

    def read(self, worker: int, step: int, digest: int) -> None:
        """A stream was read for a step: whenever and wherever that is, it must give the same."""
        if self.book.read(step, digest):
            return
        other = (
            f"the stream (or what collates it) gave worker {worker} other values for step {step}, "
            f"{records_of(self.book.opened, step)}, than it gave before, or to others"
        )
        if self.unlike:  # records may be computed, and are then other ones here
            if not self.other_records:
                self.event(events.Warned(text=other))
            self.other_records = True
            return
        raise TaskError(
            f"Task: {other}. It must give the same each time it is read, in every process: not "
            "what depends on the time, the process, a generator that nobody seeds, a file that "
            "changes, or the order of a set of strings. To go on with other data, begin another "
            "run with train.start_from."
        )

    def recovered(self, incident: Incident) -> None:
        self.incidents += 1
        self.event(
            events.Recovered(
                step=incident.step,
                workers=self.progress.workers,
                seconds=incident.seconds,
                recomputed=incident.recomputed,
                because=incident.decided,
            )
        )
        verdict = msgspec.structs.replace(
            self._verdict(incident.cause),
            outcome="recovered",
            decided=incident.decided,
            seconds=incident.seconds,
            went_on_at=incident.step,
            recomputed=incident.recomputed,
        )
        self.outputs.note(verdict.page(replay=self.job.replays))
        with suppress(OSError):
            encoded = msgspec.json.format(msgspec.json.encode(verdict))
            write_whole(self.job.run.verdict, encoded, durable=False)

    def _verdict(self, cause: Cause) -> Verdict:
        return Verdict.of(
            cause,
            run=str(self.job.run.root),
            log=str(self.job.run.log(cause.worker)),
            saved=max(self.storage.steps(), default=None),
        )

    def scored(self, step: int, scores: dict[str, float]) -> str | None:
        event = events.Evaluated(step=step, scores=dict(scores))
        self.event(event)
        # A run that went back to a checkpoint scores again what it had scored before.
        self.history = [h for h in self.history if h[0] < step] + [(step, scores)]
        evaluate, keep_best = self.job.config.evaluate, self.live.config.checkpoint.keep_best
        see_that_it_was_scored(scores, "checkpoint.keep_best", keep_best)
        see_that_it_was_scored(scores, "evaluate.by", None if evaluate is None else evaluate.by)
        self._retain()
        call_back("on_evaluate", self.job.on_evaluate, event)
        if evaluate is None:
            return None
        try:
            return should_stop(self.history, by=evaluate.by, patience=evaluate.stop_early)
        except ConfigError as error:  # of scores before a resume, which had other names
            self.event(events.Warned(text=f"{error} It will not stop early."))
            return None

    def heard(self, step: int, scores: dict[str, float]) -> float:
        """The score that schedules wait for; from here on it is in the journal."""
        by = criterion((self.job.config.evaluate or EvaluateConfig()).by).score
        if by not in scores:
            raise TaskError(
                f"the schedule waits for the score '{by}' (evaluate.by); the task has: "
                f"{', '.join(scores)}."
            )
        score = scores[by]
        if not any(c.step == step and HEARD_SCORE in c.settings for c in self.book.changes):
            # JSON has no word for what is not finite.
            self.book.change(step, {HEARD_SCORE: score if math.isfinite(score) else str(score)})
        return score

    def written(self, step: int, attempt: int, files: list[SavedFile], blocked_s: float) -> None:
        listed = {f.name: FileRecord(f.size_bytes, f.sha256) for f in files}
        manifest = StepManifest(step, listed, attempt)
        # First the ledger: a checkpoint must never be ahead of what is proven.
        self.book.close_at(step, self.live.rates(), self.losses.get(step), durable=True)
        self.storage.commit(manifest)
        self.event(events.Saved(step=step, size_bytes=manifest.size_bytes, blocked_s=blocked_s))
        self._retain()

    def last_score(self) -> tuple[int, str | None]:
        """The step that was last scored before this run began, and whether that was enough."""
        evaluate = self.live.config.evaluate
        if not self.history or evaluate is None:
            return -1, None
        with suppress(ConfigError):
            enough = should_stop(self.history, by=evaluate.by, patience=evaluate.stop_early)
            return self.history[-1][0], enough
        return -1, None

    def _retain(self) -> None:
        checkpoint = self.live.config.checkpoint
        steps = self.storage.steps()
        gone = to_delete(steps, keep_last=checkpoint.keep_last, best=self._best_of(steps))
        for step, because in gone.items():
            self.storage.delete(step)
            self.event(events.Deleted(step=step, because=because))

    def _best_of(self, steps: list[int]) -> int | None:
        """The one that checkpoint.keep_best keeps."""
        by = self.live.config.checkpoint.keep_best
        saved = [(step, scores) for step, scores in self.history if step in steps]
        with suppress(ConfigError):  # scores before a resume may have had other names
            return None if by is None else best_step(saved, by)

    # ---- how it ends

    def finish(self, done: Done) -> Report:
        step, loss = done.leader.step, done.leader.loss
        self._tell_of_servers()
        if math.isnan(loss):  # it came after the last step, and whoever took it is gone
            loss = self.losses.get(step, math.nan)
        self._use_reserve()  # a report is worth it
        self.book.close_at(step, self.live.rates(), loss, durable=True)
        self.storage.sweep()  # what somebody began to save who did not live to finish it
        mark = fingerprint_step(self.job.run.step(step))
        if done.leader.because == "stopped":
            self.state = "stopped"
            self.event(events.Stopped(step=step))
            raise self._stopped_at(step)
        self.state = "finished"
        scores = next((s for at, s in reversed(self.history) if at == step), {})
        seconds = time.time() - self.started
        report = Report(
            run=str(self.job.run.root),
            step=step,
            epochs=self._epochs(step),
            because=done.leader.because,
            loss=loss,
            scores=scores,
            best_step=self._best_of(self.storage.steps()),
            fingerprint=mark,
            workers=self.progress.workers,
            recoveries=self.incidents,
            seconds=seconds,
            samples_per_s=self.speed.mean(),
            first_step_s=(self.speed.first_at or self.started) - self.started,
            peak_memory_bytes=done.peak_memory_bytes,
        )
        if (stale := staleness_in_words(self.staleness.values())) is not None:
            self.outputs.note(
                f"staleness: {stale}. The weights depended on timing: another run has others"
            )
        write_whole(self.job.run.report, msgspec.json.format(msgspec.json.encode(report)))
        self.event(
            events.Finished(
                step=step, because=report.because, fingerprint=mark, scores=dict(scores)
            )
        )
        return report

    def fail_with(self, error: Exception) -> RequestError | RunFailed:
        """What ended the driver itself, as a verdict."""
        found = blame(error)
        return self.fail(
            Cause(
                rank=None,
                worker=0,
                pid=os.getpid(),
                host=platform.node(),
                step=self.progress.step,
                what=found.what,
                detail=found.detail,
                advice=found.advice,
                request=found.request,
                noticed_by="the driver itself ran into it",
            )
        )

    def fail(self, cause: Cause) -> RequestError | RunFailed:
        """Write the verdict down; returns the error to raise."""
        self.state = "failed"
        self.storage.sweep()
        self._use_reserve()
        if cause.request and cause.step <= self.first_step:
            if self.new:  # nothing was computed: leave no half-made run behind
                self._forget()
            return RequestError(cause.what)
        verdict = msgspec.structs.replace(self._verdict(cause), decided="give up")
        text = verdict.page(replay=self.job.replays)
        self.event(events.Failed(step=cause.step, verdict=text))
        with suppress(OSError):  # the disk may be what failed
            write_whole(self.job.run.verdict, msgspec.json.format(msgspec.json.encode(verdict)))
        return RunFailed(text)

    def interrupted(self) -> Interrupted:
        self.state = "stopped"
        self.storage.sweep()
        saved = max(self.storage.steps(), default=None)
        self.event(events.Stopped(step=saved or 0))
        return self._stopped_at(saved)

    def _stopped_at(self, step: int | None) -> Interrupted:
        run = self.job.run
        again = "" if self.job.replays else run.how_to_resume()
        return Interrupted(str(run.root), step, again)

    def _forget(self) -> None:
        self.state = "forgotten"
        shutil.rmtree(self.job.run.root, ignore_errors=True)

    def _use_reserve(self) -> None:
        with suppress(OSError):
            self.job.run.reserve.unlink(missing_ok=True)

    def close(self) -> None:
        if self.state == "running":
            self.state = "failed"
        self._use_reserve()
        self._write_status()
        self.outputs.close()
        self.book.ledger.close()
        for path in self.job.run.root.glob(".rendezvous-*"):
            path.unlink(missing_ok=True)

    def _write_status(self) -> None:
        if self.state != "forgotten":
            state = self.doing if self.state == "running" else self.state
            outlook = self.outlook() if self.state == "running" else {}
            if (stale := staleness_in_words(self.staleness.values())) is not None:
                outlook["staleness"] = stale
            write_status(
                self.job.run,
                state,
                self.progress,
                self.status_of,
                self.hosts,
                self.links,
                outlook,
                self.loads.lately(),
                added_up(self.staleness.values()),
            )
