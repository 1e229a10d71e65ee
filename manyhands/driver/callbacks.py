# SPDX-License-Identifier: Apache-2.0
"""Functions of the caller's that the driver calls: what they raise is theirs, and said so."""

from collections.abc import Callable
from typing import TypeVar

from manyhands.values.errors import CallbackFailed

E = TypeVar("E")


def call_back(name: str, function: Callable[[E], object] | None, event: E) -> None:
    try:
        if function is not None:
            function(event)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() is an error here as well
        text = f": {error}" if str(error) else ""
        raise CallbackFailed(f"{name} raised {type(error).__name__}{text}") from error
