# SPDX-License-Identifier: Apache-2.0
"""Who was turned away at a socket of ours, and what made no sense there: counted, for people."""

import time
from collections import Counter
from typing import NamedTuple

TELL_S, FIRST_S = 10.0, 1.0
"""At most one sentence in so many seconds; and what comes within a second of the first is in it."""
MOST_ADDRESSES, SHOWN = 256, 3
"""That are remembered until they are told, and that are told."""


class RefusalCounts(NamedTuple):
    """Connections with another key, connections of something else, those of which there were too
    many at once, those that sent too much, and messages without sense."""

    keys: int = 0
    others: int = 0
    crowd: int = 0
    floods: int = 0
    messages: int = 0


class Refusals:
    """Of one socket. Counted by the threads that watch and read it; `words` is for one other."""

    def __init__(self) -> None:
        self.where = ""
        self.connections = self.keys = self.crowd = self.floods = self.messages = 0
        """Connections that ended before they had proven who they are, those of them with another
        key, those that were ended because there were too many or because they sent too much, and
        messages that could not be read or came from somebody who does not exist."""
        self.addresses = Counter[str]()
        """Of those who were turned away and not told of yet."""
        self._told, self._told_at, self._first_at = RefusalCounts(), 0.0, 0.0

    def note(self, address: str) -> None:
        """Somebody there was turned away."""
        if address and (address in self.addresses or len(self.addresses) < MOST_ADDRESSES):
            self.addresses[address] += 1

    def words(self) -> str | None:
        """About what is new, if it is time to say something."""
        now = time.monotonic()
        counts = RefusalCounts(
            self.keys,
            max(0, self.connections - self.keys - self.crowd),
            self.crowd,
            self.floods,
            self.messages,
        )
        if counts == self._told:
            return None
        self._first_at = self._first_at or now
        if now - self._first_at < FIRST_S or (self._told_at and now - self._told_at < TELL_S):
            return None
        new = RefusalCounts(*(max(0, a - b) for a, b in zip(counts, self._told, strict=True)))
        addresses, self.addresses = self.addresses, Counter[str]()
        self._told, self._told_at, self._first_at = counts, now, 0.0
        if not any(new):
            return None
        return said(new, self.where, [address for address, _ in addresses.most_common()])


def said(new: RefusalCounts, where: str, addresses: list[str]) -> str:
    """ "3 connections with another key were refused at 10.0.0.1:7077; they came from 10.0.0.9" """
    parts = [
        f"{_count(n, thing)} {how}"
        for n, thing, how in (
            (new.keys, "connection", "with another key"),
            (new.others, "connection", "that did not speak our language"),
            (new.crowd, "connection", "too many that had not said who they are"),
            (new.floods, "connection", "that sent more than anybody could read"),
            (new.messages, "message", "that made no sense"),
        )
        if n > 0
    ]
    were = "was" if sum(new) == 1 else "were"
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"{listed} {were} refused at {where}{_origin(addresses, alone=sum(new) == 1)}"


def _origin(addresses: list[str], *, alone: bool) -> str:
    if not addresses:
        return ""
    more = f" and {len(addresses) - SHOWN} more" if len(addresses) > SHOWN else ""
    return f"; {'it' if alone else 'they'} came from {', '.join(addresses[:SHOWN])}{more}"


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"
