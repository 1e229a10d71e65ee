"""Files in /dev/shm, and whose they are: tests that run side by side see each other's."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
MARK = "MANYHANDS_TESTS"
"""In the environment of everything that a process of tests starts: the process's number."""
GRACE_S = 5.0


def there() -> set[Path]:
    return set(SHARED.iterdir())


def left_since(before: set[Path]) -> list[str]:
    """Names that have come since, that nobody removes, and that nobody else is using.

    Nobody's counts as ours: who made it has ended, and no one else would ever remove it.
    """
    deadline = time.monotonic() + GRACE_S
    while new := there() - before:
        mine = new - used_by_others(new)
        if not mine or time.monotonic() > deadline:
            return sorted(path.name for path in mine)
        time.sleep(0.05)
    return []


def used_by_others(paths: set[Path]) -> set[Path]:
    """Those that processes hold which were not started from here."""
    ours, wanted = family(), {str(path): path for path in paths}
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in ours and not marked(process):
            found |= {wanted[name] for name in held(process) if name in wanted}
    return found


def family() -> set[int]:
    """This process and all that descend from it."""
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (process / "stat").read_text()
            parents[int(process.name)] = int(stat.rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return ours


def marked(process: Path) -> bool:
    """Started from here, though whoever started it may have ended."""
    with suppress(OSError):
        return f"{MARK}={os.getpid()}".encode() in (process / "environ").read_bytes().split(b"\0")
    return False


def held(process: Path) -> Iterator[str]:
    """What a process has open or mapped."""
    with suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            yield line.partition(str(SHARED))[1] + line.partition(str(SHARED))[2]
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(link)
