# SPDX-License-Identifier: Apache-2.0
"""What numpy arrays hold, by name. Imports no Arrow."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]
ByteArray = NDArray[np.uint8]
Flags = NDArray[np.bool_]
"""True or False of each row."""
Positions = NDArray[np.int64]
"""Places in something: records of a data set, rows of a table, bytes of a file."""
