"""Shards come whole and right, from wherever they can be had; the cache keeps to its limit."""

import errno
import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.fetching.placement import Placement, ShardHost, place
from manyhands.data.fetching.shard_cache import Cache, key_of
from manyhands.data.fetching.shard_client import fetch
from manyhands.data.fetching.shard_protocol import PIECE_BYTES, WINDOW
from manyhands.data.fetching.shard_server import ShardServer
from manyhands.data.fetching.transfer import (
    Direct,
    Peer,
    Peers,
    Replicate,
    ShardSource,
    download,
    join,
)
from manyhands.data.shards.manifest import BLOCK_BYTES, ShardInfo
from manyhands.data.shards.shard_formats import describe_shard
from manyhands.values.credentials import Credentials
from manyhands.values.errors import DataDamaged, DataError

SPAWN = multiprocessing.get_context("spawn")
CREDENTIALS = Credentials.of(b"a secret of the run: 32 bytes...", "shards")


def content(i: int, nbytes: int) -> bytes:
    return np.random.default_rng(i).bytes(nbytes)


def write_shards(folder: Path, sizes: list[int]) -> list[ShardInfo]:
    folder.mkdir(parents=True, exist_ok=True)
    found: list[ShardInfo] = []
    for i, nbytes in enumerate(sizes):
        path = folder / f"train-{i:05d}.arrow"
        path.write_bytes(content(i, nbytes))
        found.append(describe_shard(path, 1))
    return found


def writer(data: bytes) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(data)

    return write


def never(file: BinaryIO) -> None:
    raise AssertionError("fetched though it is here")


