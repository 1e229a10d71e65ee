"""Words in shared memory are for processors that keep stores in order."""

import platform
from typing import Any

import numpy as np
import pytest

from manyhands.training.collective.sequence_words import STRIDE, SequenceWords
from manyhands.values.errors import RequestError


def test_a_processor_that_may_reorder_stores_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody: Any = None
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(RequestError, match=r"this is aarch64\. Use --set train\.collective=gloo"):
        SequenceWords(np.zeros(2 * STRIDE, np.uint32), 0, 2, spin=False, patience=nobody)
