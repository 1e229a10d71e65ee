# SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes, as people write and read them."""

import re

from manyhands.values.errors import DataError

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{rest}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for rest, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def parse_bytes(size: str | int) -> int:
    """A number of bytes: `512MB` (10**6), `1GiB` or `1G` (2**30), or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(size).strip().lower())
    if match is None or match[2] not in _UNITS:
        number = 0
    elif "." in match[1]:
        number = int(float(match[1]) * _UNITS[match[2]])
    else:
        number = int(match[1]) * _UNITS[match[2]]
    if number < 1:
        raise DataError(f"'{size}' is not a size; write 512MB, 1GiB, or a number of bytes.")
    return number


def shown_bytes(nbytes: int) -> str:
    """`31.8 kB`: in powers of 1000."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def megabytes(nbytes: int) -> str:
    """Rounded up, in a form that `parse_bytes` takes."""
    return f"{-(-nbytes // 10**6)}MB"
