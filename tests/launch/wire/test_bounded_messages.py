"""Whatever a worker's key says, the driver reads no more of it than it can afford.

The whole class is found by walking the messages: who adds a list finds it here.
"""

from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from manyhands.launch.hosts.message_digest import message_classes
from manyhands.launch.wire.heartbeat import MOST_STEPS, Heartbeat
from manyhands.launch.wire.long_messages import MOST_READ_BYTES, Assembly, fragments
from manyhands.values import messages
from manyhands.values.bounded_types import FEW, SOME, fitting
from manyhands.values.messages import (
    Begun,
    Built,
    Fragment,
    FromWorker,
    Hello,
    Notice,
    RoundPart,
    decode_from_worker,
    encode,
)

HELD = (list, dict, set, frozenset, tuple)


def unbounded(hint: Any, bounded: bool = False) -> Iterator[Any]:
    """The types inside that hold as much as somebody likes."""
    if hasattr(hint, "__metadata__"):
        metas = [m for m in hint.__metadata__ if isinstance(m, msgspec.Meta)]
        yield from unbounded(get_args(hint)[0], any(m.max_length is not None for m in metas))
        return
    inner, kind = get_args(hint), get_origin(hint) or hint
    fixed = kind is tuple and inner and Ellipsis not in inner
    if hint is Any or (kind in HELD and not bounded and not fixed):
        yield hint
    for part in inner:
        yield from unbounded(part)


@pytest.mark.parametrize(
    "cls", sorted(message_classes(FromWorker, Built), key=str), ids=lambda c: c.__name__
)
def test_everything_that_workers_list_is_bounded(cls: type) -> None:
    hints = get_type_hints(cls, include_extras=True)
    assert {f: odd for f, hint in hints.items() if (odd := list(unbounded(hint)))} == {}


def test_the_walk_finds_what_is_not() -> None:
    for odd in (list[int], dict[str, int] | None, tuple[int, ...], Any, tuple[list[int], int]):
        assert list(unbounded(odd)), odd
    assert not list(unbounded(tuple[int, float]))


def bytes_of(groups: int) -> bytes:
    """A Begun with so many empty groups, of a byte each."""
    start = encode(Begun(worker=0, step=0, groups=[]))
    assert start.count(b"\xa6groups\x90") == 1
    many = b"\xa6groups\xdd" + groups.to_bytes(4, "big") + b"\x80" * groups
    return start.replace(b"\xa6groups\x90", many)


def test_too_many_are_refused_before_they_are_read() -> None:
    assert isinstance(decode_from_worker(bytes_of(SOME)), Begun)
    with pytest.raises(msgspec.ValidationError, match="length <= 4096"):
        decode_from_worker(bytes_of(SOME + 1))


def put_together(whole: bytes) -> FromWorker | None:
    assembly, piece = Assembly(), messages.FILE_PIECE_BYTES
    said = None
    for at in range(0, len(whole), piece):
        data = whole[at : at + piece]
        said = assembly.add(Fragment(worker=0, at=at, size=len(whole), data=data))
    return said


def test_only_what_is_passed_on_as_it_is_can_be_very_long() -> None:
    data = bytes(MOST_READ_BYTES + 1)
    for long in (
        RoundPart(worker=0, round="x", payload=data),
        Hello(worker=0, pid=1, host="a", built=data),
    ):
        assert put_together(encode(long)) == long
    padded = msgspec.msgpack.encode({"type": "Notice", "worker": 0, "text": "well", "more": data})
    with pytest.raises(msgspec.ValidationError, match="Notice"):
        put_together(padded)
    assert decode_from_worker(padded) == Notice(worker=0, text="well")


def test_what_workers_have_more_of_they_leave_out_or_tell_later() -> None:
    odd = {"lr": 0.1, "betas": [0.9, 0.99], "deep": [[1]], "long": [1] * (FEW + 1), "none": None}
    plain = {"lr": 0.1, "betas": [0.9, 0.99], "none": None}
    assert fitting([odd] * (SOME + 1)) == [plain] * SOME
    assert len(fitting([{f"{n}": n for n in range(FEW + 1)}])[0]) == FEW
    begun = Begun(worker=0, step=0, groups=fitting([odd] * (SOME + 1)))
    assert put_together(encode(begun)) == begun
    heartbeat = Heartbeat(0, log_every=1)
    heartbeat.leads = True
    numbers = {f"some number {n}": 1.5 for n in range(32)}
    for step in range(MOST_STEPS + 1):
        heartbeat.stepped(step, 0.0, 1.0, 0.1, 1, numbers)
    first, second = heartbeat.beat(), heartbeat.beat()
    assert [len(first.steps), len(second.steps), len(second.losses)] == [MOST_STEPS, 1, 1]
    assert len(encode(first)) <= MOST_READ_BYTES and len(list(fragments(first))) > 1
    assert put_together(encode(first)) == first
