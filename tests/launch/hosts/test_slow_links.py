"""A host behind a slow link: the task takes longer to come than a lease lasts, and it joins."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.testing.namespaces import Network
from tests.support.cluster import Warm
from tests.support.tasks import make

SETTINGS = ("train.batch=32", "train.micro_batch=4", "train.steps=120")
MBIT, SHIPPED_BYTES = 4, 3 << 20
"""Six seconds, and a host is given up that is not heard of for two."""


@pytest.mark.timeout(180)
def test_a_task_that_takes_longer_than_a_lease_arrives(
    network: Callable[..., Network], launcher: Launcher, tmp_path: Path
) -> None:
    shipped = tmp_path / "shipped.bin"
    shipped.write_bytes(os.urandom(SHIPPED_BYTES))
    with closing(Warm(network(hosts=2), tmp_path)) as warm:
        _, b = warm.net.hosts
        b.limit(MBIT)
        warm.launcher.hosts.ship = (shipped,)
        name = warm.start(b)
        run = warm.train("cnn", *SETTINGS, pause_s=0.05, workers="1:2")
        run.hosted(name, "has joined")
        run.view_of(2)
        assert run.finish() and not [e for e in run.events("Hosted") if "gone" in e["what"]]
        mark = mh.fingerprint(run.path)
    calm = mh.train(
        make("cnn"), to=tmp_path / "calm", workers=1, settings=[*SETTINGS], launcher=launcher
    )
    assert mark == calm.fingerprint
