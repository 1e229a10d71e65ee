# SPDX-License-Identifier: Apache-2.0
"""manyhands as a contestant. Run as: ours.py NAME make|read|csv FOLDER WORK; see peers.py."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from peers import BATCH, Convert, Epoch, main

import manyhands as mh
from manyhands.accounting.deal_micro_batches import steps_per_epoch
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.data.reading.shard_records import ShardRecords as Records


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
        records = Records(mh.prepared(self.folder(folder, work)))

        feed = MicroBatchFeed(
            records, seed=0, batch=BATCH, micro_batch=BATCH, seeder=lambda *key: None
        )
        steps = steps_per_epoch(len(records), BATCH)

        def epoch(number: int) -> Iterator[int]:
            for step in range(number * steps, (number + 1) * steps):
                cut = feed.cut(step)
                for part in feed.micro_batches(cut, range(len(cut.sizes))):
                    yield part.records

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
