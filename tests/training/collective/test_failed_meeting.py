"""A meeting of hosts that fails leaves no thread and no descriptor behind."""

import threading

import pytest

from manyhands.training.collective.collective import Patience, Sizes
from manyhands.training.collective.handshake import PeerListener
from manyhands.training.collective.shared_memory import SharedMemory, SharedRoom
from manyhands.training.collective.sockets import Sockets
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.memory.memory import Memory
from manyhands.values.errors import Broken
from manyhands.values.machine import open_files
from manyhands.values.world import World

WORLD = World(1, 2, (1, 1))


class Patient:
    def broken(self) -> bool:
        return False

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def couriers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("courier")]


def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.training.collective.handshake.MEET_S", 0.1)
    listener = PeerListener()
    room = SharedRoom(Memory(None), Sizes(lanes={}, slots=1, message_bytes=64))
    before = open_files()

    def between(patience: Patience) -> Sockets:
        return Sockets(
            WORLD.among_hosts(),
            [],
            listener=listener,
            addresses=["127.0.0.1:9", listener.address],
            generation=1,
            secret=b"secret",
            patience=patience,
        )

    for generation in range(1, 4):
        local = SharedMemory(WORLD, room, generation, spin=False, patience=Patient())
        with pytest.raises(Broken, match="host 0 could not be reached"):
            TwoLevel(WORLD, local, between, patience=Patient())
    for thread in couriers():
        thread.join(10)
    listener.close()
    assert not couriers() and open_files() == before - 1
