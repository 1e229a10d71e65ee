"""Hosts of another version: told once, with what to do, on both sides; nobody tries for ever."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import manyhands
from manyhands.launch.engines.launcher import HostNews
from manyhands.launch.hosts.host_daemon import MOST_AWAY_S, stay_away_s
from manyhands.launch.hosts.join_protocol import TurnedAway, decode_to_host
from manyhands.launch.hosts.joined_hosts import differs
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.launch.hosts.message_digest import WIRE, message_classes, message_digest
from manyhands.values.join_token import write_token
from manyhands.values.machine import torch_version
from manyhands.values.version import VERSION
from tests.launch.hosts.test_nonsense_from_hosts import many as many  # a fixture
from tests.support.cluster import MANYHANDS
from tests.support.hostile_clients import dealer

PACKAGE = Path(manyhands.__file__).parent
TASK = PACKAGE.parent / "examples" / "01_digits.py"
CHANGES = {
    "version": ("values/version.py", f'"{VERSION}"', '"0.0.7"', "manyhands 0.0.7"),
    "messages": (
        "values/messages.py",
        'asks to hand over."""\n\n    worker: Small\n',
        'asks to hand over."""\n\n    worker: Small\n    hue: int = 0\n',
        "other messages",
    ),
    "bounds": ("launch/hosts/join_protocol.py", "ge=1, le=1 << 16", "ge=1, le=9999", "digest"),
}


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with another manyhands in it."""

    def copy(which: str) -> Path:
        file, old, new, _ = CHANGES[which]
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, tmp_path / which / "manyhands", ignore=ignore)
        path = tmp_path / which / "manyhands" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        return tmp_path / which

    return copy


def news_of(many: ManyHosts, until: Callable[[], bool]) -> list[str]:
    found: list[str] = []
    deadline = time.monotonic() + 60
    while not until():
        found += [e.what for e in many.poll() if isinstance(e, HostNews)]
        assert time.monotonic() < deadline, found
        many.selector.select(0.1)
    return found


@pytest.mark.timeout(90)
@pytest.mark.parametrize("which", CHANGES)
def test_it_goes_and_says_why(
    many: ManyHosts, changed: Callable[[str], Path], tmp_path: Path, which: str
) -> None:
    token = tmp_path / "token"
    write_token(token, many.hosts.listening.key.token())
    where = f"127.0.0.1:{many.hosts.server.port}"
    command = [*MANYHANDS, "worker", "--join", where, "--name", "b", "--slots", "1"]
    daemon = subprocess.Popen(
        [*command, "--token-file", str(token)],
        env={**os.environ, "PYTHONPATH": str(changed(which))},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        told = news_of(many, lambda: daemon.poll() is not None)
        _, said = daemon.communicate(timeout=30)
    finally:
        daemon.kill()
        daemon.wait()
    assert daemon.returncode == 2, said
    assert CHANGES[which][3] in said and VERSION in said and "Install the same" in said
    assert len(said.splitlines()) < 6 and said.count("was turned away") == 1
    assert len(told) == 1 and CHANGES[which][3] in told[0] and not many.hosts.others


@pytest.mark.timeout(30)
def test_what_cannot_be_read_from_a_token_holder_is_answered(many: ManyHosts) -> None:
    token = many.hosts.listening.key.token()
    with dealer(many.hosts.server.port, token.driver, *token.pair) as host:
        host.send(b"\x93\x01\x02\x03")  # as some other version may say that it is here
        host.rcvtimeo = 10_000
        answer = decode_to_host(host.recv())
    assert isinstance(answer, TurnedAway) and VERSION in answer.because


@pytest.mark.timeout(120)
def test_over_ssh_the_reason_is_the_verdict(changed: Callable[[str], Path], tmp_path: Path) -> None:
    """The command of the host is run here, as a shell over ssh would, with another manyhands."""
    ssh = tmp_path / "ssh.sh"
    ssh.write_text(f'cd {tmp_path}; PYTHONPATH={changed("version")} exec sh -c "$3"\n')
    command = [*MANYHANDS, "train", str(TASK), "--to", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--hosts", "other:1", "--listen", "127.0.0.1", "--ssh", f"sh {ssh}"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    sentence = rf"host other was turned away: it has manyhands 0\.0\.7, .* {re.escape(VERSION)}\."
    assert re.search(sentence, done.stderr), done.stderr
    assert "can they reach" not in done.stderr and not (tmp_path / "run").exists()


def test_what_differs_is_named_with_both_versions() -> None:
    mine = (VERSION, torch_version(), sys.version.split()[0], message_digest())
    assert differs(*mine) is None
    for place, other in enumerate(("0.0.7", "1.2.3", "2.7.18", "0123456789abcdef")):
        theirs = [*mine]
        theirs[place] = other
        problem = differs(*theirs)
        assert problem is not None and other in problem
        assert mine[place].partition("+")[0] in problem and "nstall" in problem


def test_the_digest_is_of_all_messages() -> None:
    names = {cls.__name__ for cls in message_classes(*WIRE)}
    assert {
        "Here",
        "Load",
        "Beat",
        "StepRecord",
        "View",
        "Member",
        "Orders",
        "TrainConfig",
    } <= names


def test_who_is_sent_away_again_and_again_stays_away_longer() -> None:
    waits, wait_s = list[float](), 0.0
    for _ in range(12):
        wait_s = stay_away_s(0.0, stayed_s=0.1, before_s=wait_s)
        waits.append(wait_s)
    assert waits == sorted(waits) and waits[0] < 1 and waits[-1] == MOST_AWAY_S
    assert stay_away_s(300.0, 0.1, 0.0) == 300.0, "as it was told"
    assert stay_away_s(0.0, 100.0, MOST_AWAY_S) == 0.0, "it had stayed"
