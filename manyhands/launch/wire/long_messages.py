# SPDX-License-Identifier: Apache-2.0
"""Messages that are too long for one: cut up by who sends them, put together by who reads them."""

from collections.abc import Iterator

import msgspec

from manyhands.values.messages import (
    FILE_PIECE_BYTES,
    MOST_MESSAGE_BYTES,
    Fragment,
    FromWorker,
    decode_from_worker,
    encode,
)

MOST_WHOLE_BYTES = 256 << 20
"""Of one message."""
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
        last = start + FILE_PIECE_BYTES >= len(whole)
        yield encode(Fragment(worker=message.worker, data=data, last=last))


class Assembly:
    """Of what all workers send."""

    def __init__(self) -> None:
        self._begun: dict[int, bytearray] = {}

    def add(self, message: FromWorker) -> FromWorker | None:
        """The message; None as long as some of it is still to come. ValidationError when there is
        too much of it."""
        if not isinstance(message, Fragment):
            return message
        begun = self._begun.pop(message.worker, bytearray())
        in_all = sum(map(len, self._begun.values())) + len(begun) + len(message.data)
        if len(begun) + len(message.data) > MOST_WHOLE_BYTES or in_all > MOST_IN_ALL_BYTES:
            raise msgspec.ValidationError("it is too long")
        begun += message.data
        if not message.last:
            self._begun[message.worker] = begun
            return None
        whole = decode_from_worker(begun)
        if isinstance(whole, Fragment) or whole.worker != message.worker:
            raise msgspec.ValidationError("it is not what was begun")
        return whole

    def forget(self, worker: int) -> None:
        """It will not say the rest."""
        self._begun.pop(worker, None)
