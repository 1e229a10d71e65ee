"""A stream is read in order, once where that will do, and what is kept of it has a bound."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.open_data import open_data
from manyhands.data.ordering.epoch_order import RecordVisit
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.data.reading.stream_records import StreamRecords, is_stream
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.config import DataConfig
from manyhands.values.errors import TaskError


class Numbers(torch.utils.data.IterableDataset[dict[str, Any]]):
    """0 to size - 1, with a drawn number each. Counts what it has given."""

    def __init__(self, size: int) -> None:
        self.size, self.given, self.epoch = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for k in range(self.size):
            self.given += 1
            yield {"k": k, "pass": self.epoch, "drawn": torch.rand(())}


class Stateful(Numbers):
    """Goes on where its state says."""

    def __init__(self, size: int, odd: Any = None) -> None:
        super().__init__(size)
        self.position, self.start, self.odd = 0, 0, odd

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "odd": self.odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self.start = self.start, 0
        for k in range(start, self.size):
            self.given += 1
            self.position = k + 1
            yield {"k": k, "pass": self.epoch, "drawn": torch.rand(())}


def feed_of(
    source: Any, pass_records: int | None = None, window: int | None = None, batch: int = 8
) -> MicroBatchFeed:
    records = StreamRecords(source, None, pass_records=pass_records, window=window)
    return MicroBatchFeed(records, seed=3, batch=batch, micro_batch=2, seeder=seed_everything)


def fetched(
    feed: MicroBatchFeed, step: int, index: int
) -> tuple[list[int], list[int], list[float]]:
    batch = feed.fetch(feed.cut(step), index)
    return batch["k"].tolist(), batch["pass"].tolist(), batch["drawn"].tolist()


def everything(feed: MicroBatchFeed, steps: int) -> list[Any]:
    return [fetched(feed, s, i) for s in range(steps) for i in range(len(feed.cut(s).sizes))]


@pytest.mark.parametrize("pass_records", [None, 19])
@pytest.mark.parametrize("window", [None, 5])
def test_any_micro_batch_is_the_same_in_any_order(
    pass_records: int | None, window: int | None
) -> None:
    whole = everything(feed_of(Numbers(19), pass_records, window), 7)
    if window is None:
        row = [k for ks, _, _ in whole for k in ks]
        assert row == [k % 19 for k in range(len(row))]

    @settings(max_examples=15)
    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=8))
    def anyhow(asked: list[tuple[int, int]]) -> None:
        feed = feed_of(Numbers(19), pass_records, window)
        sizes = [len(feed.cut(s).sizes) for s in range(7)]
        for step, index in asked:
            if index < sizes[step]:
                assert fetched(feed, step, index) == whole[sum(sizes[:step]) + index]

    anyhow()


def test_passes_are_numbered_and_told_to_the_stream() -> None:
    endless = everything(feed_of(Numbers(5)), 3)
    assert [p for _, ps, _ in endless for p in ps] == [n // 5 for n in range(24)]
    counted = feed_of(Numbers(5), 5)
    assert [p for _, ps, _ in everything(counted, 3) for p in ps] == [n // 5 for n in range(15)]
    assert counted.cut(0).sizes == (2, 2, 1)  # of eight there are five


def test_it_is_read_once_and_little_is_kept() -> None:
    source = Numbers(1000)
    feed = feed_of(source, window=50)
    records = feed.records
    assert isinstance(records, StreamRecords)
    for step in range(100):
        for index in (1, 3):  # as a worker among others
            fetched(feed, step, index)
        assert len(records._kept) <= 2 * 50 + 3 * 8  # pyright: ignore
    assert source.given <= 800 + 50


def test_a_stream_that_tells_its_state_is_gone_on_with_from_there() -> None:
    first = feed_of(Stateful(1000))
    whole = everything(first, 40)
    saved = first.state_before_batch(40)
    assert saved is not None and saved[1] == 256  # the last before batch 39, which is compared
    other = Stateful(1000)
    again = feed_of(other)
    again.offer_stream_states([saved])
    assert fetched(again, 40, 0) == fetched(first, 40, 0)
    assert other.given == 320 + 2 - 256
    assert fetched(again, 3, 1) == whole[3 * 4 + 1]  # before it: from the beginning


def test_a_state_of_an_earlier_pass_is_of_its_pass() -> None:
    first = feed_of(Stateful(100))  # 64 is the first state that is kept of each
    everything(first, 22)
    saved = first.state_before_batch(22)
    assert saved is not None and saved[1:3] == [164, (1, 64)]
    again = feed_of(Stateful(100))
    again.offer_stream_states([saved])
    assert fetched(again, 22, 0) == fetched(first, 22, 0)


def test_a_state_that_is_not_plain_data_is_not_used() -> None:
    feed = feed_of(Stateful(1000, odd=object()))
    everything(feed, 20)
    assert isinstance(feed.records, StreamRecords)
    assert feed.state_before_batch(20) is None
    assert feed.records.skips_because == "its state is not plain data"


def test_the_state_of_a_shuffled_stream_of_hugging_face_is_not_trusted() -> None:
    """What its buffer held is not in it."""
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"k": list(range(300))}).to_iterable_dataset()
    feed = MicroBatchFeed(
        StreamRecords(plain, None, pass_records=None, window=None),
        seed=0,
        batch=8,
        micro_batch=8,
        seeder=seed_everything,
    )
    for step in range(20):
        assert feed.fetch(feed.cut(step), 0)["k"].tolist() == list(range(8 * step, 8 * step + 8))
    saved = feed.state_before_batch(20)
    assert saved is not None and saved[1] == 128
    feed.records.offer([saved])  # pyright: ignore
    assert feed.fetch(feed.cut(20), 0)["k"].tolist() == list(range(160, 168))
    shuffled = plain.shuffle(seed=1, buffer_size=20)
    kept = StreamRecords(shuffled, None, pass_records=None, window=None)
    assert kept.skips_because


def test_what_is_a_stream() -> None:
    def yields() -> Iterator[int]:
        yield 1

    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    for stream in (yields, Plain(), Numbers(3), yields()):
        assert is_stream(stream)
    for other in ([1], (1, 2), {"x": 1}, "folder", np.arange(3), Numbers, {1, 2}, None, 0.2):
        assert not is_stream(other)


@pytest.mark.parametrize(
    ("data", "held_out", "asked", "told"),
    [
        ((k for k in range(3)), None, {}, "which can be read once"),
        (Numbers(3), 0.2, {}, "no fraction can be set aside"),
        (Numbers(3), Numbers(3), {}, "held_out is a stream"),
        ([1, 2], Numbers(3), {}, "held_out is a stream"),
        ([1, 2], None, {"shuffle_window": 9}, "are for streams"),
        (Numbers(3), None, {"readers": 2}, "which is read in sequence"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(
    data: Any, held_out: Any, asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        open_data(data, held_out, DataConfig(**asked))


def test_a_stream_that_is_shorter_than_it_was_is_told_of() -> None:
    with pytest.raises(TaskError, match="ended after 5 records in pass 0"):
        everything(feed_of(Numbers(5), 9), 2)
    with pytest.raises(TaskError, match="has no records"):
        everything(feed_of(Numbers(0)), 1)
    with pytest.raises(TaskError, match="must yield records"):
        records = StreamRecords(lambda: 3, None, pass_records=None, window=None)
        records.read(np.arange(2), RecordVisit(), seed_everything, keep=0)


def test_a_stream_that_is_shared_out_sees_one_worker() -> None:
    class Shared(Numbers):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            assert torch.utils.data.get_worker_info() is None
            return super().__iter__()

    assert everything(feed_of(Shared(30)), 2)
