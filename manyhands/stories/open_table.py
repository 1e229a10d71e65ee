# SPDX-License-Identifier: Apache-2.0
"""The rows of a table (`mh.Embedding`) that a run has saved, for people."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from manyhands.checkpoint.table_files import read_batches, tables_in
from manyhands.stories.load import committed
from manyhands.values.errors import RunDirError
from manyhands.values.run_folder import open_run


def open_table(run: str | Path, name: str, *, step: int | None = None) -> pa.Table:
    """The rows that a run's table had after its last saved step (or `step`): an Arrow table with
    `id`, `weights` (a list of `dim` numbers) and what its optimizer keeps of each row.

    Files are mapped, not read; `open_table(RUN, "user")["weights"]` of a large table costs no
    memory until it is used.
    """
    folder = open_run(Path(run))
    saved = folder.step(committed(folder, step))
    if name not in (names := tables_in(saved)):
        there = f"there are: {', '.join(names)}" if names else "the run has none"
        raise RunDirError(f"{saved} has no table '{name}'; {there}.")
    batches = list(read_batches(saved, name))
    whole = pa.Table.from_batches(batches)
    rows = np.asarray(whole["seen"]) == 0  # others are not admitted yet
    if not rows.all():
        whole = whole.filter(pa.array(rows))
    return whole.drop_columns(["bucket", "seen"])
