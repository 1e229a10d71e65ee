"""Fixtures for all tests: a warm launcher, small tasks, and a watch for what tests leave behind."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.testing.namespaces import NAMED, Network, why_not
from tests.support import shared_memory, side_by_side

# A busy machine is no bug: no test is judged by how long it took.
settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("calm")

os.environ[shared_memory.MARK] = str(os.getpid())

# Set by torch and scikit-learn when they are imported.
IGNORED = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "KMP_")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return side_by_side.scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest that are in no group come first, so that nobody is waited for at the end."""
    items.sort(key=lambda item: item.path.name != "test_docs.py")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have to tell even if all is well: `record_property("told", ...)`."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, text in getattr(report, "user_properties", ()):
                if key == "told" and report.when == "call":
                    terminalreporter.write_line(str(text))


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """One host agent for all tests: it has imported torch once, workers are forked from it."""
    local = Local("tests.support.warm_worker:main", create_segments())
    yield local
    local.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As in a worker. With more, threads of tests that run side by side wait for each other."""
    if torch := sys.modules.get("torch"):  # not imported here: not every test needs it
        torch.set_num_threads(1)


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    """Makes networks as `Network` does: `network(hosts=3)`. They end with the test."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(hosts: int = 2, *, with_root: bool = False) -> Network:
            return stack.enter_context(Network(hosts, with_root=with_root))

        yield make


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    threads, environment = set(threading.enumerate()), dict(os.environ)
    shared = shared_memory.there()
    spaces = set(NAMED.glob(f"manyhands-{os.getpid()}-*"))
    yield
    left = [t for t in threading.enumerate() if t not in threads and t.is_alive() and not t.daemon]
    assert not left, f"threads left behind: {left}"
    changed = {k for k in environment.keys() | os.environ.keys() if not k.startswith(IGNORED)}
    changed = {k for k in changed if environment.get(k) != os.environ.get(k)}
    assert not changed, f"environment changed: {changed}"
    left = shared_memory.left_since(shared)
    assert not left, f"shared memory left behind: {left}"
    new = set(NAMED.glob(f"manyhands-{os.getpid()}-*")) - spaces
    assert not new, f"network namespaces left behind: {[path.name for path in new]}"
