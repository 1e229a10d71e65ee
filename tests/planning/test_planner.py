"""Plans: what is chosen, and what is refused."""

from typing import Any

import pytest

from manyhands.planning.planner import Choice, plan
from manyhands.values.config import TrainConfig
from manyhands.values.errors import ConfigError
from manyhands.values.machine import Machine


def encryption(many_hosts: bool = True, **train: Any) -> Choice:
    machine = Machine("here", 4, 1 << 30)
    config = TrainConfig(**train)
    return plan(config, machine, workers=2, records=1000, many_hosts=many_hosts).encryption


def test_what_hosts_send_each_other_is_sealed_where_that_is_asked_for() -> None:
    assert encryption(encrypt=True).value == "sealed"
    assert encryption(encrypt=False).value == "none"
    auto = encryption()
    assert auto.value == "none" and "in the open; train.encrypt = true" in auto.because
    assert encryption(many_hosts=False, encrypt=True).because == "nothing is sent to another host"


@pytest.mark.parametrize("collective", ["mpi", "gloo"])
def test_what_cannot_be_encrypted_is_said_or_refused(collective: str) -> None:
    open_ = encryption(collective=collective)
    assert open_.value == "none" and f"{collective} speaks for itself" in open_.because
    with pytest.raises(ConfigError, match=f"train.encrypt = true, but {collective}.*sockets"):
        encryption(collective=collective, encrypt=True)
