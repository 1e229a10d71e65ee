"""No value of ours shows a secret; a host's name is never an option of ssh."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import manyhands
from manyhands.launch.hosts import ssh
from manyhands.launch.hosts.host_daemon import Offer
from manyhands.launch.hosts.joined_hosts import Listening
from manyhands.launch.hosts.requested_hosts import parse_hosts
from manyhands.values.credentials import Credentials, new_secret
from manyhands.values.errors import RequestError
from manyhands.values.hidden_secrets import SECRET
from manyhands.values.join_token import DriverKey
from manyhands.values.worker_orders import Keys

ROOT = Path(manyhands.__file__).parent
OPTIONAL = ("ray", "mpi")


def classes() -> list[type[Any]]:
    found: list[type[Any]] = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if path.name in ("__main__.py", "mpi.py") or any(part in OPTIONAL for part in parts):
            continue
        module = importlib.import_module(".".join(p for p in parts if p != "__init__"))
        found += [c for c in vars(module).values() if isinstance(c, type)]
    return [c for c in dict.fromkeys(found) if c.__module__.startswith("manyhands.")]


def shows_a_secret(kind: type[Any]) -> bool:
    if issubclass(kind, msgspec.Struct):
        secret = any(SECRET.search(name) for name in kind.__struct_fields__)
        return secret and kind.__repr__ is msgspec.Struct.__repr__
    if dataclasses.is_dataclass(kind):
        return any(f.repr and SECRET.search(f.name) for f in dataclasses.fields(kind))
    return False


def test_no_class_shows_its_secrets() -> None:
    assert len(every := classes()) > 200
    assert [c.__qualname__ for c in every if shows_a_secret(c)] == []


def test_what_is_shown_instead() -> None:
    secret, driver = new_secret(), DriverKey()
    keys, token = Credentials.of(secret, "x"), driver.token()
    values = (
        keys,
        Keys("tcp://h:1", b"a", b"b", keys.client_secret),
        Offer(host="h", port=1, token=token, slots=1, name="n"),
        Listening(["h"], 1, driver),
    )
    for value in values:
        for hidden in (secret, token.secret, keys.client_secret, keys.server_secret):
            assert repr(hidden)[2:-1] not in repr(value) and hidden.hex() not in repr(value)
    assert repr(values[1]).startswith("Keys(address='tcp://h:1', supervisor_public=b'a'")


def test_a_hosts_name_is_never_an_option_of_ssh(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is no name of a host"):
        parse_hosts("-oProxyCommand=touch,b")
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/said\ncat > /dev/null\n')
    program.chmod(0o755)
    listening = Listening(["127.0.0.1"], 1, DriverKey())
    host = ssh.SshHost(listening, f"{program} -p 22", "-oX=1", 1)
    host.close()
    said = (tmp_path / "said").read_text()
    assert said.splitlines()[:4] == ["-p", "22", "--", "-oX=1"]
    assert "manyhands-token" not in said, "it goes by standard input"
