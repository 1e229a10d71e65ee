# SPDX-License-Identifier: Apache-2.0
"""How shards get to where they are read: directly, copied before the start, or from peers.

Invariant: what `path` returns has the bytes that the manifest lists, whichever way they came. Every
block is compared as it arrives; one that is wrong or missing is fetched from the next source, from
that block on, and the source is reported. Only when no source has it is the shard given up on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash

from manyhands.data.fetching import shard_client
from manyhands.data.fetching.placement import Placement
from manyhands.data.fetching.shard_cache import Cache
from manyhands.data.fetching.shard_client import TIMEOUT_S
from manyhands.data.shards.damaged_blocks import check_blocks
from manyhands.data.shards.manifest import BLOCK_BYTES, ShardInfo
from manyhands.data.shards.prepared_url import blocks_of, inside, join
from manyhands.data.sources.access.files import local_path, shown
from manyhands.values.credentials import Credentials
from manyhands.values.errors import DataDamaged, DataError

SUSPECT_S = 30.0
"""How long a peer that could not be reached is asked last."""

AT_ONCE = 4
"""Shards that are fetched at a time before the start."""

FailureReport = Callable[[str], None]
"""Told of sources that failed, one sentence each."""

BytesProgress = Callable[[int, int], None]
"""Told how many bytes are here, and how many there will be."""


class Transfer(Protocol):
    """How shards get to where they are read.

    Workers call `path` when they come to a shard and `release` when they have unmapped it: as many
    calls of one as of the other. Several processes of a host, and several threads of each, may do
    so at once."""

    def path(self, info: ShardInfo) -> Path:
        """A local, whole, checked file. Blocks until it is there; it stays until `release`.
        DataDamaged where nobody has it."""
        ...

    def release(self, info: ShardInfo) -> None: ...


class Direct:
    """From shared storage: a folder's own files, or through a cache from a remote URL."""

    def __init__(
        self, url: str, cache: Cache | None = None, report: FailureReport | None = None
    ) -> None:
        local = local_path(url)
        self.folder = None if local is None else Path(local)
        if self.folder is None and cache is None:
            raise DataError(
                f"{shown(url)} is not on this host: name a cache folder for its shards."
            )
        self.url, self.cache, self.report = url, cache, report
        self._checked: set[str] = set()

    def path(self, info: ShardInfo) -> Path:
        if self.folder is None:
            assert self.cache is not None
            return _cached(self.cache, info, _origin(self.url), self.report)
        path = self.folder / inside(info.file)
        if info.file not in self._checked:
            try:
                damages = check_blocks(path, info)
            except OSError as error:
                raise DataDamaged(f"{path} cannot be read: {error.strerror}.") from error
            if damages:
                raise DataDamaged(f"in {path.parent}: {'; '.join(map(str, damages[:3]))}.")
            self._checked.add(info.file)
        return path

    def release(self, info: ShardInfo) -> None:
        if self.folder is None:
            assert self.cache is not None
            self.cache.release(info)


class Replicate:
    """Everything is copied to the cache before the start, and local from then on."""

    def __init__(self, url: str, cache: Cache, report: FailureReport | None = None) -> None:
        self.url, self.cache, self.report = url, cache, report

    def fetch_all(self, shards: Sequence[ShardInfo], progress: BytesProgress | None = None) -> None:
        total, limit = sum(s.nbytes for s in shards), self.cache.limit
        if limit is not None and total > limit:
            raise DataError(
                f"the {len(shards)} shards of {shown(self.url)} are {total:,} bytes, and the cache "
                f"{self.cache.folder} may hold {limit:,}. Raise its limit (data.cache_limit), or "
                'fetch them when they are needed: data.transfer = "direct".'
            )
        _fetch_now(self, shards, progress)

    def fetch_missing(
        self, shards: Sequence[ShardInfo], progress: BytesProgress | None = None
    ) -> None:
        """Where others may have done it already. What is here is looked at when it is opened."""
        self.fetch_all([s for s in shards if self.cache.find(s) is None], progress)

    def path(self, info: ShardInfo) -> Path:
        return _cached(self.cache, info, _origin(self.url), self.report)

    def release(self, info: ShardInfo) -> None:
        self.cache.release(info)


@dataclass(frozen=True, slots=True)
class Peers:
    """Who keeps what, where they are, and what they trust us by."""

    placement: Placement
    addresses: dict[str, str]
    """Host → where its ShardServer listens, as others reach it."""
    credentials: Credentials
    here: str = ""
    """The name of this host, which does not ask itself."""
    timeout_s: float = TIMEOUT_S
    earlier: Placement = field(default_factory=lambda: Placement({}, "nobody"))
    """Who may have what the placement has just given to others."""
    shown: dict[str, str] = field(default_factory=dict[str, str])
    """Host → what people call it, where that is something else."""


NOBODY = Peers(Placement({}, "nobody is known yet"), {}, Credentials(b"", b"", b"", b""))


