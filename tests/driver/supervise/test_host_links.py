"""The network between hosts is measured when it must be, and shown."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.driver.supervise.host_links import slow
from manyhands.driver.supervise.membership import by_host, make_view
from manyhands.launch.engines.launcher import Launcher
from manyhands.testing.namespaces import Network
from manyhands.values.worker_status import Link
from tests.support.cluster import MANYHANDS, Event, Warm
from tests.support.situations import now, w
from tests.support.tasks import make


def pairs(*names: str) -> frozenset[frozenset[str]]:
    return frozenset(frozenset(name) for name in names)


WHEN: dict[str, tuple[str, dict[str, Any], bool]] = {
    "one host": ("aaa", {}, False),
    "two hosts, for the first time": ("ab", {}, True),
    "two hosts again": ("aabb", {"measured": pairs("ab")}, False),
    "in another order": ("ba", {"measured": pairs("ab")}, False),
    "another host has joined": ("abc", {"measured": pairs("ab")}, True),
    "one pair is missing": ("abc", {"measured": pairs("ab", "ac")}, True),
    "a host has left": ("ac", {"measured": pairs("ab", "ac", "bc")}, False),
    "every worker has memory of its own": ("ab", {"private": True}, False),
}


@pytest.mark.parametrize("case", WHEN)
def test_hosts_measure_what_nobody_has_measured(case: str) -> None:
    hosts, facts, expected = WHEN[case]
    situation = now(*(w("waiting", at=at) for at in hosts), wanted=len(hosts), **facts)
    view = make_view(situation, by_host(list(situation.workers.values())))
    assert view.measure is expected


LINK = Link("a", "b", round_trip_s=0.001, bytes_per_s=10e6)


@pytest.mark.parametrize(
    ("gradient_bytes", "step_s", "warns"), [(10e6, 0.9, True), (10e6, 1.1, False), (0, 0.001, True)]
)
def test_a_link_is_slow_when_steps_wait_for_it(
    gradient_bytes: int, step_s: float, warns: bool
) -> None:
    text = slow(LINK, int(gradient_bytes), 2, step_s)
    assert (text is not None) is warns
    if text is not None:
        assert "between a and b (10.0 MB/s, 1.00 ms" in text


@pytest.fixture
def warm(network: Callable[..., Network], tmp_path: Path) -> Iterator[Warm]:
    with closing(Warm(network(hosts=3), tmp_path)) as made:
        yield made


@pytest.mark.slow
def test_a_run_measures_its_network(warm: Warm, launcher: Launcher, tmp_path: Path) -> None:
    """b is behind a slow link; c comes when training goes on."""
    _, b, c = warm.net.hosts
    b.limit(200)
    warm.need({b: 1})
    settings = ["train.batch=16", "train.steps=120", "recovery.rebalance=false"]
    run = warm.train("wide", *settings, pause_s=0.05, workers=3)
    run.view_of(2)
    assert [linked(e) for e in run.events("Linked")] == ["b"]
    warm.start(c)
    run.view_of(3)
    run.step()
    time.sleep(1)  # status.json is written twice a second
    table, shown = status(run.path), json.loads(status(run.path, "--json"))
    calm = mh.train(
        make("wide"),
        to=tmp_path / "calm",
        workers=1,
        settings=settings,
        quiet=True,
        launcher=launcher,
    )
    assert run.finish() == calm.fingerprint
    links = {linked(e): e for e in run.events("Linked")}
    assert links.keys() == {"b", "c", "bc"} and len(run.events("Linked")) == 3
    for name, link in links.items():
        assert 0 < link["round_trip_s"] < 1
        assert "b" not in name or link["bytes_per_s"] < 200e6 / 8 * 1.5
    assert len(shown["links"]) == 3
    assert "round trip ms" in table and max(map(len, table.splitlines())) <= 100


def linked(event: Event) -> str:
    """Which two, where the driver's own host is called something else everywhere."""
    names = (re.sub("[0-9]", "", name) for name in (event["host"], event["other"]))
    return "".join(sorted(name for name in names if name in ("b", "c")))


def status(run: Path, *more: str) -> str:
    command = [*MANYHANDS, "status", str(run), *more]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
