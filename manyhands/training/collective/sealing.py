# SPDX-License-Identifier: Apache-2.0
"""What travels between two hosts, sealed: AES-128-GCM, with keys of one connection alone.

Both ends make a pair of X25519 keys for the connection and sign the public halves with the view's
secret as they meet (handshake.py). From what the pairs have in common, the secret and all that was
signed follow a key for each direction. So only the two who met can read or write, and who learns
the secret later cannot read what was recorded.

Pieces of at most PIECE_BYTES are sealed, each with the number of the piece as its nonce: none can
be changed, repeated, left out or moved without the next one failing to open. That is what TLS 1.3
does with a shared secret (psk_dhe_ke), without its records of 16 KB, which cost 2.5 times the
processor (docs/LOG.md).
"""

import hashlib
import hmac
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PIECE_BYTES = 128 << 10
KEY_BYTES = 16
TAG_BYTES = 16


class SessionKeys(NamedTuple):
    """Of one end of a connection; the other has them the other way round."""

    send: bytes
    receive: bytes
    farewell: bytes
    """What this end says last; nobody else can."""
    their_farewell: bytes

    def __repr__(self) -> str:
        return "SessionKeys(...)"


class Ephemeral:
    """One end's pair, for one connection. `public` serves as its nonce: it never comes twice."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, theirs: bytes, secret: bytes, signed: bytes, *, calls: bool) -> SessionKeys:
        """The keys of the connection. Raises ValueError for a public half that is none."""
        common = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        # HKDF (RFC 5869) with SHA-256
        pseudo_random = hmac.digest(secret, common, hashlib.sha256)
        made = [
            hmac.digest(pseudo_random, b"manyhands " + label + b"\0" + signed + b"\1", "sha256")
            for label in (b"caller", b"called", b"caller leaves", b"called leaves")
        ]
        caller, called = (key[:KEY_BYTES] for key in made[:2])
        caller_leaves, called_leaves = made[2:]
        if calls:
            return SessionKeys(caller, called, caller_leaves, called_leaves)
        return SessionKeys(called, caller, called_leaves, caller_leaves)


class Seal:
    """Seals what one end sends and opens what it receives, in order."""

    def __init__(self, keys: SessionKeys) -> None:
        self._sealing, self._opening = AESGCM(keys.send), AESGCM(keys.receive)
        self._sealed = self._opened = 0
        self._out = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))
        self._in = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))

    def seal(self, clear: list[memoryview]) -> memoryview:
        """The next piece, taken from the front of `clear`. Valid until the next is asked for."""
        piece = _taken(clear)
        sealed = self._out[: len(piece) + TAG_BYTES]
        self.seal_into(piece, sealed)
        return sealed

    def seal_into(self, clear: memoryview | bytes, sealed: memoryview) -> None:
        self._sealing.encrypt_into(self._sealed.to_bytes(12, "little"), clear, None, sealed)
        self._sealed += 1

    def room(self, size: int) -> memoryview:
        """Where the next piece of `size` bytes that are still to come is to be received."""
        return self._in[: min(size, PIECE_BYTES) + TAG_BYTES]

    def open(self, sealed: memoryview, into: list[memoryview]) -> None:
        """To the front of `into`, which is then what is still to be filled."""
        size = len(sealed) - TAG_BYTES
        if len(into[0]) >= size:
            self.open_into(sealed, into[0][:size])
            _skip(into, size)
            return
        clear = memoryview(bytearray(size))
        self.open_into(sealed, clear)
        while len(clear):
            part = min(len(clear), len(into[0]))
            into[0][:part] = clear[:part]
            clear = clear[part:]
            _skip(into, part)

    def open_into(self, sealed: memoryview, clear: memoryview) -> None:
        nonce = self._opened.to_bytes(12, "little")
        try:
            self._opening.decrypt_into(nonce, sealed, None, clear)
        except InvalidTag:
            raise ConnectionResetError("what came was changed on the way, or cut short") from None
        self._opened += 1


def _taken(clear: list[memoryview]) -> memoryview:
    """A piece from the front; a copy where it consists of several parts."""
    size = min(PIECE_BYTES, sum(map(len, clear)))
    if len(clear[0]) >= size:
        piece = clear[0][:size]
        _skip(clear, size)
        return piece
    parts: list[memoryview] = []
    while size:
        part = clear[0][:size]
        parts.append(part)
        size -= len(part)
        _skip(clear, len(part))
    return memoryview(b"".join(parts))


def _skip(buffers: list[memoryview], size: int) -> None:
    buffers[0] = buffers[0][size:]
    while buffers and not len(buffers[0]):
        del buffers[0]
