# SPDX-License-Identifier: Apache-2.0
"""Files of the run for a worker whose host does not see the run's folder: carried by the driver.

Everything goes over the authenticated channel, a piece at a time, and is served by the driver's
`FileServer`. What is read is copied into the host's own scratch folder first.
"""

import hashlib
import shutil
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from manyhands.checkpoint.commit import Buffer, FileRecord, FolderStorage, StepManifest
from manyhands.launch.wire.bulk_window import BulkWindow
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.values.messages import FILE_PIECE_BYTES, Answer, ReadFile, StoreFile
from manyhands.values.run_folder import RunDir


class CarriedStorage:
    """A Storage's `put`, over the line."""

    def __init__(self, line: WorkerChannel) -> None:
        self.line = line

    def put(self, step: int, attempt: int, name: str, chunks: Iterable[Buffer]) -> FileRecord:
        digest, offset = hashlib.sha256(), 0
        waiting, window = deque[int](), BulkWindow()

        def send(data: bytes, last: bool) -> None:
            while not window.open or (last and waiting):
                _check(self.line.answer(waiting.popleft()))
                window.came(time.monotonic())
            window.asked(time.monotonic())
            number = self.line.ask(
                StoreFile(
                    worker=self.line.heartbeat.worker,
                    number=self.line.new_number(),
                    step=step,
                    attempt=attempt,
                    name=name,
                    offset=offset,
                    data=data,
                    last=last,
                )
            )
            waiting.append(number)

        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            digest.update(view)
            while view:
                send(bytes(view[:FILE_PIECE_BYTES]), last=False)
                offset += min(len(view), FILE_PIECE_BYTES)
                view = view[FILE_PIECE_BYTES:]
        send(b"", last=True)
        _check(self.line.answer(waiting.popleft()))
        return FileRecord(offset, digest.hexdigest())


def fetch_step(line: WorkerChannel, run: RunDir, step: int) -> Path:
    """A committed step of the run, copied to this host; its bytes are checked. Every worker has a
    copy of its own, and nothing in it is of another try."""
    mine = RunDir(run.root / f"fetched-{line.heartbeat.worker}")
    shutil.rmtree(mine.root, ignore_errors=True)
    folder = mine.step(step)
    folder.mkdir(parents=True)
    name = folder.name
    fetch(line, f"checkpoints/{name}/manifest.json", folder / "manifest.json")
    storage = FolderStorage(mine)
    manifest: StepManifest = storage.manifest(step)
    for file in manifest.files:
        fetch(line, f"checkpoints/{name}/{file}", folder / file)
        storage.get(step, file)
    return folder


def fetch(line: WorkerChannel, path: str, to: Path) -> None:
    """A file of the run's folder, or (by its whole name) what the run starts from."""
    with to.open("wb") as out:
        while True:
            number = line.ask(
                ReadFile(
                    worker=line.heartbeat.worker,
                    number=line.new_number(),
                    path=path,
                    offset=out.tell(),
                    size=FILE_PIECE_BYTES,
                )
            )
            data = _check(line.answer(number))
            line.heartbeat.progress += 1
            if not data:
                return
            out.write(data)


def _check(answer: Answer) -> bytes:
    if answer.error:
        raise OSError(f"on the driver's host: {answer.error}")
    return answer.data
