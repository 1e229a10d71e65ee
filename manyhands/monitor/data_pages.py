# SPDX-License-Identifier: Apache-2.0
"""Pages about a prepared folder, for a terminal: what it holds, what its splits share, records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from manyhands.values.byte_sizes import shown_bytes
from manyhands.values.data_summary import ColumnSummary, DataSummary, LeakageSummary, SplitSummary
from manyhands.values.printable_text import escaped, one_line
from manyhands.values.shell_commands import command_line
from manyhands.values.wrap_text import WIDTH, wrapped

LABELS_SHOWN = 12
"""Labels in the table; of more, the most frequent ones."""
MANY_SPLITS = 5
"""More splits than this (folds) are summed up as fewest and most."""

T = TypeVar("T")


def show_data(data: DataSummary, *, notes: bool = True) -> None:
    """`notes`: whether those that were printed while it was prepared are printed too."""
    console = _console()
    if data.folds:
        told = f"{data.folder}  {data.folds} folds of {data.raw_records:,} records"
        _say(console, told, data.folder)
        _show_leakage(console, data.leakage)
        for hint in data.hints:
            _say(console, hint)
        _say(console, f"Look at one: {command_line('data', f'{data.folder}/fold-0')}")
        return
    total = sum(split.records for split in data.splits)
    nbytes = sum(split.nbytes for split in data.splits)
    told = (
        f"{data.folder}  {data.format}, {total:,} records, {shown_bytes(nbytes)}, "
        f"split {data.split}, seed {data.seed}"
    )
    _say(console, told, data.folder)
    if data.skipped:
        left = f"{data.skipped:,} of {data.raw_records:,} records were left out: skipped.jsonl"
        _say(console, left)
    for note in (*(data.notes if notes else ()), *data.hints):
        _say(console, note)
    console.print(_splits(data.splits))
    _show_leakage(console, data.leakage)
    console.print(_columns(data.columns))


def show_records(split: str, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
    """One line for each column: records are often wider than a terminal."""
    console = _console()
    console.print(f"\nfirst records of {split}, as they are read:")
    found = list(records)
    table = Table("column", box=None, pad_edge=False, header_style="bold")
    for k in range(len(found)):
        table.add_column(f"record {k + 1}", overflow="ellipsis", no_wrap=True, max_width=24)
    for name in columns:
        cells = (one_line(_cell(record.get(name))) for record in found)
        table.add_row(Text(one_line(name)), *map(Text, cells))
    console.print(table)


def checking_bar(*, quiet: bool) -> Callable[[Sequence[T]], Iterable[T]]:
    """What goes through a list and shows how far it is, on a terminal."""
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    return lambda shards: track(shards, "checking", console=console, disable=hidden)


def _console() -> Console:
    return Console(width=WIDTH, highlight=False)


def _say(console: Console, text: str, title: str = "") -> None:
    """Broken between words; Rich would break long names of files, and read [ ] as its own."""
    shown = Text(escaped(wrapped(text)))
    shown.stylize("bold", 0, len(title))
    console.print(shown, soft_wrap=True)


def _splits(splits: Sequence[SplitSummary]) -> Table:
    table = Table("split", box=None, pad_edge=False, header_style="bold")
    for title in ("records", "share", "size", "shards"):
        table.add_column(title, justify="right")
    total = max(1, sum(split.records for split in splits))
    for split in splits:
        share = f"{split.records / total:.1%}"
        size = shown_bytes(split.nbytes)
        table.add_row(split.name, f"{split.records:,}", share, size, str(split.shards))
    return table


# ---- what splits share


def _show_leakage(console: Console, leakage: LeakageSummary) -> None:
    console.print(_shared(leakage.shared))
    if leakage.labels and leakage.splits:
        console.print(_labels(leakage))
    if leakage.advice:
        console.print(Text(escaped(leakage.advice), style="bold red"))


def _shared(counts: Mapping[str, int]) -> Text:
    clean = not any(counts.values())
    counted = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    verdict = ("no record is in two splits", "green") if clean else ("LEAKAGE", "bold red")
    return Text.assemble(("Shared between splits: ", ""), counted, "  ", verdict)


def _labels(leakage: LeakageSummary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("label", overflow="ellipsis", no_wrap=True, max_width=24)
    few = len(leakage.splits) <= MANY_SPLITS
    for name in leakage.splits if few else ("fewest", "most"):
        table.add_column(name, justify="right", overflow="ellipsis", no_wrap=True, max_width=21)
    sums = _sums(leakage.labels.values())
    ranked = sorted(leakage.labels.items(), key=lambda item: (-sum(item[1]), item[0]))
    for label, counts in ranked[:LABELS_SHOWN]:
        table.add_row(Text(one_line(label)), *_counts(counts, sums))
    if rest := ranked[LABELS_SHOWN:]:
        left = _sums(counts for _, counts in rest)
        table.add_row(f"{len(rest):,} more", *_counts(left, sums), style="dim")
    return table


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    """Over labels, for each split."""
    return [sum(of_split) for of_split in zip(*counts, strict=True)]


def _counts(counts: Sequence[int], sums: Sequence[int]) -> list[str]:
    cells = [
        f"{n:,} ({n / total:.1%})" if total else "0" for n, total in zip(counts, sums, strict=True)
    ]
    if len(cells) <= MANY_SPLITS:
        return cells
    ranked = sorted(range(len(counts)), key=lambda split: counts[split])
    return [cells[ranked[0]], cells[ranked[-1]]]


# ---- columns and values


def _columns(columns: Sequence[ColumnSummary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("column", "role", "raw", "encoded", "missing", "values"):
        table.add_column(title, overflow="ellipsis", no_wrap=True, max_width=30)
    table.columns[1].min_width, table.columns[-1].max_width = 7, 36
    for column in columns:
        missing = column.statistics.get("missing", 0)
        cells = (
            column.name,
            column.role,
            column.raw,
            column.encoded,
            f"{missing:,}" if missing else "",
            _values(column.statistics),
        )
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def _values(told: Mapping[str, Any]) -> str:
    """What a column holds, in a few words."""
    common = told.get("common values") or told.get("common tokens")
    if common:
        word = "values" if "common values" in told else "tokens"
        count = told.get(f"distinct {word}", len(common))
        shown = ", ".join(list(common)[:4])
        return f"{count:,}: {shown}" if isinstance(count, int) else f"{count}: {shown}"
    if "least" in told:
        mean = f", mean {_number(told['mean'])}" if "mean" in told else ""
        return f"{_number(told['least'])} to {_number(told['most'])}{mean}"
    if "sizes" in told:
        return ", ".join(told["sizes"])
    return ""


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        shown = ", ".join(_cell(v) for v in value[:6])
        return f"[{shown}{', …' if len(value) > 6 else ''}] {len(value)}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return str(value)
