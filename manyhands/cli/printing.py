# SPDX-License-Identifier: Apache-2.0
"""What several commands print alike: JSON, pairs, tables."""

import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.table import Table

from manyhands.values.printable_text import escaped


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()  # NaN becomes null, as JSON wants it


def show_pairs(pairs: Mapping[str, Any], *, as_json: bool = False) -> None:
    if as_json:
        print(to_json(pairs))
        return
    width = max(len(name) for name in pairs)
    for name, value in pairs.items():
        text = f"{value:.4f}" if isinstance(value, float) else escaped(str(value))
        print(f"{name:<{width}}  {text}")


def links_table(links: Sequence[Mapping[str, Any]]) -> Table:
    """The network between hosts, as they measured it."""
    table = Table("host", "host", "round trip ms", "MB/s", box=None, pad_edge=False)
    for link in links:
        numbers = f"{1e3 * link['round_trip_s']:.2f}", f"{link['bytes_per_s'] / 1e6:.1f}"
        table.add_row(link["host"], link["other"], *numbers)
    return table


def servers_table(servers: Sequence[Mapping[str, Any]]) -> Table:
    """What each had to do lately."""
    columns = ("rank", "worker", "applied/s", "MB/s", "share", "busy", "queue", "p50 ms", "p99 ms")
    table = Table(*columns, box=None, pad_edge=False)
    for each in servers:
        table.add_row(
            str(each["rank"]),
            str(each["worker"]),
            f"{each['applied_per_s']:.1f}",
            f"{each['bytes_per_s'] / 1e6:.1f}",
            f"{each['share']:.0%}",
            f"{each['busy']:.0%}",
            f"{each['queue']:.1f}",
            f"{1e3 * each['p50_s']:.2f}",
            f"{1e3 * each['p99_s']:.2f}",
        )
    return table


MOST_BEHIND = 8


def steps_behind(counts: Sequence[int]) -> str:
    """How stale what was applied had been, as parts of all of it."""
    total, last = sum(counts), MOST_BEHIND - 1
    shown = [*counts[:last], sum(counts[last:])] if len(counts) > MOST_BEHIND else list(counts)
    more = {last: "+"} if len(counts) > MOST_BEHIND else {}
    return ", ".join(f"{k}{more.get(k, '')}: {n / total:.0%}" for k, n in enumerate(shown))


@contextmanager
def warnings_shown() -> Generator[None]:
    """Python's warnings as lines for people."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
