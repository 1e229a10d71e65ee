# SPDX-License-Identifier: Apache-2.0
"""Files of the run, for workers whose hosts do not see its folder.

What they save is written where they themselves would have written it. Only checkpoints of this run,
and the file that it starts from, can be read.
"""

from pathlib import Path

from manyhands.checkpoint.commit import FolderStorage
from manyhands.values.errors import ManyhandsError, RequestError
from manyhands.values.messages import FILE_PIECE_BYTES, Answer, ReadFile, StoreFile
from manyhands.values.run_folder import RunDir


class FileServer:
    def __init__(self, run: RunDir, start_from: str | None) -> None:
        self.run, self.storage, self.start_from = run, FolderStorage(run), start_from

    def serve(self, message: StoreFile | ReadFile) -> Answer:
        try:
            if isinstance(message, ReadFile):
                return Answer(number=message.number, data=self._read(message))
            self.storage.write_at(
                message.step, message.attempt, message.name, message.offset, message.data
            )
            if message.last:
                self.storage.settle(message.step, message.attempt, message.name)
            return Answer(number=message.number)
        except (OSError, ManyhandsError, ValueError, OverflowError) as error:
            return Answer(number=message.number, error=str(error))

    def _read(self, message: ReadFile) -> bytes:
        if self.start_from is not None and message.path == self.start_from:
            path = Path(self.start_from)
        else:
            root = self.run.checkpoints.resolve()
            path = (self.run.root / message.path).resolve()  # ValueError: it has a NUL in it
            if not path.is_relative_to(root):
                raise RequestError(f"{message.path} is not a checkpoint of this run")
        with path.open("rb") as file:
            file.seek(message.offset)
            return file.read(min(message.size, FILE_PIECE_BYTES))