def flip(path: Path, byte: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        old = file.read(1)
        file.seek(byte)
        file.write(bytes([old[0] ^ 1]))


def start(target: Callable[..., None], *args: object) -> tuple[BaseProcess, "Connection[Any, Any]"]:
    """A process of its own, and a pipe to it."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    return process, ours


def end(process: BaseProcess) -> None:
    process.kill()
    process.join()
    process.close()


# ---- the cache


@pytest.fixture
def shards(tmp_path: Path) -> list[ShardInfo]:
    return write_shards(tmp_path / "origin", [100, 100, 100, 100, 100])


@contextmanager
def holding(cache: Cache, info: ShardInfo, fetch: Callable[[BinaryIO], None]) -> Generator[Path]:
    yield cache.hold(info, fetch)
    cache.release(info)


def used_bytes(cache: Cache) -> int:
    """By files, and by those being fetched."""
    return sum(size for _, _, size in cache._files())


def fill(cache: Cache, shards: list[ShardInfo], *which: int) -> None:
    for i in which:
        with holding(cache, shards[i], writer(content(i, shards[i].nbytes))) as path:
            assert path.read_bytes() == content(i, shards[i].nbytes)


def here(cache: Cache, shards: list[ShardInfo]) -> list[int]:
    return [i for i, info in enumerate(shards) if (cache.folder / key_of(info)).exists()]


def test_what_was_used_least_recently_goes(tmp_path: Path, shards: list[ShardInfo]) -> None:
    cache = Cache(tmp_path / "cache", 300)
    fill(cache, shards, 0, 1, 2, 0, 3)
    assert here(cache, shards) == [0, 2, 3] and used_bytes(cache) == 300
    assert cache.find(shards[2]) is not None and cache.find(shards[1]) is None
    fill(cache, shards, 1)
    assert here(cache, shards) == [1, 2, 3]


def test_what_is_in_use_stays(tmp_path: Path, shards: list[ShardInfo]) -> None:
    cache, other = Cache(tmp_path / "cache", 200), Cache(tmp_path / "cache", 200)
    with holding(cache, shards[0], writer(content(0, 100))) as path:
        fill(other, shards, 1, 2, 3)
        assert here(cache, shards) == [0, 3] and path.exists()
        with holding(cache, shards[0], never):
            pass
        fill(other, shards, 1)
        assert here(cache, shards) == [0, 1]
    fill(other, shards, 2, 3)
    assert here(cache, shards) == [2, 3]


def test_when_everything_is_in_use_that_is_said(tmp_path: Path, shards: list[ShardInfo]) -> None:
    cache = Cache(tmp_path / "cache", 250, patience_s=0.1)
    held = [cache.hold(shards[i], writer(content(i, 100))) for i in (0, 1)]
    with pytest.raises(DataError, match=r"250 bytes, and all .* train-00002.arrow needs 50 more"):
        cache.hold(shards[2], writer(content(2, 100)))
    assert all(path.exists() for path in held) and used_bytes(cache) == 200
    cache.close()
    fill(cache, shards, 2)


def test_somebody_who_lets_go_is_waited_for(tmp_path: Path, shards: list[ShardInfo]) -> None:
    cache = Cache(tmp_path / "cache", 100)
    cache.hold(shards[0], writer(content(0, 100)))
    letting_go = threading.Timer(0.2, cache.release, [shards[0]])
    letting_go.start()
    fill(cache, shards, 1)
    letting_go.join()
    assert here(cache, shards) == [1]


def test_a_limit_below_one_shard_is_refused(tmp_path: Path, shards: list[ShardInfo]) -> None:
    with pytest.raises(DataError, match=r"may hold 99 bytes, but train-00000.arrow alone has 100"):
        Cache(tmp_path / "cache", 99).hold(shards[0], never)
    assert Cache(tmp_path / "cache", "10GiB").limit == 10 << 30
    with pytest.raises(DataError, match="is not a size"):
        Cache(tmp_path / "cache", "ten")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be made"):
        Cache(tmp_path / "file" / "cache")


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path, shards: list[ShardInfo]) -> None:
    cache = Cache(tmp_path / "cache", 100)

    def fails(file: BinaryIO) -> None:
        file.write(b"half")
        raise ConnectionError("torn")

    with pytest.raises(ConnectionError):
        cache.hold(shards[0], fails)
    assert used_bytes(cache) == 0 and here(cache, shards) == []
    fill(cache, shards, 0)


def test_a_full_disk_is_named(tmp_path: Path, shards: list[ShardInfo]) -> None:
    def full(file: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = Cache(tmp_path / "cache")
    with pytest.raises(DataError, match=r"cannot be used: No space left .*data\.cache_limit"):
        cache.hold(shards[0], full)
    assert used_bytes(cache) == 0 and here(cache, shards) == []


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_cached_file_that_was_damaged_is_fetched_again(
    tmp_path: Path, shards: list[ShardInfo], damage: str
) -> None:
    fill(Cache(tmp_path / "cache"), shards, 0)
    path = tmp_path / "cache" / key_of(shards[0])
    flip(path, 7) if damage == "flip" else os.truncate(path, 99)
    fill(Cache(tmp_path / "cache"), shards, 0)


def test_other_peoples_files_are_left_alone(tmp_path: Path, shards: list[ShardInfo]) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.tex").write_bytes(bytes(1000))
    cache = Cache(tmp_path / "cache", 100)
    fill(cache, shards, 0, 1)
    assert (tmp_path / "cache" / "thesis.tex").exists() and used_bytes(cache) == 100


def test_data_sets_with_the_same_names_share_a_cache(tmp_path: Path) -> None:
    one, two = (ShardInfo("a/x.arrow", 1, 3, [c]) for c in ("00" * 8, "11" * 8))
    assert key_of(one) != key_of(two)
    evil = ShardInfo("../../etc/passwd", 1, 3, [])
    assert "/" not in key_of(evil) and key_of(evil).endswith("-passwd")


def test_a_pickled_cache_holds_nothing(tmp_path: Path, shards: list[ShardInfo]) -> None:
    cache = Cache(tmp_path / "cache", 100)
    cache.hold(shards[0], writer(content(0, 100)))
    again = pickle.loads(pickle.dumps(cache))
    assert (again.folder, again.limit) == (cache.folder, cache.limit)
    again.close()
    with pytest.raises(DataError, match="in use"):  # the first one holds it still
        Cache(tmp_path / "cache", 100, patience_s=0).hold(shards[1], never)
    cache.close()


def test_a_forked_process_does_not_hold_what_its_parent_lets_go_of(
    tmp_path: Path, shards: list[ShardInfo]
) -> None:
    cache = Cache(tmp_path / "cache", 100, patience_s=0)
    cache.hold(shards[0], writer(content(0, 100)))
    ours, theirs = SPAWN.Pipe()
    child = os.fork()
    if child == 0:
        theirs.send("born")
        theirs.recv()
        os._exit(0)
    try:
        assert ours.recv() == "born"
        with pytest.raises(DataError, match="in use"):
            cache.hold(shards[1], never)
        cache.release(shards[0])
        fill(cache, shards, 1)
    finally:
        ours.send("die")
        assert os.waitpid(child, 0)[1] == 0
        ours.close()
        theirs.close()


def fetch_slowly(folder: Path, info: ShardInfo, log: Path, parent: Any) -> None:
    def slow(file: BinaryIO) -> None:
        with open(log, "a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(0.2)
        file.write(content(0, info.nbytes))

    parent.send("ready")
    parent.recv()
    assert Cache(folder).hold(info, slow).read_bytes() == content(0, info.nbytes)


def test_processes_that_want_the_same_shard_fetch_it_once(
    tmp_path: Path, shards: list[ShardInfo]
) -> None:
    log = tmp_path / "log"
    started = [start(fetch_slowly, tmp_path / "cache", shards[0], log) for _ in range(3)]
    for _, link in started:
        assert link.recv() == "ready"
    for _, link in started:
        link.send("go")
    for process, _ in started:
        process.join()
        assert process.exitcode == 0
    assert len(log.read_text().split()) == 1


def die_while_fetching(folder: Path, info: ShardInfo, parent: Any) -> None:
    def hang(file: BinaryIO) -> None:
        file.write(b"half of it")
        file.flush()
        parent.send("begun")
        time.sleep(100)

    Cache(folder).hold(info, hang)


def test_a_killed_fetcher_blocks_nobody(tmp_path: Path, shards: list[ShardInfo]) -> None:
    process, link = start(die_while_fetching, tmp_path / "cache", shards[0])
    assert link.recv() == "begun"
    cache = Cache(tmp_path / "cache", 150, patience_s=0.05)
    assert used_bytes(cache) == 100  # the room is taken from the start
    with pytest.raises(DataError, match="in use"):
        cache.hold(shards[1], writer(content(1, 100)))
    end(process)
    fill(cache, shards, 1)  # which drops the draft of the dead
    assert used_bytes(cache) == 100
    fill(cache, shards, 0)


def read_at_random(folder: Path, shards: list[ShardInfo], seed: int, origin: Path, _: Any) -> None:
    rng, cache = random.Random(seed), Cache(folder, 300)
    direct = Replicate(str(origin), cache)
    for _ in range(40):
        info = rng.choice(shards)
        path = direct.path(info)
        assert path.read_bytes() == (origin / info.file).read_bytes()
        assert used_bytes(cache) <= 300
        direct.release(info)


def test_the_limit_is_kept_by_many_processes(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "origin", [90, 80, 70, 60, 50, 40, 30])
    args = (tmp_path / "cache", shards)
    started = [start(read_at_random, *args, i, tmp_path / "origin") for i in range(3)]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0
    assert 0 < used_bytes(Cache(tmp_path / "cache")) <= 300


@settings(max_examples=30)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40),
    limit=st.integers(100, 400),
)
def test_whatever_is_held_is_there_and_right(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    shards = write_shards(folder / "origin", [100, 90, 80, 70, 60, 50])
    cache, held = Cache(folder / "cache", limit, patience_s=0), list[int]()
    for i, take in steps:
        if take:
            needed = sum(shards[j].nbytes for j in {*held, i})
            try:
                cache.hold(shards[i], writer(content(i, shards[i].nbytes)))
                held.append(i)
            except DataError:
                assert needed > limit
        elif i in held:
            held.remove(i)
            cache.release(shards[i])
        assert used_bytes(cache) <= limit
        for j in set(held):
            assert (cache.folder / key_of(shards[j])).read_bytes() == content(j, shards[j].nbytes)
    cache.close()


# ---- sources


def source_of(name: str, data: bytes, *, bad: set[int], stops: int, gone: bool) -> ShardSource:
    """`data` with some bad blocks, ending before block `stops`, as a file or as a lost link."""

    def blocks(info: ShardInfo, first: int) -> Iterator[bytes]:
        for i in range(first, -(-len(data) // BLOCK_BYTES)):
            if i >= stops:
                if gone:
                    raise ConnectionError("it went away")
                return
            block = data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]
            yield block if i not in bad else bytes([block[0] ^ 1]) + block[1:]

    return ShardSource(name, blocks)


DATA = content(9, 3 * BLOCK_BYTES + 1000)
SOURCES = st.lists(
    st.builds(
        dict,
        bad=st.sets(st.integers(0, 3), max_size=2),
        stops=st.integers(0, 5),
        gone=st.booleans(),
    ),
    max_size=4,
)


@settings(max_examples=50)
@given(defects=SOURCES)
def test_every_block_comes_from_a_source_that_has_it_right(
    tmp_path_factory: pytest.TempPathFactory, defects: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "whole"
    path.write_bytes(DATA)
    info, file, said = describe_shard(path, 1), BytesIO(), list[str]()
    done, failed = 0, 0
    for defect in defects:  # what should happen
        while done < 4 and done not in defect["bad"] and done < defect["stops"]:
            done += 1
        if done == 4:
            break
        failed += 1
    sources = [source_of(f"s{i}", DATA, **defect) for i, defect in enumerate(defects)]
    try:
        download(info, sources, file, said.append)
        assert file.getvalue() == DATA and done == 4
    except DataDamaged as error:
        assert done < 4 and "nowhere to be had whole" in str(error)
        assert all(f"s{i}: " in str(error) for i in range(failed))
    assert len(said) == failed


def test_a_full_disk_is_not_the_sources_fault(tmp_path: Path) -> None:
    [info] = write_shards(tmp_path, [1000])
    said: list[str] = []
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        download(info, [source_of("a", content(0, 1000), bad=set(), stops=9, gone=False)], file)
    assert said == []


# ---- direct and replicate


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[tuple[str, list[ShardInfo]]]:
    """Five shards behind a URL."""
    shards = write_shards(tmp_path / "prepared", [BLOCK_BYTES + 5, 100, 0, 2 * BLOCK_BYTES, 7])
    memory = fsspec.filesystem("memory")
    for info in shards:
        memory.pipe_file(f"/origin/{info.file}", (tmp_path / "prepared" / info.file).read_bytes())
    yield "memory://origin", shards
    memory.rm("/origin", recursive=True)


def test_direct_from_a_folder_is_the_file_itself(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [BLOCK_BYTES + 9, 5])
    direct = Direct(str(tmp_path))
    assert direct.path(shards[0]) == tmp_path / "train-00000.arrow"
    direct.release(shards[0])
    assert Direct(f"file://{tmp_path}").path(shards[1]) == tmp_path / "train-00001.arrow"
    flip(tmp_path / "train-00000.arrow", BLOCK_BYTES + 3)
    with pytest.raises(DataDamaged, match=r"train-00000.arrow: bytes 1,048,576 to"):
        Direct(str(tmp_path)).path(shards[0])
    (tmp_path / "train-00001.arrow").unlink()
    with pytest.raises(DataDamaged, match="missing"):
        Direct(str(tmp_path)).path(shards[1])


def test_direct_from_a_url_goes_through_the_cache(
    tmp_path: Path, origin: tuple[str, list[ShardInfo]]
) -> None:
    url, shards = origin
    direct = Direct(url, Cache(tmp_path / "cache"))
    for info in shards:
        path = direct.path(info)
        assert path.is_relative_to(tmp_path / "cache")
        assert path.read_bytes() == (tmp_path / "prepared" / info.file).read_bytes()
        direct.release(info)
    with pytest.raises(DataError, match="not on this host: name a cache folder"):
        Direct(url)


def test_a_url_without_the_shard_or_with_a_damaged_one_is_named(
    tmp_path: Path, origin: tuple[str, list[ShardInfo]]
) -> None:
    url, shards = origin
    memory, said = fsspec.filesystem("memory"), list[str]()
    memory.rm(f"/origin/{shards[0].file}")
    memory.pipe_file(f"/origin/{shards[1].file}", content(0, 100))
    memory.pipe_file(f"/origin/{shards[3].file}", content(3, 3 * BLOCK_BYTES))
    memory.pipe_file(f"/origin/{shards[4].file}", b"short")
    direct = Direct(url, Cache(tmp_path / "cache"), said.append)
    for i, says in (
        (0, "no file at"),
        (1, "bytes 0 to 100 are not those"),
        (3, "has more than 2,097,152 bytes"),
        (4, "ends at byte 5 of 7"),
    ):
        with pytest.raises(DataDamaged, match=f"{shards[i].file} is nowhere.*{says}"):
            direct.path(shards[i])
    assert len(said) == 8 and here(direct.cache or Cache(""), shards) == []


def test_secrets_in_urls_are_not_shown(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "prepared", [10])
    said: list[str] = []
    url = "memory://user:hunter22@bucket/folder"
    with pytest.raises(DataDamaged) as caught:
        Direct(url, Cache(tmp_path / "cache"), said.append).path(shards[0])
    assert said and not any("hunter22" in text for text in [str(caught.value), *said])


@pytest.mark.parametrize(
    ("url", "joined"),
    [
        ("s3://bucket/a/", "s3://bucket/a/x.arrow"),
        ("/data/what?", "/data/what?/x.arrow"),
        ("https://host/a?sig=1/2", "https://host/a/x.arrow?sig=1/2"),
        ("simplecache::https://host/a?sig=1", "simplecache::https://host/a/x.arrow?sig=1"),
    ],
)
def test_files_are_found_in_folders_behind_urls(url: str, joined: str) -> None:
    assert join(url, "x.arrow") == joined


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/../../x", ""])
def test_a_manifest_does_not_lead_out_of_its_folder(tmp_path: Path, file: str) -> None:
    with pytest.raises(DataError, match="not in its own folder"):
        Direct(str(tmp_path)).path(ShardInfo(file, 1, 0, []))


def test_replicate_copies_everything_before_the_start(
    tmp_path: Path, origin: tuple[str, list[ShardInfo]]
) -> None:
    url, shards = origin
    replicate, seen = Replicate(url, Cache(tmp_path / "cache")), list[tuple[int, int]]()
    replicate.fetch_all(shards, lambda done, total: seen.append((done, total)))
    total = sum(s.nbytes for s in shards)
    assert len(seen) == 5 and seen[-1] == (total, total) and seen == sorted(seen)
    for info in shards:
        fsspec.filesystem("memory").rm(f"/origin/{info.file}")
        assert describe_shard(replicate.path(info), 1).checksums == info.checksums
        replicate.release(info)
    fsspec.filesystem("memory").pipe_file("/origin/x", b"")
    with pytest.raises(DataError, match=rf"{total:,} bytes, and the cache .* may hold 1,000"):
        Replicate(url, Cache(tmp_path / "small", 1000)).fetch_all(shards)


def test_replicate_stops_when_a_shard_cannot_be_had(
    tmp_path: Path, origin: tuple[str, list[ShardInfo]]
) -> None:
    url, shards = origin
    fsspec.filesystem("memory").rm(f"/origin/{shards[1].file}")
    with pytest.raises(DataDamaged, match=r"train-00001.arrow is nowhere"):
        Replicate(url, Cache(tmp_path / "cache")).fetch_all(shards)


# ---- peers


class Cluster:
    """Three hosts: three cache folders, each with a server."""

    def __init__(self, root: Path, shards: list[ShardInfo], copies: int = 2) -> None:
        self.root, self.shards, self.said = root, shards, list[str]()
        hosts = [ShardHost(name) for name in "abc"]
        self.placement = place(shards, hosts, "balanced", copies=copies)
        self.caches = {h.name: Cache(root / h.name) for h in hosts}
        self.servers = {
            name: ShardServer(cache, shards, CREDENTIALS) for name, cache in self.caches.items()
        }
        self.addresses = {name: server.address for name, server in self.servers.items()}

    def peer(self, host: str, origin: str | None = None, timeout_s: float = 60.0) -> Peer:
        book = Peers(self.placement, self.addresses, CREDENTIALS, host, timeout_s)
        return Peer(origin, self.caches.setdefault(host, Cache(self.root / host)), book, self.hear)

    def hear(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


SIZES = [3 * BLOCK_BYTES, 100, BLOCK_BYTES + 1, 0, 5 * BLOCK_BYTES // 2, 1]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    shards = write_shards(tmp_path / "prepared", SIZES)
    with closing(Cluster(tmp_path, shards)) as found:
        for host in "abc":
            peer = found.peer(host, str(tmp_path / "prepared"))
            read_all(peer, [s for s in shards if peer.keeps(s)], tmp_path / "prepared")
        found.said.clear()
        yield found


def read_all(peer: Peer, shards: list[ShardInfo], origin: Path) -> None:
    for info in shards:
        path = peer.path(info)
        assert path.read_bytes() == (origin / info.file).read_bytes()
        peer.release(info)


def test_shards_come_from_the_hosts_that_keep_them(cluster: Cluster, tmp_path: Path) -> None:
    for host in "abc":
        kept = [s for s in cluster.shards if host in cluster.placement.holders(s.file)]
        assert sorted(map(key_of, kept)) == sorted(
            p.name for p in cluster.caches[host].folder.iterdir() if not p.name.startswith(".")
        )
    for host in ("a", "b", "outside"):
        read_all(cluster.peer(host), cluster.shards, tmp_path / "prepared")
    assert cluster.said == []


def test_a_server_can_serve_the_prepared_folder_itself(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "prepared", SIZES)
    placement = Placement({s.file: ("a",) for s in shards}, "all in one place")
    with closing(ShardServer(tmp_path / "prepared", shards, CREDENTIALS)) as server:
        book = Peers(placement, {"a": server.address}, CREDENTIALS)
        read_all(Peer(None, Cache(tmp_path / "cache"), book), shards, tmp_path / "prepared")


def test_a_peer_without_the_shard_or_with_a_bad_one_is_passed_over_and_reported(
    cluster: Cluster, tmp_path: Path
) -> None:
    info = cluster.shards[0]
    one, two = cluster.placement.holders(info.file)
    (cluster.caches[one].folder / key_of(info)).unlink()
    read_all(cluster.peer("outside"), [info], tmp_path / "prepared")
    flip(cluster.caches[two].folder / key_of(info), 2 * BLOCK_BYTES + 5)
    with pytest.raises(DataDamaged, match=f"host {one}: it does not have it"):
        cluster.peer("nowhere").path(info)
    said = " ".join(cluster.said)
    assert f"from host {two}: its bytes 2,097,152 to 3,145,728 are not those" in said
    read_all(cluster.peer("nowhere", str(tmp_path / "prepared")), [info], tmp_path / "prepared")


def test_a_short_file_of_a_peer_is_passed_over(cluster: Cluster, tmp_path: Path) -> None:
    info = cluster.shards[0]
    for host in cluster.placement.holders(info.file):
        os.truncate(cluster.caches[host].folder / key_of(info), 2 * BLOCK_BYTES + 5)
    read_all(cluster.peer("outside", str(tmp_path / "prepared")), [info], tmp_path / "prepared")
    assert len(cluster.said) == 2 and "too few" in cluster.said[0]


class Ending(Cache):
    """Ends its process in the middle of a shard."""

    def __init__(self, folder: Path, how: signal.Signals) -> None:
        super().__init__(folder)
        self.how, self.asked = how, 0

    def find(self, info: ShardInfo) -> Path | None:
        self.asked += 1
        if self.asked == 2 * WINDOW:
            os.kill(os.getpid(), self.how)
        return super().find(info)


def serve(folder: Path, shards: list[ShardInfo], how: signal.Signals, parent: Any) -> None:
    server = ShardServer(Ending(folder, how), shards, CREDENTIALS)
    parent.send(server.address)
    time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "says"), [(signal.SIGKILL, "it went away"), (signal.SIGSTOP, "it sent nothing for 1 s")]
)
def test_a_peer_that_dies_or_hangs_in_the_middle_is_replaced(
    tmp_path: Path, how: signal.Signals, says: str
) -> None:
    pieces = 6 * WINDOW
    shards = write_shards(tmp_path / "prepared", [pieces * PIECE_BYTES, 100])
    for info in shards:
        content_of = (tmp_path / "prepared" / info.file).read_bytes()
        with holding(Cache(tmp_path / "a"), info, writer(content_of)):
            pass
    process, link = start(serve, tmp_path / "a", shards, how)
    try:
        placement = Placement({s.file: ("a",) for s in shards}, "all in one place")
        book = Peers(placement, {"a": link.recv()}, CREDENTIALS, timeout_s=1)
        said: list[str] = []
        peer = Peer(str(tmp_path / "prepared"), Cache(tmp_path / "b"), book, said.append)
        read_all(peer, shards, tmp_path / "prepared")
        # The second shard comes from the origin: the peer is a suspect now, and not asked.
        assert len(said) == 1 and said[0].endswith(f"from host a: {says}")
    finally:
        end(process)


def test_nobody_at_an_address_is_noticed_at_once(cluster: Cluster, tmp_path: Path) -> None:
    for host in "abc":
        cluster.servers.pop(host).close()
    read_all(
        cluster.peer("outside", str(tmp_path / "prepared")),
        cluster.shards[:1],
        tmp_path / "prepared",
    )
    assert len(cluster.said) == 2 and all("nobody listens there" in t for t in cluster.said)
    with pytest.raises(ConnectionError, match="is no address"):
        next(fetch("tcp://", cluster.shards[0], CREDENTIALS))


@pytest.mark.parametrize("wrong", ["server", "client", "both"])
def test_only_holders_of_the_secret_are_served_and_believed(cluster: Cluster, wrong: str) -> None:
    ours, theirs = CREDENTIALS, Credentials.of(bytes(32), "shards")
    mixed = Credentials(
        ours.server_public if wrong == "client" else theirs.server_public,
        b"",
        ours.client_public if wrong == "server" else theirs.client_public,
        ours.client_secret if wrong == "server" else theirs.client_secret,
    )
    info = cluster.shards[0]
    host = cluster.placement.holders(info.file)[0]
    with pytest.raises(ConnectionError, match="it is not of this run"):
        next(fetch(cluster.addresses[host], info, mixed, timeout_s=60))
    for secret in (ours.server_secret, ours.client_secret):
        assert secret.decode() not in repr(ours)


@pytest.fixture
def dealer() -> Iterator["zmq.Socket[bytes]"]:
    """A client that has the keys, and no manners."""
    context = zmq.Context()
    link: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    link.curve_serverkey = CREDENTIALS.server_public
    link.curve_publickey, link.curve_secretkey = (
        CREDENTIALS.client_public,
        CREDENTIALS.client_secret,
    )
    link.rcvtimeo = 20_000
    yield link
    context.destroy(linger=0)


def test_only_what_the_manifest_lists_is_served(
    tmp_path: Path, dealer: "zmq.Socket[bytes]"
) -> None:
    shards = write_shards(tmp_path / "prepared", [1000])
    (tmp_path / "prepared" / "secret.txt").write_text("nobody's business")
    with closing(ShardServer(tmp_path / "prepared", shards, CREDENTIALS)) as server:
        dealer.connect(server.address)
        tricks = [
            "secret.txt",
            "../prepared/secret.txt",
            "/etc/passwd",
            "train-00000.arrow",
            "",
            "\0",
        ]
        for key in [*tricks, str(tmp_path / "prepared" / "secret.txt")]:
            dealer.send(msgspec.msgpack.encode([key, 0]))
            head, data = dealer.recv_multipart()
            assert data == b"" and b"another data set" in head
        for start in (-1, 1000, 1 << 62):
            dealer.send(msgspec.msgpack.encode([key_of(shards[0]), start]))
            assert dealer.recv_multipart()[1] == b""
        dealer.send(msgspec.msgpack.encode([key_of(shards[0]), 990]))
        assert dealer.recv_multipart()[1] == content(0, 1000)[990:]


def test_garbage_does_no_harm(
    cluster: Cluster, tmp_path: Path, dealer: "zmq.Socket[bytes]"
) -> None:
    rng = random.Random(0)
    for address in cluster.addresses.values():
        host, _, port = address.removeprefix("tcp://").partition(":")
        for opening in (b"", b"\xff\0\0\0\0\0\0\0\1\x7f", b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE"):
            with socket.create_connection((host, int(port))) as raw, suppress(OSError):
                raw.sendall(opening + rng.randbytes(100_000))
        dealer.connect(address)
        for size in (0, 1, 10, 1000):
            dealer.send(rng.randbytes(size))
        dealer.send_multipart([b"", b"x", b"y"])
        dealer.send(b"\x92\xa1x\xcf\xff\xff\xff\xff\xff\xff\xff\xff")  # a number beyond int64
        dealer.send(bytes(100_000))  # too long: the server hangs up
    read_all(cluster.peer("outside"), cluster.shards, tmp_path / "prepared")
    assert cluster.said == []


def test_a_client_that_does_not_listen_stops_nobody(
    tmp_path: Path, dealer: "zmq.Socket[bytes]"
) -> None:
    shards = write_shards(tmp_path / "prepared", [8 * BLOCK_BYTES])
    with closing(ShardServer(tmp_path / "prepared", shards, CREDENTIALS)) as server:
        dealer.rcvhwm = 1
        dealer.connect(server.address)
        for i in range(500):  # 125 MiB, if somebody kept it
            dealer.send(msgspec.msgpack.encode([key_of(shards[0]), i % 32 * PIECE_BYTES]))
        found = b"".join(fetch(server.address, shards[0], CREDENTIALS, timeout_s=60))
        assert found == content(0, 8 * BLOCK_BYTES)


def test_many_clients_at_once(cluster: Cluster, tmp_path: Path) -> None:
    problems: list[BaseException] = []

    def read(i: int) -> None:
        try:
            read_all(cluster.peer(f"client-{i}"), cluster.shards, tmp_path / "prepared")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and cluster.said == []


def test_an_address_that_is_taken_is_named(cluster: Cluster) -> None:
    with pytest.raises(DataError, match=r"cannot be served at tcp://127.*in use"):
        ShardServer(Path("."), [], CREDENTIALS, cluster.addresses["a"])
