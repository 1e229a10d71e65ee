"""`--hosts a,b`: agents that a real ssh starts on other hosts."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.launch.hosts.requested_hosts import parse_hosts, parse_listen
from manyhands.testing.namespaces import Host, Network
from manyhands.values.errors import RequestError

TASK = Path(__file__).parents[3] / "examples" / "01_digits.py"
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
needs_ssh = pytest.mark.skipif(
    not (SSHD and shutil.which("ssh")),
    reason="needs ssh and sshd (apt install openssh-server openssh-client)",
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with keys of a server and of whoever may come in."""
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in ("server", "client"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True, timeout=30)
    settings = {
        "HostKey": folder / "server",
        "AuthorizedKeysFile": folder / "client.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PidFile": "none",
    }
    (folder / "config").write_text("".join(f"{k} {v}\n" for k, v in settings.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    return folder


@contextmanager
def served(host: Host, keys: Path) -> Iterator[None]:
    assert SSHD is not None
    command = [SSHD, "-D", "-e", "-f", str(keys / "config")]
    server = host.popen(
        [*command, "-o", f"ListenAddress={host.address}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        while "Server listening" not in (line := server.stderr.readline()):
            assert line, "sshd has ended"
        yield
    finally:
        server.kill()
        server.communicate()


@needs_ssh
def test_hosts_are_reached_by_ssh_and_left_as_they_were(
    network: Callable[..., Network], keys: Path, tmp_path: Path
) -> None:
    net = network(hosts=3)
    here, b, c = net.hosts
    nobody = here.address.rpartition(".")[0] + ".99"
    ssh = f"ssh -o BatchMode=yes -o StrictHostKeyChecking=no -i {keys / 'client'}"
    ssh += f" -o UserKnownHostsFile={keys / 'known'} -o ConnectTimeout=2"

    def train(to: str, *hosts: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "manyhands", "train", str(TASK), "--quiet"]
        command += ["--to", str(tmp_path / to), "--set", "train.epochs=2"]
        command += ["--ssh", ssh, "--hosts", ",".join(hosts)]
        return here.run(command, capture_output=True, text=True, timeout=120)

    with ExitStack() as stack:
        for host in (b, c):
            stack.enter_context(served(host, keys))
        said = train("run", f"{b.address}:1", f"{c.address}:1", "here:1")
        assert said.returncode == 0, said.stderr
        for host in (b, c):
            assert len(host.pids()) == 1, "only sshd is still there"
        refused = train("refused", f"{b.address}:1", f"{nobody}:1")
        assert refused.returncode == 2
        assert f"host {nobody} could not be started over ssh" in refused.stderr
        assert len(b.pids()) == 1, "who had come already has gone again"
    calm = mh.train(TASK, to=tmp_path / "calm", workers=1, settings=["train.epochs=2"], quiet=True)
    assert mh.fingerprint(tmp_path / "run") == calm.fingerprint


def test_hosts_as_people_write_them() -> None:
    found = parse_hosts("a, b:2,user@c,here:0")
    assert found == [("a", None), ("b", 2), ("user@c", None), ("here", 0)]
    for wrong in ("", ",", "a,a", "a:many"):
        with pytest.raises(RequestError, match="--hosts"):
            parse_hosts(wrong)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("10.0.0.1", ("10.0.0.1", 0)),
        (":7000", ("0.0.0.0", 7000)),
        ("[::1]:7000", ("::1", 7000)),
        ("[::1]", ("::1", 0)),
        ("::1", ("::1", 0)),
        ("host", ("host", 0)),
    ],
)
def test_listening_as_people_write_it(text: str, found: tuple[str, int]) -> None:
    assert parse_listen(text) == found


@pytest.mark.parametrize("text", ["a:b", "a:70000"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--listen"):
        parse_listen(text)
