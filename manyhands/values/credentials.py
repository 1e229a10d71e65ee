# SPDX-License-Identifier: Apache-2.0
"""Secrets of a run: one of 32 random bytes, from which all keys come; and the file it lives in.

Who has the secret can join and is believed; nobody else is heard. It is handed on in files that
only their owner can read, or over channels that it protects; never on a command line, in a log or
in the environment.
"""

import hashlib
import os
import secrets
import stat
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from manyhands.values.errors import RequestError

_LENGTH = 32


class Credentials(msgspec.Struct, frozen=True):
    """CURVE key pairs of the servers and of the clients of one purpose."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def of(cls, secret: bytes, purpose: str) -> "Credentials":
        """The same for everybody who has the secret."""
        server, client = (
            z85.encode(derived(secret, f"{purpose} {role}")) for role in ("server", "client")
        )
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client)

    def __repr__(self) -> str:
        return "Credentials(...)"


class OnlyThisKey:
    """The authenticator's question: may this client speak?"""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


def new_secret() -> bytes:
    return secrets.token_bytes(_LENGTH)


def derived(secret: bytes, purpose: str) -> bytes:
    """A secret for one purpose; from it the others cannot be told."""
    assert len(secret) == _LENGTH
    return hashlib.blake2b(purpose.encode(), key=secret, digest_size=32).digest()


def write_token(path: Path, secret: bytes) -> None:
    """For others to join by: a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(secret.hex() + "\n")


def read_token(path: Path) -> bytes:
    """The secret in a token file; one that others can read is refused."""
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the token file {path} cannot be read: {error}") from error
    if stat.S_ISREG(mode) and mode & 0o077:
        raise RequestError(
            f"the token file {path} can be read by others (mode {mode & 0o777:o}). Make a new one, "
            f"or, if nobody has read it: chmod 600 {path}"
        )
    return parse_token(text, str(path))


def parse_token(text: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != _LENGTH:
        raise RequestError(
            f"{where} holds no token: 64 hexadecimal digits, as `manyhands train` writes them."
        )
    return secret
