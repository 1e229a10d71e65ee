# SPDX-License-Identifier: Apache-2.0
"""Times as seven numbers: when, and where on the circles of the day, the week and the year."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import nulls, numbers

DAY = 86_400_000_000
"""In microseconds."""
WEEK = 7 * DAY
_MONDAY = 4 * DAY
"""1970-01-05."""


def circles(times: pa.Array, center: float, scale: float) -> pa.Array:
    """float32[7]: (time - center) / scale, then sine and cosine of day, week and year.

    All zero where there is no time.
    """
    instants = numbers(times).astype(np.int64)
    phases = np.stack(
        [
            (instants % DAY) / DAY,
            ((instants - _MONDAY) % WEEK) / WEEK,
            _of_year(instants),
        ],
        axis=1,
    )
    found = np.empty((len(instants), 7), np.float32)
    found[:, 0] = (instants - center) / scale
    found[:, 1::2] = np.sin(2 * np.pi * phases)
    found[:, 2::2] = np.cos(2 * np.pi * phases)
    found[nulls(times)] = 0.0
    return pa.FixedSizeListArray.from_arrays(pa.array(found.reshape(-1)), 7)


def _of_year(instants: NDArray[np.int64]) -> NDArray[np.float64]:
    """How much of its year has passed; years are of different lengths."""
    years = instants.view("datetime64[us]").astype("datetime64[Y]")
    start = years.astype("datetime64[us]").astype(np.int64)
    end = (years + 1).astype("datetime64[us]").astype(np.int64)
    return (instants - start) / (end - start)
