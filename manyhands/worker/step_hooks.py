# SPDX-License-Identifier: Apache-2.0
"""What happens after a step, on every worker: settings that change, the log, scores, checkpoints,
and leaving the loop when all have been asked to."""

import math
from collections.abc import Callable

from manyhands.checkpoint.saver import Content, Saver, Streamed
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.training.compute.nondeterminism import PlainState
from manyhands.training.loop import Hook
from manyhands.training.state.phased_optimizer import acting
from manyhands.training.state.replica import Replica, StepFacts
from manyhands.values.config import EvaluateConfig, live_settings
from manyhands.values.messages import Passed, RoundPart
from manyhands.values.view import View
from manyhands.values.worker_orders import Orders
from manyhands.values.world import World
from manyhands.worker import checkpoint_part
from manyhands.worker.build_worker import WorkerParts
from manyhands.worker.scoring import (
    batches_of,
    evaluation_of,
    my_indices,
    score_together,
    watched,
)

ALL_DONE = "all steps are done"


class StepHooks:
    def __init__(
        self,
        orders: Orders,
        parts: WorkerParts,
        channel: WorkerChannel,
        saver: Saver,
        moment: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.orders, self.config, self.parts = orders, orders.config, parts
        self.channel, self.saver, self.moment, self.tell = channel, saver, moment, tell
        self.because = ALL_DONE
        """Why training ended."""
        self.halting = False
        """All leave the loop, and take their places in another view."""
        self.scored_at = self.saved_at = self.logged = -1
        self.obeyed = 0
        """The last command that was looked at for a wish to save."""
        self.plain: PlainState | None = None
        """What a model has that no worker knows of another; looked at around the first step."""

    def enter(self, view: View, world: World) -> None:
        """With the state that the members of a view have come to."""
        self.view, self.world, self.halting = view, world, False
        self.scored_at, self.saved_at, self.obeyed = view.scored, view.saved, view.halts
        self.configure()

    def configure(self) -> None:
        """Settings that have changed since the run began, and are not the optimizer's."""
        replica, heartbeat = self.parts.replica, self.channel.heartbeat
        due = [s for at, s in sorted(self.view.journal.items()) if at <= replica.step]
        settings = [live_settings(s) for s in (*due, self.view.changes)]
        self.config = self.orders.config.with_settings([s for some in settings for s in some])
        replica.clip_norm = self.config.train.clip_norm
        if self.orders.log_every != 1:  # somebody watches every step
            heartbeat.log_every = self.config.log.every_steps

    def catch_up(self) -> bool:
        """What is due after the step at which this view begins, and was not done before it.

        True: it was the last one.
        """
        replica, facts = self.parts.replica, self.parts.replica.facts
        if facts is not None and facts.step == replica.step - 1 and self.logged < replica.step:
            self._log(replica, facts)
        if not self.parts.sync.held().whole:
            return False  # what is missing comes first
        if self.view.stop and replica.step < self.orders.steps:
            self.because = "stopped"
            return True
        if self.view.scored == replica.step and self.view.enough is not None:
            self.because = self.view.enough
            return True
        if replica.step == 0:
            return False
        enough = self.scored_at != replica.step and self._evaluate_when_due(replica)
        if self.saved_at != replica.step:
            self._save_when_due(replica)
        return bool(enough)

    def due(self, done: int) -> int:
        """After how many steps, of which `done` are, the hooks next do something that all workers
        must do at the same step."""
        evaluate, every = self._evaluates, [self.config.checkpoint.every_steps]
        if evaluate is not None:
            every.append(evaluate.every_steps or self.parts.feed.feed.batches_per_epoch)
        found = [(done // n + 1) * n for n in every if n is not None]
        found += [step for step in self.view.journal if step > done]
        return min([self.orders.steps, *found])

    def all(self) -> list[Hook]:
        return [
            self._reconfigure,
            self._log,
            self._evaluate_when_due,
            self._save_when_due,
            self._leave_when_asked,
        ]

    def finish(self) -> None:
        """The last step is always scored (unless a person stopped it) and always saved."""
        replica = self.parts.replica
        if self.saved_at != replica.step:
            self._save(replica)
        self.saver.drain()  # before scoring: whatever a score does, the weights are safe
        wanted = self.parts.held_out is not None and self.because != "stopped"
        if wanted and self.scored_at != replica.step:
            self._see_all_saved()
            self._evaluate(replica)

    def _see_all_saved(self) -> None:
        """A score that fails on one worker ends all of them: not before each has told what it has
        written."""
        round = f"saved-{self.view.generation}"
        worker = self.orders.worker
        self.channel.send(RoundPart(worker=worker, round=round, payload=b"", to_all=True))
        self.channel.reply(round)

    # ---- the hooks

    def _reconfigure(self, replica: Replica, facts: StepFacts) -> None:
        if replica.step in self.view.journal:
            self.configure()

    def _log(self, replica: Replica, facts: StepFacts) -> None:
        self.saver.check()
        heartbeat = self.channel.heartbeat
        epoch = self.parts.feed.epochs_done(replica.step)
        groups = acting(replica.optimizer, facts.step).param_groups
        lr = float(groups[0].get("lr", math.nan))
        numbers = dict(facts.numbers)
        heartbeat.stepped(replica.step, epoch, facts.loss, lr, facts.records, numbers, facts.read)
        if facts.skipped and self.world.leads:
            self.channel.send(Passed(worker=self.orders.worker, step=facts.step, why=facts.skipped))
        first, self.logged = self.logged < 0, replica.step
        if first:  # people wait for the first sign of life
            self.channel.send(heartbeat.beat())
            for note in self.plain.changed() if self.plain is not None else ():
                self.tell(note)

    def _evaluate_when_due(self, replica: Replica, facts: StepFacts | None = None) -> bool:
        evaluate = self._evaluates
        if evaluate is None:
            return False
        if evaluate.every_steps is None:
            due = self.parts.feed.feed.ends_epoch(replica.step - 1)
        else:
            due = replica.step % evaluate.every_steps == 0
        return due and self._evaluate(replica, heard=True)

    @property
    def _evaluates(self) -> EvaluateConfig | None:
        """When to, while it trains."""
        evaluate, schedules = self.config.evaluate, self.parts.replica.schedules
        if evaluate is None and schedules.on_scores and not self.orders.replays:
            evaluate = EvaluateConfig()  # schedules wait for scores
        return evaluate if self.parts.held_out is not None else None

    def _evaluate(self, replica: Replica, *, heard: bool = False) -> bool:
        """Score the held-out records together; True when the supervisor says to stop. `heard`:
        schedules that wait for a score take this one."""
        parts, world = self.parts, self.world
        assert parts.held_out is not None
        evaluation = evaluation_of(parts.task, self.config)
        mine = watched(my_indices(parts.held_out, self.config, world), self.channel, replica.step)
        batches = batches_of(parts.held_out, self.config, mine, parts.device)
        reply = score_together(
            evaluation,
            replica,
            batches,
            self.channel,
            weights=self.config.scored_weights,
            leads=world.leads,
            heard=heard and replica.schedules.on_scores,
        )
        if reply.heard is not None:
            replica.schedules.hear(replica.step, reply.heard)
        self.scored_at = replica.step
        self.because = reply.stop or self.because
        return reply.stop is not None

    def _save_when_due(self, replica: Replica, facts: StepFacts | None = None) -> None:
        every, asked = self.config.checkpoint.every_steps, False
        if facts is not None:  # all have heard the same commands, so all save after the same step
            asked = self.channel.told_to_save(self.obeyed, facts.agreed)
            self.obeyed = max(self.obeyed, facts.agreed)
        if asked or (every is not None and replica.step % every == 0):
            self._save(replica)

    def _save(self, replica: Replica) -> None:
        self.moment("save")
        contents: list[Content | Streamed] = []
        if self.world.host == 0:
            held = self.parts.sync.held()
            worker = self.orders.worker
            contents.append(checkpoint_part.optimizer_part(worker, held.entries))
            contents += checkpoint_part.table_parts(replica.tables, worker)
        if self.world.leads:
            self.channel.send(self.channel.heartbeat.beat())  # what was read, before what is saved
            stream = self.parts.feed.stream_state(replica.step)
            contents += checkpoint_part.common_part(replica, stream)
        self.saver.save(replica.step, self.view.generation, contents)
        self.saved_at = replica.step

    def _leave_when_asked(self, replica: Replica, facts: StepFacts) -> bool:
        """All have heard the same Halt, so all leave after the same step."""
        if self.view.stop and self.parts.sync.held().whole and replica.step < self.orders.steps:
            self.because = "stopped"  # which had to wait for what was missing
            return True
        done = replica.step >= self.orders.steps or self.because != ALL_DONE
        self.halting = self.channel.told_to_halt(self.view.halts, facts.agreed) and not done
        return self.halting
