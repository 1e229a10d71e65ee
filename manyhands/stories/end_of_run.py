# SPDX-License-Identifier: Apache-2.0
"""A command of the user's after a run, whatever ended it.

It is told by variables of its environment how the run ended. Whether it works does not change that:
a failure of it is said, and nothing else.
"""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manyhands.monitor.run_status import status
from manyhands.values.environment import environment_with
from manyhands.values.errors import Interrupted, ManyhandsError, RequestError
from manyhands.values.run_folder import RunDir

HOW = {0: "finished", 2: "refused", 130: "stopped"}
"""By exit code; any other is a failure."""


@dataclass(slots=True)
class EndOfRun:
    """What is to be done then; and the run's folder, as soon as it has one."""

    command: str | None
    run: Path | None = None

    def carry_out(self, code: int) -> None:
        """Its own output goes to stderr: what we print on stdout may be read by a program."""
        if self.command is None:
            return
        command, self.command = self.command, None  # once
        try:
            ended = subprocess.run(
                command,
                shell=True,
                env=environment_with(self.variables(code)),
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                check=False,
            )
            problem = f"ended with exit code {ended.returncode}" if ended.returncode else ""
        except (OSError, ValueError) as error:
            problem = f"could not be run: {error}"
        except KeyboardInterrupt:
            problem = "was interrupted"
        if problem:
            said = f"warning: --on-end {problem}: {command} (the run is as it was)"
            print(said, file=sys.stderr)

    def variables(self, code: int) -> dict[str, str]:
        given = {
            "MANYHANDS_STATUS": HOW.get(code, "failed"),
            "MANYHANDS_EXIT_CODE": str(code),
            "MANYHANDS_RUN": "",
        }
        if self.run is None or not (run := RunDir(self.run)).config.exists():
            return given
        now = status(run)
        scores = msgspec.json.encode(now.get("scores", {})).decode()
        return given | {
            "MANYHANDS_RUN": str(self.run.absolute()),
            "MANYHANDS_STEP": str(now["step"]),
            "MANYHANDS_SCORES": scores,
            "MANYHANDS_FINGERPRINT": str(now.get("fingerprint", "")),
        }


@contextmanager
def at_the_end(command: str | None) -> Generator[EndOfRun]:
    """For Python, where an exception takes the place of an exit code."""
    end, code = EndOfRun(command), 0
    try:
        yield end
    except BaseException as error:
        code = exit_code(error)
        raise
    finally:
        end.carry_out(code)


def exit_code(error: BaseException) -> int:
    """What a command would end with."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return 130
    if isinstance(error, ManyhandsError):
        return 2 if isinstance(error, RequestError) else 1
    return 1
