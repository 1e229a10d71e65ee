# SPDX-License-Identifier: Apache-2.0
"""Messages that are too long for one: cut up by who sends them, put together by who reads them."""

from collections.abc import Iterator

import msgspec

from manyhands.values.messages import (
    FILE_PIECE_BYTES,
    MOST_MESSAGE_BYTES,
    Fragment,
    FromWorker,
    decode_bulk,
    decode_from_worker,
    encode,
)

MOST_WHOLE_BYTES = 256 << 20
"""Of one message."""
MOST_READ_BYTES = 4 << 20
"""Of one that is read item by item, which then takes many times as much memory. Longer ones carry
bytes for others (`decode_bulk`)."""
MOST_IN_ALL_BYTES = 1 << 30
"""Of all that have begun and not ended."""


def fragments(message: FromWorker) -> Iterator[bytes]:
    """What to send for a message: itself, or its pieces."""
    whole = encode(message)
    if len(whole) <= MOST_MESSAGE_BYTES:
        yield whole
        return
    for start in range(0, len(whole), FILE_PIECE_BYTES):
        data = whole[start : start + FILE_PIECE_BYTES]
        yield encode(Fragment(worker=message.worker, at=start, size=len(whole), data=data))


class Assembly:
    """Of what all workers send."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[int, bytearray]] = {}
        """worker → the size of what it has begun to say, and what there is of it"""

    def add(self, message: FromWorker) -> FromWorker | None:
        """The message; None as long as some of it is still to come. ValidationError when there is
        too much of it, or when a piece is missing, repeated or of another: then what was begun is
        forgotten."""
        if not isinstance(message, Fragment):
            return message
        size, begun = self._begun.pop(message.worker, (message.size, bytearray()))
        in_all = self.held_bytes + len(begun) + len(message.data)
        if size > MOST_WHOLE_BYTES or in_all > MOST_IN_ALL_BYTES:
            raise msgspec.ValidationError("it is too long")
        if message.size != size or message.at != len(begun):
            here = f"byte {message.at} of {message.size}"
            raise msgspec.ValidationError(f"{here} came where {len(begun)} of {size} was to come")
        begun += message.data
        if len(begun) > size:
            raise msgspec.ValidationError(f"it is longer than the {size} bytes that were announced")
        if len(begun) < size:
            self._begun[message.worker] = size, begun
            return None
        whole = (decode_from_worker if size <= MOST_READ_BYTES else decode_bulk)(begun)
        if isinstance(whole, Fragment) or whole.worker != message.worker:
            raise msgspec.ValidationError("it is not what was begun")
        return whole

    @property
    def held_bytes(self) -> int:
        """Of messages that are not whole yet."""
        return sum(len(begun) for _, begun in self._begun.values())

    def forget(self, worker: int) -> None:
        """It will not say the rest."""
        self._begun.pop(worker, None)
