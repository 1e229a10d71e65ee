"""`manyhands doctor`: what it finds on this host, on others, and between them."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.launch.hosts.probe_process import Probe
from manyhands.stories.doctor.checks import (
    Check,
    Diagnosis,
    clock_check,
    folder_check,
    link_check,
    machine_checks,
    version_checks,
)
from manyhands.stories.doctor.questions import Asked, HostFacts, Look, decode_answered, encode
from manyhands.testing.namespaces import Host, Network
from manyhands.values.join_token import key_for
from manyhands.values.machine import torch_version
from manyhands.values.version import VERSION
from manyhands.values.worker_status import Link
from tests.support.cluster import MANYHANDS

PATIENCE_S = 100
GOOD = HostFacts(
    host="a",
    python=sys.version.split()[0],
    torch=torch_version(),
    manyhands=VERSION,
    cores=4,
    memory_bytes=8 << 30,
    shm_bytes=4 << 30,
    open_files=4096,
    segments="",
    listener="10.0.0.1:4000",
    bound="",
    ports="32768-60999",
    loopback_s=2e-5,
    sees=True,
    free_bytes=50 << 30,
)


def but(**facts: Any) -> HostFacts:
    return msgspec.structs.replace(GOOD, **facts)


# ---- judging


MACHINES = {
    "a good one": ({}, ""),
    "a small /dev/shm": ({"shm_bytes": 64 << 20}, "! a: /dev/shm has only 67 MB"),
    "no /dev/shm": ({"shm_bytes": -1}, "! a: /dev/shm is missing"),
    "few files": ({"open_files": 256}, "! a: only 256 open files: ulimit -n 4096"),
    "too few files": ({"open_files": 64}, "✗ a: only 64 open files"),
    "no limit": ({"open_files": -1}, ""),
    "no shared memory": ({"segments": "File too large"}, "✗ a: workers cannot share memory"),
    "another's address": ({"bound": "10.0.0.9: no"}, "✗ a: no port can be bound at 10.0.0.9: no"),
    "a busy one": ({"loopback_s": 0.01}, "! a: 10.000 ms there and back"),
    "little room": ({"free_bytes": 200 << 20}, "! a: only 210 MB are free where runs are kept"),
    "a full disk": ({"free_bytes": 4096}, "✗ a: only 0 MB are free where runs are kept"),
    "no init": ({"zombies": True}, "! a: process 1 does not reap orphans"),
    "unusable bf16": ({"kernels": "AVX512_CORE"}, "! a: this machine announces AMX and does not"),
    "no loopback": ({"loopback_s": -1.0}, "✗ a: 127.0.0.1 cannot be reached"),
}


@pytest.mark.parametrize("case", MACHINES)
def test_machines_are_judged(case: str) -> None:
    facts, says = MACHINES[case]
    worse = [str(c) for c in machine_checks("a", but(**facts), 4) if c.mark != "ok"]
    assert [line for line in worse if line.startswith(says)] == worse and len(worse) == bool(says)


def test_more_workers_than_cores_are_pointed_out() -> None:
    assert any("offers 9 workers and has 4 cores" in str(c) for c in machine_checks("a", GOOD, 9))


VERSIONS = {
    "the same": ({}, "ok", "the same Python"),
    "another manyhands": ({"manyhands": "9.9"}, "wrong", "it has manyhands 9.9"),
    "another torch": ({"torch": "1.0"}, "wrong", "it has torch 1.0"),
    "another build of torch": ({"torch": f"{GOOD.torch}x"}, "warning", "results may differ"),
    "another Python": ({"python": "3.99.1"}, "wrong", "it has Python 3.99.1"),
    "another patch of Python": (
        {"python": ".".join(GOOD.python.split(".")[:2]) + ".99"},
        "warning",
        "results may differ",
    ),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_versions_are_compared(case: str) -> None:
    facts, mark, says = VERSIONS[case]
    (check,) = version_checks("b", GOOD, but(**facts))
    assert check.mark == mark and says in check.text


@pytest.mark.parametrize(
    ("ahead_s", "unsure_s", "mark"),
    [(0.2, 0.01, "ok"), (3.0, 0.01, "warning"), (-3.0, 0.01, "warning"), (1.5, 1.0, "ok")],
)
def test_clocks_are_compared_as_well_as_one_can(ahead_s: float, unsure_s: float, mark: str) -> None:
    assert clock_check("b", ahead_s, unsure_s).mark == mark


def test_links_and_folders() -> None:
    assert link_check(Link("a", "b", 1e-4, 1e9)).mark == "ok"
    assert link_check(Link("a", "b", 1e-4, 1e6)).mark == "warning"
    assert link_check(Link("a", "b", 0.05, 1e9)).mark == "warning"
    assert [folder_check("b", "/x", sees=s).mark for s in (True, False)] == ["ok", "warning"]


def test_a_warning_does_not_stop_a_run() -> None:
    fine, odd, bad = (Check(m, "a", "") for m in ("ok", "warning", "wrong"))
    assert Diagnosis(1, [fine], []).summary() == "A run on 1 host would work."
    assert Diagnosis(2, [odd], []).summary() == "A run on 2 hosts would work (1 warning)."
    assert Diagnosis(2, [bad, odd], []).summary().endswith("would not work: 1 problem (1 warning).")


# ---- this host


def doctor(*arguments: object, at: Host | None = None, **popen: Any) -> tuple[int, str]:
    """Exit code and all that was printed."""
    command = [*MANYHANDS, "doctor", *map(str, arguments)]
    run = subprocess.run if at is None else at.run
    done = run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **popen)
    return done.returncode, done.stdout + done.stderr


def test_this_host_is_fit(tmp_path: Path) -> None:
    code, said = doctor("--folder", tmp_path)
    assert code == 0, said
    assert f"✓ this host: Python {GOOD.python}, torch {GOOD.torch}, manyhands {VERSION}" in said
    assert "A run on 1 host would work" in said
    assert list(tmp_path.iterdir()) == []
    code, said = doctor("--folder", tmp_path / "missing")
    assert code == 1 and "✗ this host" in said and "cannot be written to" in said
    code, said = doctor("--listen", "127.0.0.1")
    assert code == 2 and "--token-file" in said


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: not here')")
    path = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code, said = doctor("--folder", tmp_path, env=path)
    assert code == 1 and "✗ this host: workers cannot be started: ImportError: libcudart" in said


def test_a_probe_ends_with_whoever_asks() -> None:
    probe = Probe()
    try:
        probe.tell(encode(Asked(7, Look("127.0.0.1", "/nowhere"))))
        os.set_blocking(probe.fileno(), True)
        answer = decode_answered(os.read(probe.fileno(), 1 << 16))
        assert (
            answer.number == 7 and isinstance(answer.finding, HostFacts) and not answer.finding.sees
        )
        probe.tell(b"garbage")
        while probe.ended is None:
            assert probe.lines() == []
        assert "Error" in probe.ended
    finally:
        probe.close()


# ---- several


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    key_for(path)
    return path


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def daemon(stack: ExitStack, port: int, token: Path, name: str) -> None:
    """On this host, under that name; it goes when it is told to."""
    command = [*MANYHANDS, "worker", "--join", f"127.0.0.1:{port}", "--token-file", str(token)]
    process = subprocess.Popen(
        [*command, "--name", name, "--slots", "1"], stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)


@pytest.mark.slow
def test_daemons_that_join(tmp_path: Path, token: Path, free_port: int) -> None:
    other = tmp_path / "other"
    key_for(other)
    with ExitStack() as stack:
        for name in ("b", "c"):
            daemon(stack, free_port, token, name)
        daemon(stack, free_port, other, "stranger")
        at = ["--listen", f"127.0.0.1:{free_port}", "--token-file", token, "--expect", 2]
        code, said = doctor(*at, "--folder", tmp_path, "--json")
    assert code == 0, said
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["works"] and len(found["links"]) == 3
    assert {(c["where"], c["mark"]) for c in found["checks"] if c["where"] in "bc"} == {
        ("b", "ok"),
        ("c", "ok"),
    }


@pytest.mark.slow
def test_hosts_over_ssh(tmp_path: Path) -> None:
    """Here ssh is a script: b is started, nobody answers at c."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$2" = b ] || { echo "no route" >&2; exit 255; }\nexec sh -c "$3"')
    ssh.chmod(0o700)
    at = ["--listen", "127.0.0.1", "--ssh", ssh, "--folder", tmp_path]
    code, said = doctor("--hosts", "b,here", *at)
    assert code == 0, said
    assert "! b: its name is not known here" in said and "A run on 2 hosts would work" in said
    code, said = doctor("--hosts", "b,c", *at)
    assert code == 1
    assert "✗ c: host c could not be started over ssh (exit code 255). It said:\nno route" in said
    assert "✓ b: has joined" in said and "would not work: 1 problem" in said


