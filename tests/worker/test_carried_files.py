"""Files of a run for hosts that do not see its folder: what arrives is what was sent."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.checkpoint.commit import FileRecord, FolderStorage, StepManifest
from manyhands.driver.run_file_server import FileServer
from manyhands.values.messages import FILE_PIECE_BYTES as PIECE_BYTES
from manyhands.values.messages import Answer, ReadFile, StoreFile
from manyhands.values.run_folder import RunDir
from manyhands.worker.carried_files import CarriedStorage, fetch_step


class Line:
    """A worker's line, with the driver at its other end."""

    def __init__(self, files: FileServer, worker: int) -> None:
        self.files, self.heartbeat = files, SimpleNamespace(worker=worker, progress=0)
        self.numbers, self.answers = itertools.count(1), dict[int, Answer]()

    def new_number(self) -> int:
        return next(self.numbers)

    def ask(self, message: StoreFile | ReadFile) -> int:
        self.answers[message.number] = self.files.serve(message)
        return message.number

    def answer(self, number: int) -> Answer:
        return self.answers.pop(number)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def save(run: RunDir, step: int, attempt: int, contents: dict[str, bytes]) -> None:
    """From afar."""
    line: Any = Line(FileServer(run, None), attempt)
    carried = CarriedStorage(line)
    listed: dict[str, FileRecord] = {}
    for name, data in contents.items():
        listed[name] = carried.put(step, attempt, name, [data[:100], data[100:]])
    FolderStorage(run).commit(StepManifest(step, listed, attempt))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 20 * PIECE_BYTES + 7])
def test_what_is_saved_from_afar_comes_back_whole(run: RunDir, tmp_path: Path, size: int) -> None:
    data = bytes(itertools.islice(itertools.cycle(range(251)), size))
    save(run, 5, 1, {"model.safetensors": data})
    assert (run.step(5) / "model.safetensors").read_bytes() == data
    line: Any = Line(FileServer(run, None), 0)
    found = fetch_step(line, RunDir(tmp_path / "scratch"), 5)
    assert (found / "model.safetensors").read_bytes() == data


def test_every_worker_has_a_copy_of_its_own(run: RunDir, tmp_path: Path) -> None:
    """Workers of a host fetch at the same time, and one may be reading what another writes."""
    save(run, 5, 1, {"model.safetensors": b"weights"})
    scratch = RunDir(tmp_path / "scratch")
    lines: list[Any] = [Line(FileServer(run, None), worker) for worker in range(2)]
    assert fetch_step(lines[0], scratch, 5) != fetch_step(lines[1], scratch, 5)


def test_nothing_is_left_of_an_older_copy(run: RunDir, tmp_path: Path) -> None:
    """The same step can be saved again, by others; all optimizer files in a folder are read."""
    line: Any = Line(FileServer(run, None), 0)
    scratch = RunDir(tmp_path / "scratch")
    save(run, 5, 1, {"optimizer-00.safetensors": b"a", "optimizer-01.safetensors": b"b"})
    fetch_step(line, scratch, 5)
    save(run, 5, 2, {"optimizer-07.safetensors": b"c"})
    assert names(fetch_step(line, scratch, 5)) == {"optimizer-07.safetensors", "manifest.json"}


def test_only_checkpoints_are_given_away(run: RunDir) -> None:
    line: Any = Line(FileServer(run, None), 0)
    (run.root / "join.token").write_text("secret")
    for path in ("join.token", "checkpoints/../join.token", "/etc/passwd"):
        asked = ReadFile(worker=0, number=line.new_number(), path=path, offset=0, size=9)
        assert "is not a checkpoint" in line.answer(line.ask(asked)).error
    for name in ("../evil", ".hidden", "a/b"):
        stored = StoreFile(
            worker=0,
            number=line.new_number(),
            step=5,
            attempt=1,
            name=name,
            offset=0,
            data=b"",
            last=True,
        )
        assert line.answer(line.ask(stored)).error