class Peer:
    """From a host that has it, another one that has it, then the origin (None: there is none).

    `peers` may be replaced at any time: hosts come and go."""

    def __init__(
        self,
        url: str | None,
        cache: Cache,
        peers: Peers = NOBODY,
        report: FailureReport | None = None,
    ) -> None:
        self.url, self.cache, self.peers, self.report = url, cache, peers, report
        self._suspect_until: dict[str, float] = {}
        """By address."""

    def keeps(self, info: ShardInfo) -> bool:
        """Whether others ask this host for it."""
        return self.peers.here in self.peers.placement.holders(info.file)

    def path(self, info: ShardInfo) -> Path:
        return _cached(self.cache, info, self._sources(info), self.report)

    def release(self, info: ShardInfo) -> None:
        self.cache.release(info)

    def _sources(self, info: ShardInfo) -> "list[ShardSource]":
        """Holders first, each host beginning with another; those that lately failed, last."""
        book, now = self.peers, time.monotonic()
        holders = list(book.placement.holders(info.file))
        if holders:
            turn = xxhash.xxh3_64_intdigest(f"{book.here}\n{info.file}".encode()) % len(holders)
            holders = holders[turn:] + holders[:turn]
        holders = list(dict.fromkeys([*holders, *book.earlier.holders(info.file)]))
        holders = [h for h in holders if h != book.here and h in book.addresses]
        good = [h for h in holders if self._suspect_until.get(book.addresses[h], 0.0) <= now]
        origin = [] if self.url is None else _origin(self.url)
        first = [self._source(book, host) for host in good]
        last = [self._source(book, host) for host in holders if host not in good]
        return [*first, *origin, *last]

    def _source(self, book: Peers, host: str) -> "ShardSource":
        def blocks(info: ShardInfo, first: int) -> Iterator[bytes]:
            try:
                yield from shard_client.fetch(
                    book.addresses[host],
                    info,
                    book.credentials,
                    first=first,
                    timeout_s=book.timeout_s,
                )
            except (TimeoutError, ConnectionError):
                self._suspect_until[book.addresses[host]] = time.monotonic() + SUSPECT_S
                raise

        return ShardSource(f"host {book.shown.get(host, host)}", blocks)


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Somewhere a shard can be had."""

    name: str
    """Without secrets."""
    blocks: Callable[[ShardInfo, int], Iterator[bytes]]
    """The blocks of a shard from a number on, unchecked. Raises OSError or DataError."""


class _Unfit(Exception):
    """A source failed; the file that is written is not to blame."""


class _Wrong(OSError):
    """A source has other bytes than those that were written."""


def download(
    info: ShardInfo,
    sources: Sequence[ShardSource],
    file: BinaryIO,
    report: FailureReport | None = None,
) -> None:
    """Write the shard, each block from the first source that has it right."""
    done, problems, wrong = 0, list[str](), False
    for source in sources:
        try:
            for block in _good_blocks(info, source, done):
                file.write(block)
                done += 1
            return
        except _Unfit as problem:
            problems.append(f"{source.name}: {problem}")
            wrong = wrong or isinstance(problem.__cause__, _Wrong)
            if report is not None:
                report(f"{info.file} could not be had from {problems[-1]}")
    tried = "; ".join(dict.fromkeys(problems)) or "nobody was there to ask"
    raise DataDamaged(f"{info.file} is nowhere to be had whole. Tried: {tried}. {_cure(wrong)}")


def _cure(wrong: bool) -> str:
    if wrong:
        return (
            "Look at the whole data set with: manyhands data URL --verify; then copy this file "
            "there again from where it came, or prepare the data again."
        )
    return (
        "See that it is there and can be reached, then start again, or go on with what is saved: "
        "manyhands resume RUN"
    )


def _good_blocks(info: ShardInfo, source: ShardSource, first: int) -> Iterator[bytes]:
    """All blocks from `first` on, each of them right; or _Unfit."""
    index = first
    try:
        for block in source.blocks(info, first):
            _compare(info, index, block)
            yield block
            index += 1
        if index < len(info.checksums):
            raise _Wrong(f"it ends at byte {index * BLOCK_BYTES:,} of {info.nbytes:,}")
    except (OSError, DataError) as error:
        raise _Unfit(str(error)) from error


def _compare(info: ShardInfo, index: int, block: bytes) -> None:
    start = index * BLOCK_BYTES
    size = min(BLOCK_BYTES, info.nbytes - start)
    if index >= len(info.checksums):
        raise _Wrong(f"it has more than {info.nbytes:,} bytes")
    if len(block) != size:
        raise _Wrong(f"it ends at byte {start + len(block):,} of {info.nbytes:,}")
    if xxhash.xxh3_64_hexdigest(block) != info.checksums[index]:
        raise _Wrong(f"its bytes {start:,} to {start + size:,} are not those that were written")


def _cached(
    cache: Cache, info: ShardInfo, sources: Sequence[ShardSource], report: FailureReport | None
) -> Path:
    return cache.hold(info, lambda file: download(info, sources, file, report))


def _fetch_now(
    transfer: Transfer, shards: Sequence[ShardInfo], progress: BytesProgress | None
) -> None:
    total, here = sum(s.nbytes for s in shards), 0

    def fetch(info: ShardInfo) -> int:
        transfer.path(info)
        transfer.release(info)
        return info.nbytes

    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [pool.submit(fetch, info) for info in shards]
        try:
            for done in as_completed(waiting):
                here += done.result()
                if progress is not None:
                    progress(here, total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _origin(url: str) -> list[ShardSource]:
    """Asked twice, because stores far away stumble."""

    def blocks(info: ShardInfo, first: int) -> Iterator[bytes]:
        return blocks_of(join(url, info.file), BLOCK_BYTES, first)

    source = ShardSource(shown(url), blocks)
    return [source, source]
