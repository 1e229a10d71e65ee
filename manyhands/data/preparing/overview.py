# SPDX-License-Identifier: Apache-2.0
"""What a prepared folder holds, a few records of it, and whether it is whole: plain values."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from manyhands.data.columns.schema import MANIFEST
from manyhands.data.encoding.encoders import Encoders, sizes
from manyhands.data.encoding.fitted_encoders import Classes, DroppedColumn
from manyhands.data.fetching.choose_transfer import shard_file
from manyhands.data.preparing.lineage import by_class, hints
from manyhands.data.shards.damaged_blocks import check_blocks, check_remote_blocks
from manyhands.data.shards.manifest import Manifest, ShardInfo, read_manifest
from manyhands.data.shards.prepared_url import FolderOrUrl
from manyhands.data.shards.shard_formats import read_table
from manyhands.data.splitting.leakage import LeakageReport
from manyhands.values.data_summary import ColumnSummary, DataSummary, LeakageSummary, SplitSummary


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


def summary(folder: FolderOrUrl) -> DataSummary:
    """What people want to know."""
    manifest = read_manifest(folder)
    fitted_on = read_manifest(folder / "fold-0") if manifest.folds else manifest
    return DataSummary(
        folder=str(folder),
        format=manifest.format,
        split=manifest.split,
        seed=manifest.seed,
        folds=manifest.folds,
        raw_records=manifest.lineage.get("records", 0),
        skipped=manifest.lineage.get("skipped") or 0,
        notes=tuple(manifest.lineage.get("notes", ())),
        hints=tuple(_hints(fitted_on)),
        leakage=_leakage(manifest),
        splits=tuple(
            SplitSummary(name, split.rows, split.nbytes, len(split.shards))
            for name, split in manifest.splits.items()
        ),
        columns=tuple(_columns(manifest)),
        encoded_columns=tuple(column.name for column in manifest.schema),
    )


def _hints(manifest: Manifest) -> list[str]:
    return hints(Encoders.load(manifest.encoders).fitted, manifest.lineage)


def _leakage(manifest: Manifest) -> LeakageSummary:
    splits = manifest.splits.values()
    labels = dict.fromkeys(label for split in splits for label in split.labels)
    counts = {label: tuple(s.labels.get(label, 0) for s in splits) for label in labels}
    report = LeakageReport(tuple(manifest.splits), **manifest.leakage, balance=counts)
    return LeakageSummary(report.splits, report.counts, report.balance, report.advice)


def _columns(manifest: Manifest) -> Iterator[ColumnSummary]:
    fitted = Encoders.load(manifest.encoders).fitted
    indices = sizes(fitted)
    types = {column.name: column.type for column in manifest.schema}
    for name, fit in fitted.items():
        word = fit.__struct_config__.tag  # what manifests call this kind of encoder
        how = "left out" if isinstance(fit, DroppedColumn) else f"{word} {types.get(name, '-')}"
        if name in indices:
            how += f" < {indices[name]:,}"
        yield ColumnSummary(name, fit.role, fit.type, how, manifest.statistics.get(name, {}))


def first_records(folder: FolderOrUrl, split: str, count: int) -> Iterator[dict[str, Any]]:
    """As they are read: encoded, in the order of the shards."""
    manifest = read_manifest(folder)
    for shard in manifest.splits[split].shards:
        if count > 0:
            with shard_file(folder, shard) as path:
                rows = read_table(path, manifest.schema).slice(0, count).to_pylist()
            yield from rows
            count -= len(rows)


def _miscounted(folder: FolderOrUrl, manifest: Manifest) -> Iterator[str]:
    """Counts in the manifest that are not those of the shards, which are whole."""
    fitted = Encoders.load(manifest.encoders).fitted
    label = next((n for n, f in fitted.items() if isinstance(f, Classes) and f.role == "label"), "")
    for name, split in manifest.splits.items():
        rows, labels = 0, Counter[str]()
        for shard in split.shards:
            with shard_file(folder, shard) as path:
                table = read_table(path, manifest.schema)
            rows += table.num_rows
            if table.num_rows != shard.rows:
                yield (
                    f"{shard.file} has {table.num_rows:,} records; {MANIFEST} says {shard.rows:,}"
                )
            if label in table.column_names:
                labels.update(by_class(fitted[label], table.column(label).to_numpy()))
        if rows != split.rows:
            yield f"split '{name}' has {rows:,} records; {MANIFEST} says {split.rows:,}"
        nbytes = sum(shard.nbytes for shard in split.shards)
        if nbytes != split.nbytes:
            yield f"split '{name}' has {nbytes:,} bytes; {MANIFEST} says {split.nbytes:,}"
        if split.labels and split.labels != dict(labels):
            yield f"split '{name}' has other counts of labels than {MANIFEST} says: {dict(labels)}"


def _as_they_come(shards: Sequence[ShardInfo]) -> Iterable[ShardInfo]:
    return shards


def verified(
    folder: FolderOrUrl,
    watched: Callable[[Sequence[ShardInfo]], Iterable[ShardInfo]] = _as_they_come,
) -> list[str]:
    """Every damage in the folder, as sentences. `watched` may show how far it is."""
    manifest = read_manifest(folder)
    found: list[str] = []
    if manifest.folds:
        for k in range(manifest.folds):
            found += verified(folder / f"fold-{k}", watched)
        return found
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    for shard in watched(shards):
        if isinstance(folder, Path):
            damages = check_blocks(folder / shard.file, shard)
        else:
            damages = check_remote_blocks(folder.url, shard)
        found += map(str, damages)
    if not found:
        found += _miscounted(folder, manifest)
    known = {shard.file for shard in shards}
    for path in sorted(folder.iterdir()) if isinstance(folder, Path) else ():
        if path.suffix in (".arrow", ".parquet", ".tfrecord") and path.name not in known:
            found.append(f"{path} is not in {MANIFEST}: it is read by nobody")
    return found
