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


@contextmanager
def warnings_shown() -> Generator[None]:
    """Python's warnings as lines for people."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
