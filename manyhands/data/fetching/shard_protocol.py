# SPDX-License-Identifier: Apache-2.0
"""What passes between hosts that exchange shards: a request for a piece, and the piece.

Connections are encrypted and authenticated (CURVE). All keys come from one secret of the run: who
does not have it cannot connect, and a server that does not have it is not believed. A request names
a shard by its content and a range in it; no path ever travels. Neither side holds more than WINDOW
pieces for the other, however slow that is.
"""

import msgspec

PIECE_BYTES = 256 << 10
"""What is asked for at a time. A link that brings one piece per timeout is slow, but not dead."""
WINDOW = 8
"""Pieces that a client has asked for and not received yet."""
REQUEST_BYTES = 4096
"""A request is no longer, and neither is what stands before a piece."""
HANDSHAKE_MS = 5000


class ShardRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    """Of the shard's content (`shard_cache.key_of`)."""
    start: int


class PieceHead(msgspec.Struct, frozen=True, array_like=True):
    """What comes before the bytes of a piece; `why` there are none, or that they are coming."""

    start: int
    why: str = ""
    coming: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ShardRequest).decode
decode_head = msgspec.msgpack.Decoder(PieceHead).decode
