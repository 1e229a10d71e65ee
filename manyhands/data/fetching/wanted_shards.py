# SPDX-License-Identifier: Apache-2.0
"""What is going to be read, as far as fetching is concerned. A value; it imports nothing large."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.data.fetching.transfer import Transfer
    from manyhands.data.shards.manifest import ShardInfo


@dataclass(frozen=True, slots=True)
class WantedShards:
    """The shards of one split, and how they get here."""

    name: str
    """For people: which split, and of what."""
    shards: "Sequence[ShardInfo]"
    transfer: "Transfer"
    open_bytes: int
    """About how much of them a process has open at once."""
