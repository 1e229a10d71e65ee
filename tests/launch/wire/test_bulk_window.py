"""How much of something long is on its way at a time, on links of all kinds."""

import pytest

from manyhands.launch.wire.bulk_window import LEAST, MOST, QUEUE_S, BulkWindow, next_window


def sent(bytes_per_s: float, round_trip_s: float, pieces: int, piece: int) -> tuple[float, float]:
    """How long a file took in pieces over such a link, and how long at most a ping had to wait that
    came when half of the pieces were through."""
    window, now, free, asked, worst = BulkWindow(), 0.0, 0.0, 0, 0.0
    arrivals: list[float] = []
    for number in range(pieces):
        while window.open and asked < pieces:
            window.asked(now)
            free = max(free, now + round_trip_s / 2) + piece / bytes_per_s
            arrivals.append(free + round_trip_s / 2)
            asked += 1
        if number >= pieces // 2:
            worst = max(worst, free - (now + round_trip_s / 2))
        now = arrivals[number]
        window.came(now)
    return now, worst


@pytest.mark.parametrize("bytes_per_s", [50e3, 250e3, 1e6, 10e6, 125e6, 1e9])
@pytest.mark.parametrize("round_trip_s", [0.0001, 0.02, 0.3])
def test_a_ping_need_not_wait_and_the_link_is_used(bytes_per_s: float, round_trip_s: float) -> None:
    piece, pieces = 64 << 10, 4000
    took_s, ping_s = sent(bytes_per_s, round_trip_s, pieces, piece)
    one_s = piece / bytes_per_s
    assert ping_s < 2 * QUEUE_S + 8 * one_s
    ideal_s = max(pieces * one_s, pieces / MOST * round_trip_s) + round_trip_s
    assert took_s < 2 * ideal_s + 1


def test_what_stood_in_a_queue_makes_it_smaller() -> None:
    assert next_window(8, took_s=1.0, least_s=0.1) == 4
    assert next_window(8, took_s=0.2, least_s=0.1) == 9
    assert next_window(8, took_s=2.0, least_s=1.9) == 9, "a long way is no queue"
    assert next_window(LEAST, took_s=9.0, least_s=0.1) == LEAST
    assert next_window(MOST, took_s=0.1, least_s=0.1) == MOST
