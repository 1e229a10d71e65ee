# SPDX-License-Identifier: Apache-2.0
"""Secrets that members of a run share, 32 random bytes each, and the keys that follow from them.

Who has the secret is believed by the others who have it; nobody else is heard. It is handed on over
channels that are protected; never on a command line, in a log or in the environment. How hosts
join, and know the driver, is another matter: join_token.py.
"""

import hashlib
import secrets

import msgspec
import zmq
from zmq.utils import z85

from manyhands.values.hidden_secrets import discreet

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

    __repr__ = discreet


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
