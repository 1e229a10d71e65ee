"""Plans: what is chosen, and what is refused."""

from typing import Any

import pytest

from manyhands.planning.planner import Choice, plan
from manyhands.values.config import TrainConfig
from manyhands.values.errors import ConfigError
from manyhands.values.machine import Machine
from manyhands.values.server_config import ServerConfig


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


def said(workers: Any = 1, records: int = 1000, **more: Any) -> Any:
    resumed, loss = more.pop("resumed", False), more.pop("batch_loss", False)
    machine = Machine("here", 4, 1 << 30)
    return plan(
        TrainConfig(**more),
        machine,
        workers=workers,
        records=records,
        resumed=resumed,
        batch_loss=loss,
    )


@pytest.mark.parametrize(
    ("batch", "micro_batch", "records", "expected"),
    [
        (64, None, 1000, "8 (of 8 records each, an eighth of the batch)"),
        (8, None, 1000, "8 (of 1 record each, an eighth of the batch)"),
        (12, None, 1000, "4 (of 3 records each, a quarter of the batch: 12 has no whole eighth)"),
        (10, None, 1000, "2 (of 5 records each, half of the batch: 10 has no whole quarter)"),
        (7, None, 1000, "1 (of 7 records each, the whole batch: 7 cannot be halved)"),
        (1, None, 1000, "1 (of 1 record each, the whole batch: 1 cannot be halved)"),
        (64, 16, 1000, "4 (of 16 records each, as asked)"),
        (64, 8, 1000, "8 (of 8 records each, as asked)"),
        (128, None, 20, "2 (of 10 records: the 20 there are, 16 in each at most)"),
        (128, 16, 21, "2 (of up to 11 records: the 21 there are, 16 in each at most)"),
        (128, None, 5, "1 (of 5 records: the 5 there are, 16 in each at most)"),
    ],
)
def test_why_micro_batches_are_as_large_as_they_are(
    batch: int, micro_batch: int | None, records: int, expected: str
) -> None:
    made = said(records=records, batch=batch, micro_batch=micro_batch)
    assert str(made.micro_batches) == expected
    sees = said(records=records, batch=batch, micro_batch=micro_batch, batch_loss=True)
    count = min(batch, records)
    more = f"; batch_loss sees {count} record{'s' * (count != 1)})"
    assert str(sees.micro_batches) == expected.removesuffix(")") + more


@pytest.mark.parametrize("workers", [4, (4, 6)])
def test_more_workers_than_micro_batches_are_told_what_can_still_be_changed(workers: Any) -> None:
    """A run that goes on keeps its micro-batches: another size of them is no advice there."""
    with pytest.raises(ConfigError, match=r"--workers 3 at most, or set .*micro_batch to 3"):
        said(workers, batch=12, micro_batch=4)
    with pytest.raises(ConfigError, match=r"only 3 micro-.*--workers 3 at most: a run keeps"):
        said(workers, batch=12, micro_batch=4, resumed=True)
    with pytest.raises(ConfigError, match=r"only 1 micro-batch .*--workers 1 at most, or a larger"):
        said(workers, batch=3)


@pytest.mark.parametrize("workers", [4, (4, 6)])
def test_where_each_computes_whole_steps_micro_batches_do_not_bound_them(workers: Any) -> None:
    def planned(workers: Any, **server: Any) -> Choice:
        machine, train = Machine("here", 9, 1 << 30), TrainConfig(sync="server", batch=3)
        servers = ServerConfig(**server)
        return plan(train, machine, workers=workers, records=1000, servers=servers).workers

    assert planned(workers, mode="async").value in (4, 6)
    assert planned(None, mode="stale", staleness=1).value == 9
    for mode in ({}, {"mode": "stale", "staleness": 0}):  # which is executed as sync
        with pytest.raises(ConfigError, match="only 1 micro-batch"):
            planned(workers, **mode)
    with pytest.raises(ConfigError, match="more than 256"):
        planned(256, mode="async")


def test_servers_that_merge_on_several_hosts_are_on_every_one() -> None:
    def servers(many_hosts: bool = True, **train: Any) -> Choice:
        machine, asked = Machine("here", 4, 1 << 30), ServerConfig(mode="async")
        config = TrainConfig(sync="server", **train)
        made = plan(config, machine, workers=2, records=1000, many_hosts=many_hosts, servers=asked)
        assert made.servers is not None
        return made.servers

    assert "first process of every host serves" in servers().because
    assert "on this host" in servers(many_hosts=False).because
    with pytest.raises(ConfigError, match=r'needs hosts that speak over sockets.*is "mpi"'):
        servers(collective="mpi")
