# SPDX-License-Identifier: Apache-2.0
"""A reader's life: open the data as its worker does, fetch what it is asked for, until it hangs up.

It fetches with the worker's own code, seeds, threads and kernels, so who fetches a micro-batch does
not matter. What goes wrong here is not told in words: the worker fetches it again, and then it is
the worker's own error, with the records and the line of the user's code.
"""

import os
import socket
import time
from contextlib import suppress

import torch

from manyhands.data.reading.batch_bytes import NotData, PackedBatch
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.data.reading.read_ahead_plan import SLOTS
from manyhands.launch.shipping import ship_task
from manyhands.training.compute.kernel_marks import fix_kernels
from manyhands.values.byte_sizes import shown_bytes
from manyhands.values.user_frames import named
from manyhands.values.worker_orders import Orders
from manyhands.worker.readers.open_feed import open_feed
from manyhands.worker.readers.slot_memory import (
    MOST_BATCH_BYTES,
    BatchMissing,
    BatchWritten,
    FetchOrder,
    FromReader,
    ReaderReady,
    ReaderUnable,
    SlotMemory,
    decode_order,
    encode,
)

MOST_ORDER_BYTES = 4096


def read_ahead(orders: Orders, files: list[int]) -> None:
    """In a process of its own; `files`: its end of the socket, and the memory of its slots."""
    channel = socket.socket(fileno=files[0])
    memory = SlotMemory(files[1], SLOTS)
    with suppress(BrokenPipeError, ConnectionResetError):  # the worker is gone, and so are we
        try:
            feed = open_as_worker(orders)
        except BaseException as error:
            _answer(channel, ReaderUnable(named(error)[:1000]))
            return
        _answer(channel, ReaderReady(os.getpid()))
        while data := channel.recv(MOST_ORDER_BYTES):
            _answer(channel, _obey(decode_order(data), feed, memory))


def open_as_worker(orders: Orders) -> MicroBatchFeed:
    """With its threads and kernels: who reads must not matter."""
    train = orders.config.train
    if train.portable:
        fix_kernels()
    torch.set_num_threads(train.threads)
    return open_feed(ship_task.unpack(orders.parcel, orders.task_fd), orders.config)[0]


def _obey(order: FetchOrder, feed: MicroBatchFeed, memory: SlotMemory) -> FromReader:
    missing = BatchMissing(order.number, order.slot)
    if memory.is_dropped(order.slot, order.number):
        return missing
    memory.begun = order.number
    started = time.perf_counter()
    try:
        batch = feed.fetch(feed.cut(order.step), order.index)
    except BaseException:
        return missing
    try:
        packed = PackedBatch(batch)
        whole = packed.size + len(packed.header)
        if whole > MOST_BATCH_BYTES:
            most = shown_bytes(MOST_BATCH_BYTES)
            raise NotData(f"{shown_bytes(whole)} in one micro-batch ({most} at the most)")
        buffer = memory.slot(order.slot, whole)
        packed.write(buffer)
        buffer[packed.size : whole] = packed.header
    except Exception as error:
        why = str(error) if isinstance(error, NotData) else named(error)
        return BatchMissing(order.number, order.slot, why[:1000])
    seconds = time.perf_counter() - started
    return BatchWritten(order.number, order.slot, packed.size, len(packed.header), seconds)


def _answer(channel: socket.socket, answer: FromReader) -> None:
    channel.send(encode(answer))
