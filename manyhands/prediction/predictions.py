# SPDX-License-Identifier: Apache-2.0
"""What a model said of records: returned by `mh.predict`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, json, parquet


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A row for each record, in their order; bad ones with what is wrong in the column `error`."""

    path: Path | None
    """The file that was written; None: they are in memory."""
    records: int
    bad: int
    """Records without a prediction."""
    examples: list[str] = field(default_factory=list[str])
    """The first of them, and what is wrong with each."""
    scores: Mapping[str, float] | None = None
    """Where they were asked for."""
    made: pa.Table | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.records

    @property
    def table(self) -> pa.Table:
        """All of it, as a table of Arrow."""
        if self.made is not None:
            return self.made
        assert self.path is not None
        match self.path.suffix.lower():
            case ".parquet":
                return parquet.read_table(self.path)
            case ".csv":
                return csv.read_csv(self.path)
            case ".jsonl":
                return json.read_json(self.path)
            case _:
                with pa.memory_map(str(self.path)) as source:
                    return pa.ipc.open_file(source).read_all()

    def to_pandas(self) -> Any:
        """All of it, as a DataFrame."""
        return self.table.to_pandas()
