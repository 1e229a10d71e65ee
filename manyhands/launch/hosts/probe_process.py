# SPDX-License-Identifier: Apache-2.0
"""A process of this host that looks around for `manyhands doctor`: asked and answering in lines.

A process of its own, because it imports torch (which may be what is wrong here) and because it
waits for others, which whoever started it must not. It ends when nobody asks any more.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import IO

PROBING = "manyhands.stories.doctor.probe"
"""By name: this module knows no story."""


class Probe:
    def __init__(self) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self.process = subprocess.Popen(
            [sys.executable, "-m", PROBING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._asking, self._answers = self.process.stdin, self.process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._begun = b""
        self.ended: str | None = None
        """Its last words, when it has ended though it was still needed."""

    def tell(self, line: bytes) -> None:
        with suppress(BrokenPipeError):
            self._asking.write(line + b"\n")
            self._asking.flush()

    def lines(self) -> list[bytes]:
        """What it has answered since; never blocks. `fileno` is readable before."""
        with suppress(BlockingIOError):
            while self.ended is None:
                data = os.read(self._answers.fileno(), 1 << 16)
                if not data:
                    self.ended = self._last_words()
                self._begun += data
        *whole, self._begun = self._begun.split(b"\n")
        return whole

    def fileno(self) -> int:
        return self._answers.fileno()

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._asking.close()
        self.process.kill()
        self.process.wait()
        self._answers.close()
        self.errors.close()

    def _last_words(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        return said[-1][-500:] if said else f"exit code {code}"
