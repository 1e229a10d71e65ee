"""Transforms: a record comes out the same in any batch, and different in every epoch."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.data.reading.augment import (
    Brightness,
    Compose,
    Contrast,
    Draw,
    FeatureDropout,
    FeatureNoise,
    Normalise,
    RandomCrop,
    RandomErase,
    RandomFlip,
    Rotate,
    TokenDrop,
    TokenMask,
    TokenSwap,
)
from manyhands.values.errors import DataError

COUNT = 256
IMAGES = [
    RandomFlip("bytes"),
    RandomFlip("floats", p=0.3, vertical=True),
    RandomCrop("bytes", 2),
    RandomCrop("floats", 3, fill=0.5),
    RandomErase("bytes", p=0.9, fill=7),
    Brightness("bytes", 0.4),
    Brightness("floats"),
    Contrast("bytes", 0.4),
    Contrast("floats"),
    Rotate("bytes", 20),
    Rotate("floats", 5, fill=0.5),
    Normalise("bytes", (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), channels_first=True),
    Normalise("floats", 0.5, 0.3),
]
OTHERS = [
    TokenDrop("tokens", 0.3),
    TokenMask("tokens", mask=99),
    TokenSwap("tokens", 0.5),
    FeatureNoise("x"),
    FeatureNoise("x", tuple(float(i) for i in range(7))),
    FeatureDropout("x", 0.3, fill=tuple(float(i) for i in range(7))),
    Compose(RandomCrop("bytes", 2), RandomFlip("bytes"), Rotate("bytes"), FeatureNoise("x")),
]


def records(ids: Any) -> dict[str, Any]:
    """A batch whose contents follow from the ids; tokens are filled up to its longest."""
    rows = [np.random.default_rng(int(i)) for i in ids]
    lengths = np.asarray([r.integers(0, 20) for r in rows])
    tokens = np.zeros((len(rows), max(lengths, default=0)), np.int64)
    for row, r, n in zip(tokens, rows, lengths, strict=True):
        row[:n] = r.integers(1, 90, n)
    batch = {
        "tokens": tokens,
        "tokens_length": lengths,
        "bytes": np.stack([r.integers(0, 256, (9, 11, 3)).astype(np.uint8) for r in rows]),
        "floats": np.stack([r.standard_normal((8, 8)).astype(np.float32) for r in rows]),
        "x": np.stack([r.standard_normal(7).astype(np.float32) for r in rows]),
    }
    return {name: torch.from_numpy(value) for name, value in batch.items()}


def transformed(transform: Callable[..., Any], ids: Any, epoch: int = 0, seed: int = 1) -> Any:
    return transform(records(ids), Draw(seed, epoch, np.asarray(ids)))


WHOLE = np.random.default_rng(0).integers(0, 2**60, COUNT)


@pytest.mark.parametrize("transform", [*IMAGES, *OTHERS], ids=repr)
def test_a_record_comes_out_the_same_in_any_batch(transform: Any) -> None:
    together = transformed(transform, WHOLE)
    backwards = transformed(transform, WHOLE[::-1])
    ones = [transformed(transform, WHOLE[i : i + 1]) for i in range(0, COUNT, 5)]
    some = transformed(transform, WHOLE[3:40])
    for name, value in together.items():
        assert value.is_contiguous()
        if name == "tokens":  # batches of shorter rows are narrower
            value, width = value.clone(), value.shape[1]
            pad = torch.nn.functional.pad
            ones_here = [pad(one[name], (0, width - one[name].shape[1])) for one in ones]
            some_here = pad(some[name], (0, width - some[name].shape[1]))
        else:
            ones_here, some_here = [one[name] for one in ones], some[name]
        assert torch.equal(value, backwards[name].flip(0))
        assert torch.equal(value[::5], torch.cat(ones_here))
        assert torch.equal(value[3:40], some_here)


@pytest.mark.parametrize("transform", [*IMAGES, *OTHERS], ids=repr)
def test_another_epoch_or_seed_varies_records_otherwise(transform: Any) -> None:
    if isinstance(transform, Normalise):
        return
    here, there = transformed(transform, WHOLE), transformed(transform, WHOLE, epoch=1)
    elsewhere = transformed(transform, WHOLE, seed=2)
    for other in (there, elsewhere):
        assert any(not torch.equal(here[name], other[name]) for name in here)
    again = transformed(transform, WHOLE)
    assert all(torch.equal(here[name], again[name]) for name in here)


@pytest.mark.parametrize("transform", [*IMAGES, *OTHERS], ids=repr)
def test_held_out_records_are_not_varied(transform: Any) -> None:
    before = records(WHOLE[:9])
    after = transform(before, Draw(1, 0, WHOLE[:9], training=False))
    for name, value in after.items():
        if not (isinstance(transform, Normalise) and name == transform.column):
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("transform", [*IMAGES, *OTHERS], ids=repr)
def test_the_batch_itself_is_left_as_it_was(transform: Any) -> None:
    before, ours = records(WHOLE[:9]), records(WHOLE[:9])
    transform(ours, Draw(1, 0, WHOLE[:9]))
    assert all(torch.equal(ours[name], before[name]) for name in before)


def test_transforms_are_values_that_travel() -> None:
    for transform in (*IMAGES, *OTHERS[:-1]):
        assert pickle.loads(pickle.dumps(transform)) == transform
    again = pickle.loads(pickle.dumps(OTHERS[-1]))
    assert repr(again) == repr(OTHERS[-1])


def test_the_same_transform_twice_draws_twice() -> None:
    noise = FeatureNoise("x", 1.0)
    once = transformed(noise, WHOLE)["x"]
    twice = transformed(Compose(noise, noise), WHOLE)["x"]
    first = transformed(Compose(noise), WHOLE)["x"]
    before = records(WHOLE)["x"]
    assert not torch.allclose(twice - before, 2 * (first - before))
    assert not torch.equal(once, first)


# ---- what each does


def test_flips_mirror_whole_images() -> None:
    before, after = records(WHOLE)["bytes"], transformed(RandomFlip("bytes"), WHOLE)["bytes"]
    kinds = [
        "same" if torch.equal(a, b) else "mirrored" if torch.equal(a, b.flip(1)) else "?"
        for a, b in zip(after, before, strict=True)
    ]
    assert set(kinds) == {"same", "mirrored"} and 90 < kinds.count("same") < 166


def test_crops_move_images() -> None:
    before = records(WHOLE)["bytes"]
    after = transformed(RandomCrop("bytes", 2, fill=9), WHOLE)["bytes"]
    padded = torch.nn.functional.pad(before.movedim(3, 1), (2, 2, 2, 2), value=9).movedim(1, 3)
    shifts: set[tuple[int, int]] = set()
    for image, wide in zip(after, padded, strict=True):
        found = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(image, wide[y : y + 9, x : x + 11])
        ]
        assert len(found) == 1
        shifts.update(found)
    assert len(shifts) == 25


def test_erased_rectangles_are_of_the_size_that_was_asked_for() -> None:
    ones = {"image": torch.ones(COUNT, 20, 30)}
    after = RandomErase("image", p=1.0, least=0.2, most=0.5)(ones, Draw(1, 0, WHOLE))["image"]
    for image in after:
        rows, columns = (image == 0).any(1).sum(), (image == 0).any(0).sum()
        assert 4 <= rows <= 10 and 6 <= columns <= 15
        assert (image == 0).sum() == rows * columns


def test_turning_by_nothing_changes_nothing_and_the_middle_stays() -> None:
    before = records(WHOLE)["bytes"]
    assert torch.equal(transformed(Rotate("bytes", 0.0), WHOLE)["bytes"], before)
    turned = transformed(Rotate("bytes", 30.0), WHOLE)["bytes"]
    assert not torch.equal(turned, before)
    assert torch.equal(turned[:, 4, 5], before[:, 4, 5])


def test_tokens_are_dropped_and_the_rest_moves_up() -> None:
    before, after = records(WHOLE), transformed(TokenDrop("tokens", 0.4), WHOLE)
    kept = 0
    for old, n, new, m in zip(
        before["tokens"],
        before["tokens_length"],
        after["tokens"],
        after["tokens_length"],
        strict=True,
    ):
        assert min(n, 1) <= m <= n and not new[m:].any()
        remaining = iter(old[:n].tolist())
        assert all(token in remaining for token in new[:m].tolist())  # in their order
        kept += int(m)
    assert 0.55 < kept / int(before["tokens_length"].sum()) < 0.68


def test_tokens_are_swapped_with_neighbours() -> None:
    before, after = records(WHOLE), transformed(TokenSwap("tokens", 0.5), WHOLE)
    for old, new, n in zip(
        before["tokens"].tolist(), after["tokens"].tolist(), before["tokens_length"], strict=True
    ):
        assert sorted(old[:n]) == sorted(new[:n]) and not any(new[n:])
        assert all(new[i] in old[max(0, i - 1) : i + 2] for i in range(n))


def test_features_are_dropped_to_their_fill() -> None:
    fill = tuple(float(i) for i in range(7))
    before = records(WHOLE)["x"]
    after = transformed(FeatureDropout("x", 0.25, fill=fill), WHOLE)["x"]
    gone = after != before
    assert torch.equal(after[gone], torch.tensor(fill).expand(COUNT, 7)[gone])
    assert 0.2 < gone.double().mean() < 0.3


def test_normalised_images_are_what_torch_makes_of_them() -> None:
    before = records(WHOLE)["bytes"]
    after = transformed(IMAGES[-2], WHOLE)["bytes"]
    mean, deviation = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    expected = ((before / 255 - mean) / deviation).movedim(3, 1)
    assert after.dtype == torch.float32 and torch.allclose(after, expected)


def test_what_does_not_fit_is_named() -> None:
    draw = Draw(1, 0, np.arange(2))
    with pytest.raises(DataError, match="wants 'picture'; the batch has x"):
        RandomFlip("picture")({"x": torch.zeros(2, 3)}, draw)
    with pytest.raises(DataError, match="an image is"):
        RandomFlip("x")({"x": torch.zeros(2, 3)}, draw)
    with pytest.raises(DataError, match="not a column of tokens"):
        TokenDrop("x")({"x": torch.zeros(2, 3)}, draw)


def test_arrays_stay_arrays() -> None:
    batch = {"x": np.zeros((2, 3), np.float32)}
    assert isinstance(FeatureNoise("x")(batch, Draw(1, 0, np.arange(2)))["x"], np.ndarray)
