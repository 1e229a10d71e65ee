# SPDX-License-Identifier: Apache-2.0
"""From settings to shards: the cache, the way they come, and what is fetched before the start.

The driver and the workers of a host open the same cache folder, each for itself. Opening fetches
nothing. `make_ready` refuses a cache that is too small, and fetches what is to be here first: for
workers of its own host the driver calls it before it starts them, else they do, before they join.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

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
from manyhands.data.fetching.transfer import (
    BytesProgress,
    Direct,
    FailureReport,
    Peer,
    Replicate,
    Transfer,
)
from manyhands.data.mapreduce.resumable_tasks import parse_bytes
from manyhands.data.reading.records import FetchAmount
from manyhands.data.reading.shard_records import ShardRecords
from manyhands.data.shards.manifest import ShardInfo
from manyhands.data.shards.prepared_url import FolderOrUrl, RemoteFolder
from manyhands.values.config import DataConfig
from manyhands.values.errors import ConfigError, DataError
from manyhands.values.world import user_cache

SHOW_AFTER_S = 2.0
"""What takes no longer is not worth a bar."""

_WAYS: dict[str, Callable[[str, Cache, FailureReport], Transfer]] = {
    "auto": Direct,
    "direct": Direct,
    "peer": lambda url, cache, report: Peer(url, cache, report=report),
    "replicate": Replicate,
}
"""By data.transfer. A `Peer` knows nobody at first: `sharing` tells it."""


def open_transfer(folder: RemoteFolder, settings: DataConfig, cache: Cache) -> Transfer:
    return _WAYS[settings.transfer](folder.url, cache, _note)


def _note(text: str) -> None:
    """A source that stumbled; in a worker this goes to its log."""
    print(text, file=sys.stderr, flush=True)


def open_cache(settings: DataConfig) -> Cache:
    """The folder is made, for its owner alone, where it is not there."""
    folder = _default() if settings.cache is None else Path(settings.cache).expanduser()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder} cannot be made: {error.strerror}. Name another: "
            "data.cache = PATH"
        ) from error
    return Cache(folder.absolute(), cache_limit(settings))


def cache_limit(settings: DataConfig) -> int | None:
    """In bytes."""
    if settings.cache_limit is None:
        return None
    try:
        return parse_bytes(settings.cache_limit)
    except DataError as error:
        raise ConfigError(f"data.cache_limit: {error}") from None


def _default() -> Path:
    return user_cache() / "manyhands"


@contextmanager
def shard_file(folder: FolderOrUrl, info: ShardInfo) -> Generator[Path]:
    """One shard as a local file; of a folder behind a URL, in the user's own cache."""
    if isinstance(folder, Path):
        yield folder / info.file
        return
    transfer = open_transfer(folder, DataConfig(), open_cache(DataConfig()))
    path = transfer.path(info)
    try:
        yield path
    finally:
        transfer.release(info)


# ---- before the start


def make_ready(
    parts: Sequence[ShardRecords],
    *,
    workers: int,
    quiet: bool,
    fetch: FetchAmount,
    progress: BytesProgress | None,
) -> None:
    """For what `workers` processes of this host are going to read."""
    by_cache: dict[Path, list[ShardRecords]] = {}
    for part in parts:
        if (cache := _cache_of(part)) is not None:
            by_cache.setdefault(cache.folder, []).append(part)
    for sharing in by_cache.values():
        _refuse_a_small_cache(sharing, workers)
    for part in parts:
        transfer = part.data.transfer
        if not isinstance(transfer, Replicate) or fetch == "nothing":
            continue
        if fetch == "missing":
            transfer.fetch_missing(part.shards, progress)
            continue
        text = f"fetching {part.data.split} of {part.data.folder}"
        with shown_when_slow(text, quiet=quiet) as shown:
            transfer.fetch_all(part.shards, shown)


def _cache_of(part: ShardRecords) -> Cache | None:
    transfer = part.data.transfer
    return transfer.cache if isinstance(transfer, Direct | Peer | Replicate) else None


def _refuse_a_small_cache(parts: Sequence[ShardRecords], workers: int) -> None:
    """These read through the same cache."""
    cache = _cache_of(parts[0])
    assert cache is not None
    each = sum(part.open_bytes() for part in parts)
    whole = _distinct_bytes(shard for part in parts for shard in part.shards)
    if any(isinstance(part.data.transfer, Replicate) for part in parts):
        need, why = whole, 'data.transfer = "replicate" keeps all shards in it'
    else:
        need = min(whole, workers * each)
        why = f"{workers} workers have up to {_mb(each)} each open at once (two windows of a split)"
    if cache.limit is not None and cache.limit < need:
        raise ConfigError(
            f"the cache {cache.folder} may hold {_mb(cache.limit)}, but {why}: {_mb(need)} are "
            f'needed. Set data.cache_limit = "{_mb(need)}" or more, or leave it out'
            f"{_cheaper(parts)}."
        )


def _cheaper(parts: Sequence[ShardRecords]) -> str:
    if any(isinstance(part.data.transfer, Replicate) for part in parts):
        return '; or fetch shards when they are needed: data.transfer = "direct"'
    return "; or use fewer workers, or a smaller window: mh.prepared(..., window=RECORDS)"


def _distinct_bytes(shards: Iterable[ShardInfo]) -> int:
    return sum({key_of(shard): shard.nbytes for shard in shards}.values())


def _mb(nbytes: int) -> str:
    """Rounded up, in a form that data.cache_limit takes."""
    return f"{-(-nbytes // 10**6)}MB"


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
    timer = Timer(SHOW_AFTER_S, bar.start if console.is_terminal else lambda: _note(text))
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()  # it may be starting the bar just now
        if bar.live.is_started:
            bar.stop()