def test_who_does_not_come_is_missed(tmp_path: Path, token: Path) -> None:
    at = ["--listen", "127.0.0.1", "--token-file", token, "--patience", 1]
    code, said = doctor(*at, "--folder", tmp_path)
    assert code == 1 and "✗ this host: 0 of 1 hosts have joined at 127.0.0.1:" in said


@pytest.fixture
def examined(
    network: Callable[..., Network], tmp_path: Path, token: Path
) -> Callable[[Callable[[Network], None]], tuple[int, str]]:
    """What the doctor on the first of three hosts says, when something was done to the network."""

    def examine(disturb: Callable[[Network], None]) -> tuple[int, str]:
        net = network(hosts=3)
        disturb(net)
        first, *others = net.hosts
        for host in others:
            command = [*MANYHANDS, "worker", "--join", f"{first.address}:7077", "--name", host.name]
            command += ["--token-file", str(token), "--slots", "1"]
            host.popen(command, stderr=subprocess.DEVNULL)
        at = ["--listen", f"{first.address}:7077", "--token-file", token, "--expect", 2]
        return doctor(*at, "--folder", tmp_path, at=first)

    return examine


def test_two_hosts_that_do_not_reach_each_other(examined: Any) -> None:
    addresses: list[str] = []

    def cut(net: Network) -> None:
        net.cut(net.hosts[1], net.hosts[2])
        addresses.extend(host.address for host in net.hosts)

    code, said = examined(cut)
    assert code == 1, said
    assert f"✗ c – b: host b cannot be reached at {addresses[1]}:" in said
    assert f"✗ b – c: host c cannot be reached at {addresses[2]}:" in said
    assert "from host c: nothing came back within 3 s" in said and "open TCP ports" in said
    assert said.count("MB/s") == 2, "the driver's host reaches both"


@pytest.mark.slow
def test_a_slow_link(examined: Any) -> None:
    def slowly(net: Network) -> None:
        net.hosts[1].limit(20)

    code, said = examined(slowly)
    assert code == 0, said
    links = re.findall(r"^(.) (.*): .* ms there and back, (.*) MB/s", said, re.MULTILINE)
    assert len(links) == 3
    assert [sign for sign, hosts, _ in links if "b" in hosts.split(" – ")] == ["!", "!"]
    assert "A run on 3 hosts would work" in said


NO_INIT = """
import os, sys, time
child = os.fork()
if child == 0:
    from manyhands.stories.doctor.probe import orphans_are_reaped
    print(orphans_are_reaped())
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("init", [False, True])
def test_a_process_one_that_is_no_init_is_found(init: bool) -> None:
    """Once under one that waits for its own child only, and once under that of our commands."""
    command = "from manyhands.cli.init_process import init_stays_behind as i; i()\n" if init else ""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no process namespaces here: {tried.stderr.strip()}")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", command + NO_INIT],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == f"{init}\n", done.stderr
