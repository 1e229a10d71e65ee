# SPDX-License-Identifier: Apache-2.0
"""What every benchmark ends with: rows of (contestant, work, metric, value, ratio).

Values are medians over rounds; a ratio is the value over the reference's of the same work and
metric. Rows are printed as a table of at most 100 columns, with what is wanted of us beside it,
and written as JSON for whoever wants to compare runs.
"""

import argparse
import json
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

console = Console(width=100, highlight=False)

Samples = dict[tuple[str, str, str], list[float]]
"""(work, contestant, metric) → one value per round."""

Reference = Callable[[str, Mapping[str, float]], float | None]
"""(metric, contestant → value) → the value that ratios are taken to; None when it did not run."""


@dataclass(frozen=True, slots=True)
class Row:
    contestant: str
    work: str
    metric: str
    value: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    title: str
    digits: int = 0

    def show(self, value: float) -> str:
        return f"{value:,.{max(self.digits, 1 if value < 100 else 0)}f}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A limit on the ratio, or on the value itself."""

    sign: str
    limit: float
    of_ratio: bool = True

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:.2f}{'×' if self.of_ratio else ''}"

    def is_met_by(self, row: Row) -> bool | None:
        number = row.ratio if self.of_ratio else row.value
        compare = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}[self.sign]
        return None if number is None else compare(number, self.limit)


Targets = Mapping[tuple[str, str], Wanted]
"""(work, metric) → what is wanted of us there."""


def arguments(
    description: str | None, *, rounds: int = 3, quick_rounds: int = 1
) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"{rounds}, quick {quick_rounds}")
    parser.add_argument("--quick", action="store_true", help="to see that it works; noisy numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.set_defaults(full_rounds=rounds, quick_rounds=quick_rounds)
    return parser


def rounds_of(asked: argparse.Namespace) -> int:
    return asked.rounds or (asked.quick_rounds if asked.quick else asked.full_rounds)


def summarise(samples: Samples, reference: Reference) -> list[Row]:
    medians = {key: statistics.median(values) for key, values in samples.items()}
    rows: list[Row] = []
    for (work, contestant, metric), value in medians.items():
        peers = {c: v for (w, c, m), v in medians.items() if (w, m) == (work, metric)}
        against = reference(metric, peers)
        rows.append(Row(contestant, work, metric, value, value / against if against else None))
    return rows


def table(
    rows: Sequence[Row], metrics: Sequence[Metric], targets: Targets, *, ours: str = "manyhands"
) -> Table:
    """A line per work and contestant; a column pair per metric. Targets judge `ours` only."""
    shown = Table(box=HORIZONTALS)
    shown.add_column("work")
    shown.add_column("contestant")
    for metric in metrics:
        shown.add_column(metric.title, justify="right")
        shown.add_column("ratio", justify="right")
    by_place = {(row.work, row.contestant, row.metric): row for row in rows}
    for work in dict.fromkeys(row.work for row in rows):
        contestants = dict.fromkeys(row.contestant for row in rows if row.work == work)
        for k, contestant in enumerate(contestants):
            cells: list[str] = []
            for metric in metrics:
                row = by_place.get((work, contestant, metric.name))
                target = targets.get((work, metric.name)) if contestant == ours else None
                cells += _cells(row, metric, target)
            shown.add_row("" if k else work, contestant, *cells)
        wanted = [targets.get((work, metric.name)) for metric in metrics]
        if any(wanted):
            limits = [cell for target in wanted for cell in _limit_cells(target)]
            shown.add_row("", f"[dim]{ours}, wanted[/]", *limits)
        shown.add_section()
    return shown


def _cells(row: Row | None, metric: Metric, target: Wanted | None) -> list[str]:
    if row is None:
        return ["-", "-"]
    value = metric.show(row.value)
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}×"
    met = target.is_met_by(row) if target else None
    if target and met is not None:
        judged = f"[{'green' if met else 'red'}]{'✓' if met else '✗'} {{}}[/]"
        if target.of_ratio:
            return [value, judged.format(ratio)]
        return [judged.format(value), ratio]
    return [value, ratio]


def _limit_cells(target: Wanted | None) -> list[str]:
    if target is None:
        return ["", ""]
    cell = f"[dim]{target}[/]"
    return ["", cell] if target.of_ratio else [cell, ""]


def report(
    rows: Sequence[Row],
    metrics: Sequence[Metric],
    targets: Targets,
    file: Path | None,
    *,
    ours: str = "manyhands",
) -> None:
    console.print(table(rows, metrics, targets, ours=ours))
    if file is not None:
        file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
