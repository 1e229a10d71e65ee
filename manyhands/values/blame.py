# SPDX-License-Identifier: Apache-2.0
"""Whose fault an error is: the request's, the machine's, the caller's own code's, or ours.

Whatever ends a driver or a command is told in these words; nobody is left with a bare traceback.
"""

import errno
import traceback
from dataclasses import dataclass

from manyhands.values.errors import CallbackFailed, ManyhandsError, RequestError
from manyhands.values.user_frames import own_frames, user_traceback
from manyhands.values.verdict import explain

FRAMES = 4
"""Of a traceback of our own: so many of the innermost say where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    what: str
    detail: str = ""
    advice: str = ""
    request: bool = False
    """The request was wrong, not the run."""

    def text(self) -> str:
        return "\n".join(part for part in (self.what, self.detail, self.advice) if part)


def blame(error: BaseException) -> Blame:
    """What an error means that nobody has caught."""
    if isinstance(error, CallbackFailed) and error.__cause__ is not None:
        return Blame(
            what=str(error),
            detail=user_traceback(error.__cause__),
            advice="That function is yours: nothing is wrong with the training itself.",
        )
    if isinstance(error, ManyhandsError):
        return Blame(what=str(error), request=isinstance(error, RequestError))
    if own_frames(error):
        return Blame(what=explain(error), detail=user_traceback(error))
    number = getattr(error, "errno", None)  # one of ZeroMQ's has it too
    if isinstance(error, OSError | MemoryError) or number in (errno.EMFILE, errno.ENFILE):
        return Blame(what=explain(error))
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return Blame(
        what=f"this is a bug of manyhands: {explain(error)}",
        detail="\n".join(f"  {f.filename}:{f.lineno} in {f.name}\n    {f.line}" for f in frames),
        advice="Please report it, with these lines.",
    )
