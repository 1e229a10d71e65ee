# SPDX-License-Identifier: Apache-2.0
"""What is written is written to this machine, or to a file system that it has mounted."""

import re
from pathlib import Path

from manyhands.values.errors import RequestError


def local_folder(to: str | Path, what: str, option: str = "--to") -> Path:
    """Where `what` is to be written. A URL is refused: as a path it is a folder `s3:` here."""
    if (found := re.match(r"([A-Za-z][\w.+-]+):{1,2}/", str(to))) is None:
        return Path(to)
    raise RequestError(
        f"{option} names a place behind {found[1]}://, and {what} can be written to folders only. "
        "Give a folder, and copy it there afterwards with the tools of that storage, or mount it."
    )
