"""A real run with a host that has joined: its secrets are in no file, on no command line, in no
environment and in no log."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from manyhands.driver import drive
from manyhands.driver.live import live_requests
from manyhands.stories import live
from manyhands.testing.namespaces import Network
from manyhands.values import credentials
from manyhands.values.join_token import make_token
from tests.support.cluster import Warm

SETTINGS = ("train.batch=32", "train.micro_batch=4", "train.steps=120", "train.encrypt=true")

FOR_HOSTS = ("token", "token.key", "token.c2", "join.token")
"""Files that are meant to hold them: only their owner can read them."""


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """All that the driver makes: those of the run, its own key, and each worker's."""
    found: dict[str, bytes] = {}
    curve_keypair, new_secret = zmq.curve_keypair, credentials.new_secret

    def keypair() -> tuple[bytes, bytes]:
        public, secret = curve_keypair()
        found[f"key {len(found)}"] = z85.decode(secret)
        return public, secret

    def secret() -> bytes:
        found[f"secret {len(found)}"] = made = new_secret()
        return made

    monkeypatch.setattr(zmq, "curve_keypair", keypair)
    for module in (drive, live_requests):
        monkeypatch.setattr(module, "new_secret", secret)
    return found


def spellings(secret: bytes) -> list[bytes]:
    """As a file might hold it. Half of it is enough."""
    half = len(secret) // 2
    half -= half % 4  # whole groups, as Z85 has them
    found = [secret[:half], secret[:half].hex().encode(), z85.encode(secret[:half])]
    escaped = repr(secret[:half])[2:-1].encode()
    return [*found, escaped, secret[:half].hex().upper().encode()]


def what_others_may_see(*folders: Path) -> Iterator[tuple[str, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and path.name not in FOR_HOSTS:
                yield str(path), path.read_bytes()
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ", "comm"):
            try:
                yield f"{process / name}", (process / name).read_bytes()
            except OSError:
                continue


def leaks(secrets: dict[str, bytes], *folders: Path) -> list[str]:
    words = [(name, word) for name, secret in secrets.items() for word in spellings(secret)]
    every = re.compile(b"|".join(re.escape(word) for _, word in words))
    found: list[str] = []
    for where, content in what_others_may_see(*folders):
        if every.search(content):
            found += [f"the {name} is in {where}" for name, word in words if word in content]
    return found


def test_secrets_would_be_found(tmp_path: Path) -> None:
    for number, word in enumerate(spellings(os.urandom(32))):
        (tmp_path / f"{number}").write_bytes(b"before " + word + b" after")
    secret = os.urandom(32)
    assert not leaks({"secret": secret}, tmp_path)
    (tmp_path / "log").write_text(f"key: {secret!r}")
    assert leaks({"secret": secret}, tmp_path) == [f"the secret is in {tmp_path / 'log'}"]


@pytest.mark.timeout(180)
def test_a_run_with_a_joined_host(
    network: Callable[..., Network], secrets: dict[str, bytes], tmp_path: Path
) -> None:
    with closing(Warm(network(hosts=3), tmp_path)) as warm:
        _, b, c = warm.net.hosts
        own = make_token(warm.token, "c2")
        secrets["token"] = warm.key.token().secret
        secrets["token of c2"] = warm.key.token("c2").secret
        secrets["key of the token"] = z85.decode(warm.key.token().pair[1])
        secrets["driver's key"] = z85.decode(warm.key.pair[1])
        warm.start(b, blind=True)  # its logs and files travel
        name = warm.start(c, 1, "--token-file", str(own))
        run = warm.train("cnn", *SETTINGS, "checkpoint.every_steps=5", pause_s=0.1, workers="1:3")
        run.view_of(3)
        run.wait_for(lambda event: event["event"] == "Saved")
        kept = [path for path in tmp_path.rglob("*") if path.name in FOR_HOSTS]
        assert len(kept) == len(FOR_HOSTS) and {p.stat().st_mode & 0o777 for p in kept} == {0o600}
        assert len(secrets) >= 9, sorted(secrets)
        assert not leaks(secrets, tmp_path)
        live.drop_host(run.path, name, 60)  # others get a new secret
        run.view_of(2)
        run.step()
        assert not leaks(secrets, tmp_path)
        run.finish()
    assert not leaks(secrets, tmp_path)
    assert not list(run.path.glob("*token*"))
