"""One host agent for these tests, which has imported what their tasks import."""

from collections.abc import Iterator

import pytest

from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import create_segments


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    local = Local("tests.support.warm_adapters:main", create_segments())
    yield local
    local.close()
