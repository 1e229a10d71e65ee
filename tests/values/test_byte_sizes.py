"""Numbers of bytes, as people write and read them."""

import pytest

from manyhands.values.byte_sizes import megabytes, parse_bytes, shown_bytes
from manyhands.values.errors import DataError


@pytest.mark.parametrize(
    ("size", "number"),
    [("512MB", 512 * 10**6), ("1GiB", 1 << 30), ("2g", 2 << 30), ("1.5 KiB", 1536), (77, 77)],
)
def test_sizes(size: str | int, number: int) -> None:
    assert parse_bytes(size) == number


@pytest.mark.parametrize("size", ["", "much", "1XB", "-5", "0", 0, "1.2.3MB"])
def test_what_is_not_a_size_is_refused(size: str | int) -> None:
    with pytest.raises(DataError, match="is not a size"):
        parse_bytes(size)


def test_a_size_is_written_as_it_is_read() -> None:
    assert megabytes(1) == "1MB" and megabytes(10**6) == "1MB"
    assert megabytes(2 * (128 << 20)) == "269MB"


def test_sizes_are_shown_in_powers_of_1000() -> None:
    sizes = (0, 999, 1000, 31_849, 5 * 10**9, 2 * 10**15)
    assert [shown_bytes(n) for n in sizes] == [
        *("0 B", "999 B", "1.0 kB", "31.8 kB", "5.0 GB", "2000.0 TB")
    ]
