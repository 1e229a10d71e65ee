"""A worker that cannot even begin says why; nobody has to look for it in a log."""

import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from manyhands.launch.wire.control_channel import SupervisorChannel
from manyhands.values.config import RunConfig, TrainConfig
from manyhands.values.messages import Trouble
from manyhands.values.worker_orders import Orders, Parcel
from manyhands.worker.lifecycle import main


@pytest.mark.timeout(60)
def test_an_address_that_is_none_of_its_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(SupervisorChannel()) as channel:
        orders = Orders(
            worker=0,
            keys=channel.keys_for(0, "127.0.0.1"),
            run=str(tmp_path),
            config=RunConfig(train=TrainConfig(batch=8)),
            collective="sockets",
            parcel=Parcel(),
            task_fd=-1,
            state_fd=-1,
            address="192.0.2.1",  # of a network that is kept for documents
            steps=1,
        )
        assert main(msgspec.msgpack.encode(orders)) == 1
        deadline, told = time.monotonic() + 30, list[object]()
        while not (troubles := [m for m in told if isinstance(m, Trouble)]):
            assert time.monotonic() < deadline, told
            told += channel.receive()
    assert "Cannot assign requested address" in troubles[0].text
    assert "Cannot assign" in capsys.readouterr().err
