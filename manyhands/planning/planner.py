# SPDX-License-Identifier: Apache-2.0
"""Machine + config + wishes → Plan: how many workers, which way bytes move, how many steps.

Pure. Every choice carries its reason; what cannot work is refused with what would.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from manyhands.accounting.deal_micro_batches import cut_sizes, steps_per_epoch
from manyhands.accounting.phases import Phases
from manyhands.values.config import TrainConfig
from manyhands.values.errors import ConfigError
from manyhands.values.machine import MOST_RANKS, Machine
from manyhands.values.server_config import ServerConfig


class Choice(msgspec.Struct, frozen=True):
    value: Any
    because: str

    def __str__(self) -> str:
        return f"{self.value} ({self.because})"


class Plan(msgspec.Struct, frozen=True):
    workers: Choice
    collective: Choice
    encryption: Choice
    steps: Choice
    micro_batches: Choice
    records: int
    steps_per_epoch: int | float
    """On average, where several optimizers do not take a step in every round."""
    phases: Choice | None = None
    readers: Choice | None = None
    """None: not known before fetching was measured."""
    servers: Choice | None = None
    """None: there are none."""
    notes: list[str] = []
    """What settings have from the data they are for."""

    @property
    def processes(self) -> int:
        """Workers and servers together."""
        return self.workers.value + (self.servers.value if self.servers else 0)

    def lines(self) -> list[str]:
        named = (
            ("workers", self.workers),
            ("servers", self.servers),
            ("collective", self.collective),
            ("encryption", self.encryption),
            ("steps", self.steps),
            ("micro-batches", self.micro_batches),
            ("optimizers", self.phases),
            ("readers", self.readers),
        )
        return [*(f"{name}: {choice}" for name, choice in named if choice is not None), *self.notes]


def plan(
    train: TrainConfig,
    machine: Machine,
    *,
    workers: int | tuple[int, int] | None,
    records: int,
    phases: Phases | None = None,
    most_workers: int | None = None,
    many_hosts: bool = False,
    paced: bool = False,
    readers: int | None = None,
    batch_loss: bool = False,
    servers: ServerConfig | None = None,
    resumed: bool = False,
    notes: Sequence[str] = (),
) -> Plan:
    """`workers` is what was asked for, `most_workers` what the engine can start; `paced`: a wished
    speed will decide, so it begins with the fewest; `batch_loss`: the task has one; `resumed`: what
    is part of the result can no longer be changed."""
    collective = _collective(train, many_hosts)
    merges = servers is not None and servers.merges
    computing = _workers(train, machine, workers, most_workers, paced, resumed, merges)
    count = int(computing.value)
    return Plan(
        workers=computing,
        collective=collective,
        encryption=_encryption(train, str(collective.value), many_hosts),
        steps=_steps(train, records, phases),
        micro_batches=_micro_batches(train, records, batch_loss),
        records=records,
        steps_per_epoch=_steps_per_epoch(records, train.batch, phases),
        phases=_phases(phases),
        readers=Choice(readers, "of each worker, as asked") if readers else None,
        servers=_servers(servers, most_workers, many_hosts, count, str(collective.value))
        if servers
        else None,
        notes=list(notes),
    )


def _servers(
    asked: ServerConfig, startable: int | None, many_hosts: bool, workers: int, collective: str
) -> Choice:
    if startable is not None:
        raise ConfigError(
            'train.sync = "server" needs processes beside the workers, and this engine starts '
            f"{startable}. Leave out --engine, or use --sync allreduce."
        )
    if workers + asked.count > MOST_RANKS:
        raise ConfigError(
            f"{workers} workers and server.count = {asked.count}: together they are more than "
            f"{MOST_RANKS}."
        )
    if asked.merges and many_hosts and collective != "sockets":
        raise ConfigError(
            f'server.mode = "{asked.mode}" needs hosts that speak over sockets of our own, and '
            f'train.collective is "{collective}". Leave it out, or use server.mode = "sync".'
        )
    where = "beside the workers, on as many hosts as there are" if many_hosts else "on this host"
    if asked.merges and many_hosts:
        where = (
            "the first process of every host serves, so there are at least as many as hosts, and a "
            "host with room for one only keeps a copy; a push counts when every host has it"
        )
    return Choice(asked.count, f"as asked; {where}; {_when_applied(asked, workers)}")


def _when_applied(asked: ServerConfig, workers: int) -> str:
    k = asked.staleness or 0
    if not asked.merges:
        zero = " (a staleness of 0 is sync)" if asked.mode == "stale" else ""
        return f"a step is taken when all of it is there{zero}"
    told = "each worker computes whole steps; which weights come of it depends on timing"
    if asked.mode == "async":
        return f"{told}; nobody waits for the slowest"
    idle = f", so that at most {k + 1} of {workers} compute at a time" if k + 1 < workers else ""
    return f"{told}; a step begins when all but {k} before it have been applied{idle}"


def _workers(
    train: TrainConfig,
    machine: Machine,
    wish: int | tuple[int, int] | None,
    startable: int | None,
    paced: bool,
    resumed: bool,
    merges: bool,
) -> Choice:
    most = usable_workers(train.micro_batches, merges=merges)
    if isinstance(wish, tuple):
        if startable is None and train.sync != "alone":
            if wish[0] > most and not merges:
                raise _too_many(train, wish[0], "at least ", resumed)
            return _between(train, machine, *wish, most, paced)
        if wish[0] > 1:
            raise ConfigError(f"this run can have one worker, not {wish[0]} to {wish[1]}.")
        wish = 1
    asked = wish
    if startable is not None:
        if asked is not None and asked > startable:
            raise ConfigError(f"this engine runs {startable} worker; use --workers {startable}.")
        asked = asked or startable
    if train.sync == "alone":
        if asked not in (None, 1):
            raise ConfigError(f'train.sync = "alone" is one worker; {asked} were asked for.')
        return Choice(1, "train.sync is alone")
    if asked is None:
        cores = max(1, machine.cores // train.threads)
        if merges:
            return Choice(min(cores, most), f"of {cores} usable cores; each computes whole steps")
        return Choice(
            min(cores, most), f"the smaller of {cores} usable cores and {most} micro-batches"
        )
    if asked < 1:
        raise ConfigError(f"--workers must be at least 1, got {asked}.")
    if asked > most and not merges:
        raise _too_many(train, asked, "", resumed)
    return Choice(asked, "as asked")


def usable_workers(micro_batches: int, *, merges: bool) -> int:
    """The most that have something to do: a micro-batch of each step, or, where workers are at
    different steps, a step."""
    return MOST_RANKS if merges else micro_batches


def _too_many(train: TrainConfig, asked: int, at_least: str, resumed: bool) -> ConfigError:
    """Workers for whom there is no micro-batch. A run keeps its micro-batches for life."""
    most, batch = train.micro_batches, train.batch
    smaller = [size for size in range(1, batch // asked + 1) if batch % size == 0]
    cure = (
        f", or set train.micro_batch to {smaller[-1]}" if smaller else ", or a larger train.batch"
    )
    cure = ": a run keeps its micro-batches for life" if resumed else cure
    return ConfigError(
        f"{at_least}{asked} workers, but a step has only {most} micro-batch{'es' * (most != 1)} "
        f"(train.batch {batch} / train.micro_batch {train.micro_batch_size}), so some would have "
        f"nothing to do. Use --workers {most} at most{cure}."
    )


def _between(
    train: TrainConfig, machine: Machine, least: int, most: int, usable: int, paced: bool
) -> Choice:
    """As many as there is room for, to begin with."""
    if paced:
        return Choice(least, "to begin with; the wished speed decides")
    cores = max(1, machine.cores // train.threads)
    found = max(least, min(most, cores, usable))
    return Choice(found, f"between {least} and {most}, with {cores} usable cores")


def read_workers(text: int | str | None) -> int | tuple[int, int] | None:
    """ "4", or "2:8" for at least two and at most eight."""
    if text is None or isinstance(text, int):
        return text
    least, colon, most = text.partition(":")
    try:
        low, high = int(least), int(most) if colon else int(least)
    except ValueError:
        raise ConfigError(f"--workers {text}: write a number, or a range as in 2:8.") from None
    if low < 1:
        raise ConfigError(f"--workers must be at least 1, got {text}.")
    if high < low:
        raise ConfigError(f"--workers {text}: write the smaller number first.")
    return (low, high) if colon else low


def _collective(train: TrainConfig, many_hosts: bool) -> Choice:
    if train.sync == "alone":
        return Choice("none", "one worker has nobody to talk to")
    if train.collective == "shared" and many_hosts:
        raise ConfigError(
            'train.collective = "shared" is for workers of one host; several hosts need "sockets", '
            '"mpi" or "auto".'
        )
    if train.collective != "auto":
        return Choice(train.collective, "as asked")
    if train.device == "cuda":
        return Choice("nccl", "the workers are on GPUs")
    if many_hosts:
        return Choice("sockets", "workers of a host share its memory, hosts speak over TCP")
    return Choice("shared", "all workers are on one host and share its memory")


def _encryption(train: TrainConfig, collective: str, many_hosts: bool) -> Choice:
    """Of what workers of different hosts send each other."""
    foreign = collective in ("mpi", "gloo", "nccl")
    if foreign and train.encrypt is True:
        raise ConfigError(
            f"train.encrypt = true, but {collective} speaks for itself and cannot be made to "
            'encrypt from here. Use train.collective = "sockets" (or "auto"); or, on a network '
            'that is trusted or encrypts by itself, train.encrypt = "auto".'
        )
    if not many_hosts or collective in ("none", "shared"):
        return Choice("none", "nothing is sent to another host")
    if foreign:
        return Choice("none", f"{collective} speaks for itself: gradients travel in the open")
    if train.encrypt is True:
        return Choice("sealed", "as asked")
    if train.encrypt is False:
        return Choice("none", "as asked")
    return Choice("none", "gradients travel in the open; train.encrypt = true seals them")


def _steps_per_epoch(records: int, batch: int, phases: Phases | None) -> int | float:
    batches = steps_per_epoch(records, batch)
    if phases is None:
        return batches
    found = batches * phases.steps_per_batch
    return int(found) if found == int(found) else found


def _phases(phases: Phases | None) -> Choice | None:
    if phases is None:
        return None
    over = "of a round see the same batch" if phases.shared else "each take the next batch"
    return Choice(str(phases), f"each takes a step, in this order; those {over}")


def _steps(train: TrainConfig, records: int, phases: Phases | None) -> Choice:
    if train.steps is not None:
        return Choice(train.steps, "as asked")
    epochs = train.epochs or 1
    per_epoch = steps_per_epoch(records, train.batch)
    batches, what = epochs * per_epoch, f"{epochs} epochs of {per_epoch} batches of {train.batch}"
    return Choice(phases.steps_before(batches) if phases else batches, what)


def _micro_batches(train: TrainConfig, records: int, batch_loss: bool) -> Choice:
    batch = min(records, train.batch)
    sizes = cut_sizes(batch, train.micro_batch_size)
    sees = f"; batch_loss sees {_records(batch)}" if batch_loss else ""
    if batch < train.batch:
        most = train.micro_batch_size
        each = f"of {'up to ' * (sizes[0] > sizes[-1])}{_records(sizes[0])}"
        return Choice(len(sizes), f"{each}: the {batch} there are, {most} in each at most{sees}")
    how = "as asked" if train.micro_batch else _PARTS[len(sizes)].format(batch)
    return Choice(len(sizes), f"of {_records(sizes[0])} each, {how}{sees}")


_PARTS = {
    8: "an eighth of the batch",
    4: "a quarter of the batch: {} has no whole eighth",
    2: "half of the batch: {} has no whole quarter",
    1: "the whole batch: {} cannot be halved",
}
"""By the number of micro-batches, where nobody has said how large they are."""


def _records(count: int) -> str:
    return f"{count} record{'s' * (count != 1)}"
