"""Shards from the host that keeps them: the origin is asked once, and the bits are the same."""

import importlib.util
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pytest

import manyhands as mh
from manyhands.data.fetching import transfer
from manyhands.data.fetching.peer_sharing import Sharing
from manyhands.data.fetching.shard_cache import Cache, key_of
from manyhands.data.fetching.transfer import Peer
from manyhands.data.open_data import open_data, share
from manyhands.data.reading.prepared_data import prepared
from manyhands.data.reading.shard_records import ShardRecords
from manyhands.data.shards.manifest import ShardInfo, read_manifest
from manyhands.driver.supervise.membership import make_view
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.config import DataConfig
from manyhands.values.credentials import new_secret
from manyhands.values.join_token import key_for
from manyhands.values.view import Keeper
from tests.support.cluster import MANYHANDS, PATIENCE_S, Watched
from tests.support.prepared_folders import fixed, write_folder
from tests.support.situations import now, w
from tests.support.web import Web

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="aiohttp is not installed"
)

SHARDS, ROWS = 24, 10
POLICIES = get_args(get_type_hints(DataConfig)["placement"])


def numbers(first: int) -> pa.Table:
    x = np.random.default_rng(first).normal(size=(ROWS, 4)).astype(np.float32)
    ids = np.arange(first, first + ROWS)
    return pa.table({"_id": ids, "x": fixed(x), "y": x.sum(axis=1)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tables = {"train": [numbers(i * ROWS) for i in range(SHARDS)], "test": [numbers(1000)]}
    return write_folder(tmp_path / "web" / "clicks", tables)


@pytest.fixture
def web(folder: Path) -> Iterator[Web]:
    server = Web(folder.parent)
    yield server
    server.end()


def from_origin(web: Web) -> dict[str, int]:
    """How often each shard was."""
    return {name: n for name, n in web.asked.items() if name != "manifest.json"}


# ---- one process, several caches


class Hosts:
    def __init__(self, web: Web, root: Path) -> None:
        self.web, self.root, self.secret = web, root, new_secret()
        self.of: dict[str, Sharing] = {}
        self.policy: Any = "hash"

    def add(self, *names: str, cache: str = "", limit: int | None = None) -> None:
        for name in names:
            settings = DataConfig(
                transfer="peer",
                placement=self.policy,
                cache=str(self.root / (cache or name)),
                cache_limit=None if limit is None else f"{limit}B",
            )
            train, held = open_data(prepared(self.web.url("clicks")), None, settings)
            found = share(train, held, settings, self.secret, "127.0.0.1")
            assert found is not None
            self.of[name] = found

    def meet(self, *names: str, among: Sequence[str] = (), late: bool = False) -> None:
        """These are told of a view, of these or of all."""
        keepers = {
            s.identity: Keeper(s.identity, name, s.address)
            for name, s in self.of.items()
            if name in (among or self.of)
        }
        for name in names or self.of:
            self.of[name].meet(list(keepers.values()), late=late)

    def kept(self, name: str) -> set[str]:
        return set(self.of[name].cache.kept)

    def read(self, *names: str) -> None:
        """All shards, by these hosts at the same time."""

        def read(name: str) -> None:
            for peer, shards in self.of[name].shards_of.items():
                for info in shards:
                    assert peer.path(info).stat().st_size == info.nbytes
                    peer.release(info)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, names or self.of))

    def close(self) -> None:
        for sharing in self.of.values():
            sharing.close()


