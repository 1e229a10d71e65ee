# SPDX-License-Identifier: Apache-2.0
"""From the [data] settings to a cache, and to the way in which shards come.

The driver and the workers of a host open the same cache folder, each for itself. Opening fetches
nothing.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from manyhands.data.fetching.shard_cache import Cache
from manyhands.data.fetching.transfer import Direct, FailureReport, Peer, Replicate, Transfer
from manyhands.data.shards.manifest import ShardInfo
from manyhands.data.shards.prepared_url import FolderOrUrl, RemoteFolder
from manyhands.values.byte_sizes import parse_bytes
from manyhands.values.config import DataConfig
from manyhands.values.environment import user_cache
from manyhands.values.errors import ConfigError, DataError
from manyhands.values.local_folders import local_folder

_WAYS: dict[str, Callable[[str, Cache, FailureReport], Transfer]] = {
    "auto": Direct,
    "direct": Direct,
    "peer": lambda url, cache, report: Peer(url, cache, report=report),
    "replicate": Replicate,
}
"""By data.transfer. A `Peer` knows nobody at first: `peer_sharing` tells it."""


def open_transfer(folder: RemoteFolder, settings: DataConfig, cache: Cache) -> Transfer:
    return _WAYS[settings.transfer](folder.url, cache, _note)


def _note(text: str) -> None:
    """A source that stumbled; in a worker this goes to its log."""
    print(text, file=sys.stderr, flush=True)


def open_cache(settings: DataConfig) -> Cache:
    """The folder is made, for its owner alone, where it is not there."""
    folder = _default()
    if settings.cache is not None:
        folder = local_folder(settings.cache, "fetched shards", "data.cache").expanduser()
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
