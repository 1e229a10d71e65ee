# SPDX-License-Identifier: Apache-2.0
"""Looking at a prepared folder, or one behind a URL: what it holds, and whether it is whole."""

from pathlib import Path
from typing import Any

from manyhands.data.preparing import overview
from manyhands.data.shards.prepared_url import folder_of
from manyhands.monitor.data_pages import checking_bar, show_data, show_records
from manyhands.values.errors import DataError


def show(
    folder: str | Path, *, rows: int = 3, split: str | None = None, notes: bool = True
) -> None:
    """Print it for people, with the first `rows` records of a split."""
    here = folder_of(folder)
    data = overview.summary(here)
    names = [each.name for each in data.splits]
    if split is not None and split not in names and not data.folds:
        raise DataError(f"there is no split '{split}'; there are {', '.join(names)}.")
    show_data(data, notes=notes)
    if rows and not data.folds:
        chosen = split or names[0]
        records = overview.first_records(here, chosen, rows)
        show_records(chosen, data.encoded_columns, records)


def name_of(folder: str | Path) -> str:
    """For people: without secrets."""
    return str(folder_of(folder))


def figures(folder: str | Path) -> dict[str, Any]:
    """For programs."""
    return overview.overview(folder_of(folder))


def damage(folder: str | Path, *, quiet: bool = False) -> list[str]:
    """Every byte is read; what is not as it was written, as sentences."""
    return overview.verified(folder_of(folder), checking_bar(quiet=quiet))