@pytest.fixture
def hosts(web: Web, tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(web, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_origin_is_asked_once_for_all_hosts(hosts: Hosts, web: Web, policy: str) -> None:
    hosts.policy = policy
    hosts.add("a", "b", "c")
    hosts.meet()
    kept = [hosts.kept(name) for name in "abc"]
    assert sum(map(len, kept)) == len(set.union(*kept)) == SHARDS + 1
    assert web.asked.keys() == {"manifest.json"}, "nothing is fetched before it is needed"
    hosts.read()
    assert set(from_origin(web).values()) == {1} and len(from_origin(web)) == SHARDS + 1


def test_what_is_kept_for_others_is_dropped_last(hosts: Hosts, web: Web, folder: Path) -> None:
    """A cache holds its share and a little; twice through all data asks the origin once."""
    shard = max(s.nbytes for s in read_manifest(folder).splits["train"].shards)
    hosts.policy = "random"
    hosts.add("a", "b", "c", limit=(SHARDS // 3 + 1 + 3) * shard)
    hosts.meet()
    for _ in range(2):
        for name in "abc":  # in turns: each has dropped what the others keep when they ask it
            hosts.read(name)
    assert set(from_origin(web).values()) == {1}


def test_a_host_that_joins_takes_few_from_others_and_none_from_the_origin(
    hosts: Hosts, web: Web
) -> None:
    hosts.add("a", "b", "c")
    hosts.meet()
    hosts.read()
    before = {name: hosts.kept(name) for name in "abc"}
    hosts.add("d")
    hosts.meet(late=True)
    moved = hosts.kept("d")
    assert 0 < len(moved) <= SHARDS // 2
    stayed = sum(len(before[name] & hosts.kept(name)) for name in "abc")
    assert stayed >= SHARDS // 2
    hosts.read("d")
    assert set(from_origin(web).values()) == {1}


def test_hosts_with_one_cache_folder_are_one_keeper(hosts: Hosts, web: Web) -> None:
    hosts.add("a", "b", cache="shared")
    hosts.add("c")
    assert hosts.of["a"].identity == hosts.of["b"].identity != hosts.of["c"].identity
    hosts.meet()
    assert hosts.kept("a") == hosts.kept("b") and not hosts.kept("a") & hosts.kept("c")
    hosts.read()
    assert set(from_origin(web).values()) == {1}


def test_hosts_that_disagree_do_not_wait_for_each_other(hosts: Hosts, web: Web) -> None:
    """Each of two thinks that the other keeps it, because they are in different views."""
    hosts.add("a", "b", "c")
    hosts.meet("a", among="ab")
    hosts.meet("b", among="bc")
    hosts.read("a", "b")
    hosts.read("c")  # knows of nobody
    assert len(from_origin(web)) == SHARDS + 1


def test_who_keeps_it_is_gone(hosts: Hosts, web: Web) -> None:
    hosts.add("a", "b", "c")
    hosts.meet()
    hosts.read("b")
    hosts.of.pop("b").close()
    hosts.read("a", "c")
    twice = {name for name, n in from_origin(web).items() if n > 1}
    assert twice, "what only b had is fetched again"
    hosts.meet()
    assert len(hosts.kept("a") | hosts.kept("c")) == SHARDS + 1


def test_a_keeper_that_cannot_get_it_does_not_keep_others_waiting(hosts: Hosts, web: Web) -> None:
    hosts.add("a", "b")
    hosts.meet()
    for peer in hosts.of["b"].shards_of:
        peer.url = "http://127.0.0.1:9/nothing"
    hosts.read("a")
    assert len(from_origin(web)) == SHARDS + 1


def test_an_identity_stays_with_its_folder(tmp_path: Path) -> None:
    known = Cache(tmp_path / "a").identity()
    assert Cache(tmp_path / "a").identity() == known != Cache(tmp_path / "b").identity()
    (tmp_path / "a" / ".identity").write_text("half")
    assert Cache(tmp_path / "a").identity() not in ("half", known)
    assert not Cache(tmp_path / "a")._files()  # pyright: ignore[reportPrivateUsage]


def test_data_that_is_here_is_not_shared(folder: Path, web: Web, tmp_path: Path) -> None:
    settings = DataConfig(transfer="peer", cache=str(tmp_path / "cache"))
    train, held = open_data(folder, None, settings)
    assert share(train, held, settings, new_secret(), "127.0.0.1") is None
    mine = Peer(
        web.url("clicks"),
        Cache(tmp_path / "own"),
        transfer.Peers(transfer.NOBODY.placement, {}, transfer.NOBODY.credentials),
    )
    train, held = open_data(prepared(web.url("clicks"), transfer=mine), None, settings)
    assert isinstance(train, ShardRecords)
    assert share(train, held, settings, new_secret(), "127.0.0.1") is None


def test_a_view_names_each_cache_once() -> None:
    situation = now(
        w("waiting", cache="x", shards="tcp://a:1", at="", at_name=""),
        w("waiting", cache="x", shards="tcp://a:2", at=""),
        w("waiting", cache="y", shards="tcp://b:1", at="1", at_name="b"),
        w("waiting", at="2"),
    )
    found = make_view(situation, list(situation.workers.values())).keepers
    assert sorted(found, key=lambda k: k.cache) == [
        Keeper("x", "here", "tcp://a:1"),
        Keeper("y", "b", "tcp://b:1"),
    ]


# ---- by command: a driver with a worker, and daemons, each with a cache of its own

TASK = """
from pathlib import Path
import torch
import manyhands as mh
from tests.support.cluster import paused

task = paused(
    mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        data=mh.prepared({data!r}, window=20),
    ),
    Path({slow!r}),
    0.1,
)
"""
SETTINGS = ("train.batch=12", "train.micro_batch=2", "train.epochs=3", "log.every_steps=1")


class Loopback:
    def __init__(self, web: Web, root: Path) -> None:
        self.root, self.run, self.token = root, root / "run", root / "token"
        self.task, self.slow = root / "task.py", root / "slow"
        key_for(self.token)
        self.task.write_text(TASK.format(data=web.url("clicks"), slow=str(self.slow)))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.started: list[subprocess.Popen[bytes]] = []
        self.driver: subprocess.Popen[bytes] | None = None

    def _start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        with (self.root / f"{name}.txt").open("wb") as out:
            made = subprocess.Popen(
                [*MANYHANDS, *command, "--token-file", str(self.token)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "XDG_CACHE_HOME": str(self.root / f"cache-{name}")},
            )
        self.started.append(made)
        return made

    def join(self, name: str) -> "subprocess.Popen[bytes]":
        at = f"127.0.0.1:{self.port}"
        return self._start(name, "worker", "--join", at, "--name", name, "--slots", "1")

    def train(self, workers: str, *settings: str) -> Watched:
        sets = [word for s in (*SETTINGS, *settings) for word in ("--set", s)]
        listen = ("--listen", f"127.0.0.1:{self.port}", "--hosts", "here:1", "--workers", workers)
        self.driver = driver = self._start(
            "a", "train", str(self.task), "--to", str(self.run), *listen, *sets
        )
        return Watched(self.run, lambda: driver.poll() is None, self.said)

    def said(self) -> str:
        files = [*self.root.glob("*.txt"), *self.run.glob("logs/*.log")]
        return "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in files)

    def finish(self) -> str:
        assert self.driver is not None
        assert self.driver.wait(PATIENCE_S) == 0, self.said()
        shown = [*MANYHANDS, "fingerprint", str(self.run)]
        return subprocess.run(shown, check=True, capture_output=True, text=True).stdout.split()[0]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def loopback(web: Web, tmp_path: Path) -> Iterator[Loopback]:
    made = Loopback(web, tmp_path)
    yield made
    made.close()


@pytest.fixture
def calm(folder: Path, tmp_path: Path, launcher: Launcher) -> Callable[[], str]:
    """The fingerprint of one worker that reads the folder itself."""

    def fingerprint() -> str:
        file = tmp_path / "calm.py"
        file.write_text(TASK.format(data=str(folder), slow=str(tmp_path / "never")))
        settings = list(SETTINGS)
        to = tmp_path / "calm"
        return mh.train(
            file, to=to, workers=1, settings=settings, quiet=True, launcher=launcher
        ).fingerprint

    return fingerprint


def shards_in(loopback: Loopback, name: str) -> set[str]:
    folder = loopback.root / f"cache-{name}" / "manyhands"
    return {path.name for path in folder.glob("*.arrow")}


@pytest.mark.slow
def test_three_hosts_ask_the_origin_once(
    loopback: Loopback, web: Web, folder: Path, calm: Callable[[], str]
) -> None:
    daemons = [loopback.join(name) for name in "bc"]
    loopback.train("3:3", "data.transfer=peer")
    assert loopback.finish() == calm()
    assert set(from_origin(web).values()) == {1} and len(from_origin(web)) == SHARDS + 1
    splits = read_manifest(folder).splits
    everything: list[ShardInfo] = [s for split in splits.values() for s in split.shards]
    assert all(shards_in(loopback, name) for name in "abc")
    found = set.union(*(shards_in(loopback, name) for name in "abc"))
    assert found == {key_of(s) for s in everything}
    assert [daemon.wait(30) for daemon in daemons] == [0, 0]
    assert "could not be had" not in loopback.said()


def test_a_host_is_killed(loopback: Loopback, calm: Callable[[], str]) -> None:
    loopback.slow.touch()
    b, _ = loopback.join("b"), loopback.join("c")
    run = loopback.train("1:3", "data.transfer=peer", "data.placement=balanced")
    run.view_of(3)
    run.step(2)
    b.send_signal(signal.SIGKILL)
    run.view_of(1, 2)
    run.step(5)
    loopback.slow.unlink()
    assert loopback.finish() == calm()


@pytest.mark.slow
def test_a_host_joins_half_way(loopback: Loopback, web: Web, calm: Callable[[], str]) -> None:
    loopback.slow.touch()
    loopback.join("b")
    run = loopback.train("2:3", "data.transfer=peer")
    run.view_of(2)
    run.step(2)
    loopback.join("c")
    run.view_of(3)
    loopback.slow.unlink()
    assert loopback.finish() == calm()
    assert shards_in(loopback, "c")
    assert set(from_origin(web).values()) == {1}


@pytest.mark.slow
def test_every_host_replicates_for_itself(
    loopback: Loopback, web: Web, calm: Callable[[], str]
) -> None:
    loopback.join("b")
    loopback.train("2:2", "data.transfer=replicate")
    assert loopback.finish() == calm()
    assert set(from_origin(web).values()) == {2}
    for name in "ab":
        assert len(shards_in(loopback, name)) == SHARDS + 1


def test_a_cache_that_is_too_small_for_a_hosts_workers_is_refused(loopback: Loopback) -> None:
    loopback.join("b")
    loopback.train("2:2", "data.cache_limit=9kB")  # enough for one; here two are on one machine
    assert loopback.driver is not None
    assert loopback.driver.wait(PATIENCE_S) == 2
    assert "2 workers have up to" in loopback.said() and "data.cache_limit" in loopback.said()
