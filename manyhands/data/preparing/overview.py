# SPDX-License-Identifier: Apache-2.0
"""Looking at a prepared folder: what it holds, a few records of it, and whether it is whole."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from manyhands.data.columns.schema import MANIFEST
from manyhands.data.encoding.encoders import Encoders, sizes
from manyhands.data.encoding.fitted_encoders import DroppedColumn, Fitted
from manyhands.data.fetching.choose_transfer import shard_file
from manyhands.data.fetching.transfer import damage_of
from manyhands.data.preparing.lineage import hints
from manyhands.data.shards.manifest import Manifest, read_manifest
from manyhands.data.shards.prepared_url import FolderOrUrl
from manyhands.data.shards.shard_file import check_blocks
from manyhands.data.shards.shard_formats import read_table
from manyhands.data.splitting.leakage import LeakageReport
from manyhands.values.errors import DataError
from manyhands.values.wrapping import WIDTH, wrapped


def overview(folder: FolderOrUrl) -> dict[str, Any]:
    """What programs want to know: schema, and rows, bytes and labels of each split."""
    manifest = read_manifest(folder)
    splits = {
        name: {
            "rows": split.rows,
            "bytes": split.nbytes,
            "shards": len(split.shards),
            "labels": split.labels,
        }
        for name, split in manifest.splits.items()
    }
    told: dict[str, Any] = {
        "folder": str(folder),
        "format": manifest.format,
        "seed": manifest.seed,
        "rows": sum(split.rows for split in manifest.splits.values()),
        "bytes": sum(split.nbytes for split in manifest.splits.values()),
        "records": manifest.lineage.get("records"),
        "skipped": manifest.lineage.get("skipped"),
        "sample": manifest.lineage.get("sample"),
        "balance": manifest.lineage.get("balance"),
        "unseen": manifest.lineage.get("unseen"),
        "notes": [*manifest.lineage.get("notes", ()), *_hints(manifest)],
        "split": manifest.split,
        "leakage": manifest.leakage,
        "schema": msgspec.to_builtins(manifest.schema),
        "raw": msgspec.to_builtins(manifest.raw),
        "sizes": sizes(Encoders.load(manifest.encoders).fitted),
        "statistics": manifest.statistics,
        "files": manifest.lineage.get("files"),
        "splits": splits,
    }
    if manifest.folds:
        told["folds"] = [overview(folder / f"fold-{k}") for k in range(manifest.folds)]
    return told


def verified(folder: FolderOrUrl, *, quiet: bool = False) -> list[str]:
    """Every damage in the folder, as sentences."""
    manifest = read_manifest(folder)
    found: list[str] = []
    if manifest.folds:
        for k in range(manifest.folds):
            found += verified(folder / f"fold-{k}", quiet=quiet)
        return found
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    for shard in track(shards, "checking", console=console, disable=hidden):
        if isinstance(folder, Path):
            damages = check_blocks(folder / shard.file, shard)
        else:
            damages = damage_of(folder.url, shard)
        found += map(str, damages)
    known = {shard.file for shard in shards}
    for path in sorted(folder.iterdir()) if isinstance(folder, Path) else ():
        if path.suffix in (".arrow", ".parquet", ".tfrecord") and path.name not in known:
            found.append(f"{path} is not in {MANIFEST}: it is read by nobody")
    return found


# ---- for people


def show(
    folder: FolderOrUrl, *, rows: int = 3, split: str | None = None, notes: bool = True
) -> None:
    """`notes`: whether those that were printed while it was prepared are printed too."""
    manifest, console = read_manifest(folder), Console(width=WIDTH, highlight=False)
    if manifest.folds:
        _say(console, f"{folder}  {manifest.folds} folds of {_rows_in(manifest)} records", folder)
        console.print(_report(manifest))
        for hint in _hints(read_manifest(folder / "fold-0")):
            _say(console, hint)
        _say(console, f"Look at one: manyhands data {folder}/fold-0")
        return
    if split is not None and split not in manifest.splits:
        raise DataError(f"there is no split '{split}'; there are {', '.join(manifest.splits)}.")
    total = sum(s.rows for s in manifest.splits.values())
    nbytes = sum(s.nbytes for s in manifest.splits.values())
    told = (
        f"{folder}  {manifest.format}, {total:,} records, {_size(nbytes)}, "
        f"split {manifest.split}, seed {manifest.seed}"
    )
    _say(console, told, folder)
    if skipped := manifest.lineage.get("skipped"):
        _say(console, f"{skipped:,} of {_rows_in(manifest)} records were left out: skipped.jsonl")
    for note in (*(manifest.lineage.get("notes", ()) if notes else ()), *_hints(manifest)):
        _say(console, note)
    console.print(_splits(manifest))
    console.print(_report(manifest))
    console.print(_columns(manifest))
    if rows:
        name = split or next(iter(manifest.splits))
        console.print(f"\nfirst records of {name}, as they are read:")
        console.print(_records(folder, manifest, name, rows))


def _say(console: Console, text: str, title: FolderOrUrl | None = None) -> None:
    """Broken between words; Rich would break long names of files, and read [ ] as its own."""
    shown = Text(wrapped(text))
    if title is not None:
        shown.stylize("bold", 0, len(str(title)))
    console.print(shown, soft_wrap=True)


def _hints(manifest: Manifest) -> list[str]:
    return hints(Encoders.load(manifest.encoders).fitted, manifest.lineage)


def _rows_in(manifest: Manifest) -> str:
    return f"{manifest.lineage.get('records', 0):,}"


def _splits(manifest: Manifest) -> Table:
    table = Table("split", box=None, pad_edge=False, header_style="bold")
    for title in ("records", "share", "size", "shards"):
        table.add_column(title, justify="right")
    total = max(1, sum(s.rows for s in manifest.splits.values()))
    for name, split in manifest.splits.items():
        share = f"{split.rows / total:.1%}"
        shards = str(len(split.shards))
        table.add_row(name, f"{split.rows:,}", share, _size(split.nbytes), shards)
    return table


def _report(manifest: Manifest) -> LeakageReport:
    labels = dict.fromkeys(label for s in manifest.splits.values() for label in s.labels)
    balance = {
        label: tuple(s.labels.get(label, 0) for s in manifest.splits.values()) for label in labels
    }
    return LeakageReport(tuple(manifest.splits), **manifest.leakage, balance=balance)


def _columns(manifest: Manifest) -> Table:
    fitted = Encoders.load(manifest.encoders).fitted
    indices = sizes(fitted)
    encoded = {column.name: column for column in manifest.schema}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("column", "role", "raw", "encoded", "missing", "values"):
        table.add_column(title, overflow="ellipsis", no_wrap=True, max_width=30)
    table.columns[1].min_width, table.columns[-1].max_width = 7, 36
    for name, fit in fitted.items():
        told = manifest.statistics.get(name, {})
        kind = encoded[name].type if name in encoded else "-"
        how = "left out" if isinstance(fit, DroppedColumn) else f"{_word(fit)} {kind}"
        if name in indices:
            how += f" < {indices[name]:,}"
        missing = told.get("missing", 0)
        cells = (fit.role, fit.type, how, f"{missing:,}" if missing else "", _values(told))
        table.add_row(Text(name), *map(Text, cells))
    return table


def _word(fit: Fitted) -> str:
    """What kind of encoder it is, as manifests call it."""
    return str(fit.__struct_config__.tag)


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


def _records(folder: FolderOrUrl, manifest: Manifest, split: str, rows: int) -> Table:
    """One line for each column: records are often wider than a terminal."""
    found: list[dict[str, Any]] = []
    for shard in manifest.splits[split].shards:
        if len(found) < rows:
            with shard_file(folder, shard) as path:
                table = read_table(path, manifest.schema)
                found += table.slice(0, rows - len(found)).to_pylist()
    table = Table("column", box=None, pad_edge=False, header_style="bold")
    for k in range(len(found)):
        table.add_column(f"record {k + 1}", overflow="ellipsis", no_wrap=True, max_width=24)
    for column in manifest.schema:
        table.add_row(column.name, *(Text(_cell(row.get(column.name))) for row in found))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        shown = ", ".join(_cell(v) for v in value[:6])
        return f"[{shown}{', …' if len(value) > 6 else ''}] {len(value)}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return str(value)


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
