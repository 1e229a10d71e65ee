# SPDX-License-Identifier: Apache-2.0
"""One tf.train.Example, field by field: slowly, and exactly as protobuf says.

For records that do not look like the others, and to learn from one what the others look like. A
tf.train.SequenceExample is an Example (its context) that has feature lists beside it: a list of
features under each name, one for each step.
"""

from collections.abc import Iterator

from manyhands.data.tfrecord.feature_kinds import BYTES, FLOATS, INTS, NONE, TYPES

_WIRES = {BYTES: (2,), FLOATS: (2, 5), INTS: (2, 0)}
"""Wire types of the values: with a length (packed, if they are numbers), or one by one."""
CUT = {FLOATS: "a float is cut off", INTS: "an integer has no end"}


class Malformed(Exception):
    """Not a protobuf message, or not an Example."""


Places = list[tuple[int, int]]
"""Where things begin and end."""


def read_example(data: bytes) -> dict[str, tuple[int, Places]]:
    """The features of an Example in any encoding that protobuf allows, with their kind and lists.

    Unknown fields are skipped, parts of a message merged; of several features with one name, the
    last counts.
    """
    found: dict[str, tuple[int, Places]] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if (number, wire) == (1, 2):
            for inner, inner_wire, a, b in _fields(data, start, stop):
                if (inner, inner_wire) == (1, 2):
                    name, kind, lists = _read_entry(data, a, b)
                    found[name] = kind, lists
    return found


def read_feature_lists(data: bytes) -> dict[str, tuple[int, Places]]:
    """The feature lists of a SequenceExample, all steps of one end to end; none in an Example.

    A step has one value: a list of lists has no column. Of several lists with one name, the last
    counts.
    """
    found: dict[str, tuple[int, Places]] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if (number, wire) == (2, 2):
            for inner, inner_wire, a, b in _fields(data, start, stop):
                if (inner, inner_wire) == (1, 2):
                    name, steps = _read_steps(data, a, b)
                    found[name] = _joined(data, name, steps)
    return found


def _read_steps(data: bytes, start: int, stop: int) -> tuple[str, list[tuple[int, Places]]]:
    name, steps = "", list[tuple[int, Places]]()
    for number, wire, a, b in _fields(data, start, stop):
        if (number, wire) == (1, 2):
            name = _read_name(data[a:b])
        elif (number, wire) == (2, 2):
            features = _fields(data, a, b)
            steps += [_read_feature(data, c, d) for n, w, c, d in features if (n, w) == (1, 2)]
    return name, steps


def _joined(data: bytes, name: str, steps: list[tuple[int, Places]]) -> tuple[int, Places]:
    kinds = {kind for kind, _ in steps if kind != NONE}
    if len(kinds) > 1:
        raise Malformed(f"feature list '{name}' has steps of different kinds")
    kind = kinds.pop() if kinds else NONE
    for number, (_, lists) in enumerate(steps):
        count = _count(data, kind, lists)
        if count != 1:
            raise Malformed(
                f"feature list '{name}' has {count} values at step {number}; lists of one value a "
                "step can be read, others must be written as features of their own"
            )
    return kind, [place for _, lists in steps for place in lists]


def _count(data: bytes, kind: int, lists: Places) -> int:
    pieces = places_of(data, kind, lists) if kind != NONE else Places()
    if kind == FLOATS:
        return sum(b - a for a, b in pieces) // 4
    if kind == INTS:
        return sum(byte < 0x80 for a, b in pieces for byte in data[a:b])
    return len(pieces)


def _read_entry(data: bytes, start: int, stop: int) -> tuple[str, int, Places]:
    name, kind, lists = "", NONE, Places()
    for number, wire, a, b in _fields(data, start, stop):
        if (number, wire) == (1, 2):
            name = _read_name(data[a:b])
        elif (number, wire) == (2, 2):
            kind, lists = _read_feature(data, a, b, kind, lists)
    return name, kind, lists


def _read_feature(
    data: bytes, start: int, stop: int, kind: int = NONE, lists: Places | None = None
) -> tuple[int, Places]:
    """A Feature, merged into what was there before it."""
    lists = lists or Places()
    for of_kind, wire, a, b in _fields(data, start, stop):
        if wire == 2 and of_kind in TYPES:
            if of_kind != kind:
                kind, lists = of_kind, Places()
            lists.append((a, b))
    return kind, lists


def _read_name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Malformed(f"the name of a feature, {raw[:40]!r}, is not UTF-8") from None


def places_of(data: bytes, kind: int, lists: Places) -> Places:
    """Where the values in these lists are; numbers may stand several in a place."""
    pieces = Places()
    for start, stop in lists:
        for number, wire, a, b in _fields(data, start, stop):
            if number == 1 and wire in _WIRES[kind]:
                if (kind == FLOATS and (b - a) % 4) or (
                    kind == INTS and b > a and data[b - 1] >= 0x80
                ):
                    raise Malformed(CUT[kind])
                pieces.append((a, b))
    return pieces


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, wire type, and where the contents are. Groups are passed
    over."""
    groups: list[int] = []
    while at < stop:
        tag, begin = _read_varint(data, at, stop, 5)
        number, wire, at = tag >> 3, tag & 7, begin
        if wire == 0:
            at = _read_varint(data, at, stop, 10)[1]
        elif wire == 2:
            length, begin = _read_varint(data, at, stop, 5)
            at = begin + length
        elif wire == 3:
            groups.append(number)
        elif wire == 4:
            if not groups or groups.pop() != number:
                raise Malformed(f"it is not an Example: a group ends at its byte {begin}")
            continue
        else:
            at += {1: 8, 5: 4}.get(wire, stop + 1)
        if at > stop or not number or tag >> 32 or len(groups) > 100:
            raise Malformed(f"it is not an Example: its byte {begin} makes no sense")
        if not groups:
            yield number, wire, begin, at
    if groups:
        raise Malformed("it is not an Example: a group does not end")


def _read_varint(data: bytes, at: int, stop: int, most: int) -> tuple[int, int]:
    value = 0
    for k in range(most):
        if at + k >= stop:
            break
        value |= (data[at + k] & 0x7F) << (7 * k)
        if data[at + k] < 0x80:
            return value, at + k + 1
    raise Malformed(f"it is not an Example: the number at its byte {at} has no end")


def varint(value: int) -> bytes:
    raw = bytearray()
    while value >= 0x80:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)
