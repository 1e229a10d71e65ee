# SPDX-License-Identifier: Apache-2.0
"""Rounds in which every member of a view has its part (an evaluation), until all have given it."""

from manyhands.values.messages import RoundPart

MOST_ROUNDS = 16
"""A worker waits for each; so there is one, and those that others do not finish."""


class OpenRounds:
    def __init__(self) -> None:
        self.parts: dict[str, dict[int, RoundPart]] = {}
        """Round → rank → its part."""

    def clear(self) -> None:
        """With another view: nobody waits for those of the one before."""
        self.parts.clear()

    def of(self, rank: int) -> int:
        """In how many it has given its part, and others have not."""
        return sum(rank in parts for parts in self.parts.values())

    def add(self, part: RoundPart, rank: int, members: int) -> list[bytes] | None:
        """All payloads by rank, if this was the last of so many; the round is over then."""
        parts = self.parts.setdefault(part.round, {})
        parts[rank] = part
        if len(parts) < members:
            return None
        del self.parts[part.round]
        return [parts[rank].payload for rank in range(members)]
