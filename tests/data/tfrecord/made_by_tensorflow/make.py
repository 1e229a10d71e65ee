"""Made by TensorFlow: `python make.py FOLDER` writes the files of this folder, with what TensorFlow
reads in them as JSON lines; `python make.py --read FILE` prints that for any TFRecord file.

Run with an interpreter that has TensorFlow (2.21.0 made what is here); the tests need only the
files.
"""

import json
import os
import random
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf
from google.protobuf.message import DecodeError

Example, Feature = tf.train.Example, tf.train.Feature


def ints(*values):
    return Feature(int64_list=tf.train.Int64List(value=values))


def floats(*values):
    return Feature(float_list=tf.train.FloatList(value=values))


def strings(*values):
    return Feature(bytes_list=tf.train.BytesList(value=values))


def example(**features):
    return Example(features=tf.train.Features(feature=features))


def mixed():
    """Regular records: an id, numbers, tokens, a label. Lengths cross from one byte to two."""
    draw = random.Random(1)
    for i in range(24):
        tokens = [draw.randrange(1 << draw.choice([6, 13, 20])) for _ in range(draw.randint(0, 70))]
        yield example(
            id=ints(i * 100),
            features=floats(*(draw.gauss(0, 1) for _ in range(32))),
            tokens=ints(*tokens),
            label=ints(draw.randint(-1, 1)),
            text=strings(bytes(draw.randrange(256) for _ in range(draw.randint(0, 200)))),
        )


def plain_oddities():
    """What people do write, now and then."""
    yield example()
    yield Example()
    yield example(a=ints(), b=floats(), c=strings())
    yield example(a=Feature(), b=floats(1.5), c=strings(b""))
    yield example(a=ints(-1, 0, 1, -(2**63), 2**63 - 1), c=strings(b"x", b"", b"yz" * 100))
    yield example(b=floats(float("nan"), float("inf"), -0.0, 1e-45))
    yield example(**{"": ints(3), "ключ": ints(4), "long " * 30: ints(5)})


def delimited(tag, data):
    size, length = len(data), b""
    while size >= 128:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([tag]) + length + bytes([size]) + data


def entry(name, value):
    return delimited(0x0A, delimited(0x0A, name) + delimited(0x12, value))


def wire_oddities():
    """Other encodings of Examples, and what is none."""
    five, six = b"\x08\x05", b"\x08\x06"
    a = entry(b"a", delimited(0x1A, five))
    zero = delimited(0x12, b"\x0d\0\0\0\0")
    listed = {
        "unpacked": entry(b"a", delimited(0x1A, five + six)),
        "partly packed": entry(b"a", delimited(0x1A, five + b"\x0a\x02\x07\x09" + six)),
        "floats unpacked": entry(b"b", delimited(0x12, b"\x0d\0\0\x80\x3f" * 2)),
        "lists merged": entry(b"a", delimited(0x1A, five) + delimited(0x1A, six)),
        "the last kind": entry(b"a", zero + delimited(0x1A, six)),
        "there and back": entry(b"a", delimited(0x1A, five) + zero + delimited(0x1A, six)),
        "same name": a + entry(b"a", delimited(0x1A, six)),
        "same name, no kind": a + entry(b"a", b""),
        "value before name": delimited(0x0A, delimited(0x12, delimited(0x1A, five)) + b"\x0a\x01a"),
        "no name": delimited(0x0A, delimited(0x12, delimited(0x1A, five))),
        "unknown fields": b"\x10\x05" + a + b"\x19" + bytes(8) + b"\x25" + bytes(4),
        "unknown in the list": entry(b"a", delimited(0x1A, b"\x10\x07" + five)),
        "unknown group": b"\x13\x08\x01\x1b\x1c\x14" + a,
        "group that ends as another": b"\x13\x08\x01\x1c" + a,
        "group without end": a + b"\x13\x08\x01",
        "end without group": a + b"\x14",
        "field 0": a + b"\x00\x01",
        "wire type 6": a + b"\x16\x01",
        "name not UTF-8": a + entry(b"\xff", delimited(0x1A, six)),
        "ten bytes": entry(b"a", delimited(0x1A, delimited(0x0A, b"\xff" * 9 + b"\x7f"))),
        "eleven bytes": entry(b"a", delimited(0x1A, delimited(0x0A, b"\x80" * 10 + b"\x01"))),
        "more bytes than needed": entry(b"a", delimited(0x1A, delimited(0x0A, b"\x81\x80\x00"))),
        "integer cut": entry(b"a", delimited(0x1A, delimited(0x0A, b"\x01\x80"))),
        "integer in two": entry(b"a", delimited(0x1A, b"\x0a\x01\x85\x0a\x01\x01")),
        "float cut": entry(b"b", delimited(0x12, b"\x0a\x03\0\0\0")),
        "too long": entry(b"a", b"\x1a\x7f\x0a\x01\x01"),
    }
    for features in listed.values():
        yield delimited(0x0A, features)
    yield delimited(0x0A, a) + delimited(0x0A, entry(b"b", delimited(0x12, b"")))  # merged
    yield delimited(0x0A, a) + b"\x10\x05"
    yield b"\x08\x01" + delimited(0x0A, a)
    yield b"\x0a\xff\xff\xff\xff\x0f"
    yield b"\x0a"


def as_json(record):
    """{name: [kind, values]}, bytes in hexadecimal; None if TensorFlow cannot read it."""
    try:
        features = Example.FromString(record).features.feature
    except DecodeError:
        return None
    read = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        read[name] = [kind, [v.hex() if isinstance(v, bytes) else v for v in values]]
    return read


def read(path):
    return [as_json(record.numpy()) for record in tf.data.TFRecordDataset(str(path))]


def dumped(path):
    return "\n".join(json.dumps(record, sort_keys=True) for record in read(path)) + "\n"


def main(folder):
    records = {
        "mixed": [e.SerializeToString() for e in mixed()],
        "sorted": [e.SerializeToString(deterministic=True) for e in mixed()],
        "odd": [*(e.SerializeToString() for e in plain_oddities()), *wire_oddities()],
    }
    for name, written in records.items():
        path = folder / f"{name}.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as file:
            for record in written:
                file.write(record)
        if name != "sorted":
            (folder / f"{name}.jsonl").write_text(dumped(path))


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        print(dumped(sys.argv[2]), end="")
    else:
        main(Path(sys.argv[1]))
