# SPDX-License-Identifier: Apache-2.0
"""manyhands as a contestant. Run as: ours.py NAME make|read|csv FOLDER WORK; see peers.py."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from peers import BATCH, Convert, Epoch, main

import manyhands as mh
from manyhands.data.order import Visit
from manyhands.data.prepared import open_prepared


class Prepared:
    """A folder that `manyhands prepare` made: exact order, checksums on."""

    format = "arrow"

    def folder(self, folder: Path, work: str) -> Path:
        return folder / f"{work}.{self.format}-prepared"

    def make(self, folder: Path, work: str) -> None:
        raw = {"*": "raw"}
        source, to = folder / f"{work}.arrow", self.folder(folder, work)
        mh.prepare([source], to, split="none", encode=raw, format=self.format, workers=1)

    def read(self, folder: Path, work: str) -> Epoch:
        torch.set_num_threads(1)  # as in a worker
        records = open_prepared(self.folder(folder, work), "train")

        def epoch(number: int) -> Iterator[int]:
            visit = Visit(0, number)
            order = records.order(0, number)
            for start in range(0, len(records), BATCH):
                ids = order[range(start, min(start + BATCH, len(records)))]
                yield len(records.batch(ids, visit)["_id"])

        return epoch

    def csv(self, folder: Path) -> Convert:
        def convert() -> int:
            to = folder / "records-ours"
            shutil.rmtree(to, ignore_errors=True)
            made = mh.prepare(
                [folder / "records.csv"], to, split="none", encode={"*": "raw"}, format="tfrecord"
            )
            return made.splits["train"].rows

        return convert


class PreparedTfrecord(Prepared):
    """The same, in TFRecords."""

    format = "tfrecord"


if __name__ == "__main__":
    main({"manyhands": Prepared, "manyhands-tfrecord": PreparedTfrecord})
