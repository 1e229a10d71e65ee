# SPDX-License-Identifier: Apache-2.0
"""What is fetched before the first step, and the refusal of a cache that is too small.

For workers of its own host the driver calls `make_ready` before it starts them, else they do,
before they join.
"""

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from manyhands.data.fetching.shard_cache import Cache, key_of
from manyhands.data.fetching.transfer import BytesProgress, Direct, Peer, Replicate
from manyhands.data.fetching.wanted_shards import WantedShards
from manyhands.data.shards.manifest import ShardInfo
from manyhands.values.byte_sizes import megabytes
from manyhands.values.errors import ConfigError

SHOW_AFTER_S = 2.0
"""What takes no longer is not worth a bar."""

FetchAmount = Literal["all", "missing", "nothing"]
"""Of what is to be here before the start: all of it, also checking what is here; what is missing;
or nothing, where others have done it."""


def make_ready(
    wanted: Sequence[WantedShards],
    *,
    workers: int,
    quiet: bool,
    fetch: FetchAmount,
    progress: BytesProgress | None,
) -> None:
    """For what `workers` processes of this host are going to read."""
    by_cache: dict[Path, list[WantedShards]] = {}
    for each in wanted:
        if (cache := _cache_of(each)) is not None:
            by_cache.setdefault(cache.folder, []).append(each)
    for sharing in by_cache.values():
        _refuse_a_small_cache(sharing, workers)
    for each in wanted:
        transfer = each.transfer
        if not isinstance(transfer, Replicate) or fetch == "nothing":
            continue
        if fetch == "missing":
            transfer.fetch_missing(each.shards, progress)
            continue
        with shown_when_slow(f"fetching {each.name}", quiet=quiet) as shown:
            transfer.fetch_all(each.shards, shown)


def _cache_of(wanted: WantedShards) -> Cache | None:
    transfer = wanted.transfer
    return transfer.cache if isinstance(transfer, Direct | Peer | Replicate) else None


def _refuse_a_small_cache(wanted: Sequence[WantedShards], workers: int) -> None:
    """These read through the same cache."""
    cache = _cache_of(wanted[0])
    assert cache is not None
    each = sum(each.open_bytes for each in wanted)
    whole = _distinct_bytes(shard for each in wanted for shard in each.shards)
    if any(isinstance(each.transfer, Replicate) for each in wanted):
        need, why = whole, 'data.transfer = "replicate" keeps all shards in it'
    else:
        need = min(whole, workers * each)
        each_has = f"{megabytes(each)} each open at once (two windows of a split)"
        why = f"{workers} workers have up to {each_has}"
    if cache.limit is not None and cache.limit < need:
        raise ConfigError(
            f"the cache {cache.folder} may hold {megabytes(cache.limit)}, but {why}: "
            f'{megabytes(need)} are needed. Set data.cache_limit = "{megabytes(need)}" or more, or '
            f"leave it out{_cheaper(wanted)}."
        )


def _cheaper(wanted: Sequence[WantedShards]) -> str:
    if any(isinstance(each.transfer, Replicate) for each in wanted):
        return '; or fetch shards when they are needed: data.transfer = "direct"'
    return "; or use fewer workers, or a smaller window: mh.prepared(..., window=RECORDS)"


def _distinct_bytes(shards: Iterable[ShardInfo]) -> int:
    return sum({key_of(shard): shard.nbytes for shard in shards}.values())


@contextmanager
def shown_when_slow(text: str, *, quiet: bool) -> Generator[BytesProgress | None]:
    """A bar on a terminal, a line where nobody watches; neither if it is over soon."""
    if quiet:
        yield None
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Bar(*columns, console=console)
    task = bar.add_task(text, total=None)

    def say() -> None:
        print(text, file=sys.stderr, flush=True)

    timer = Timer(SHOW_AFTER_S, bar.start if console.is_terminal else say)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()  # it may be starting the bar just now
        if bar.live.is_started:
            bar.stop()
