"""The scale of losses is torch's, step by step."""

import pytest
import torch

from manyhands.training.state.loss_scale import GROWTH_INTERVAL, LossScale, first_state
from manyhands.values.errors import GradientNotFinite, LossNotFinite


def test_it_is_that_of_gradscaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scale, taken = torch.full((1,), scaler.get_scale()), torch.zeros(1, dtype=torch.int32)
    constants = (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    ours = LossScale(first_state())
    skips = {0, 1, 7, 2500, 2501} | set(range(8000, 8150))
    for step in range(4 * GROWTH_INTERVAL + 200):
        skipped = step in skips
        torch._amp_update_scale_(scale, taken, torch.full((1,), float(skipped)), *constants)
        ours.after(skipped=skipped)
        assert ours.value == scale.item(), step


def test_it_grows_no_further_than_float32() -> None:
    ours = LossScale(torch.tensor([2.0**127, GROWTH_INTERVAL - 1.0], dtype=torch.float64))
    ours.after(skipped=False)
    assert ours.value == 2.0**127


@pytest.mark.parametrize(
    ("scale", "error", "excused"),
    [
        (2.0**16, GradientNotFinite(0, 3), True),
        (2.0**16, LossNotFinite(0, 3, 0, float("nan"), ()), False),
        (2.0**16, None, False),
        (2.0**-17, GradientNotFinite(0, 3), False),
        (None, GradientNotFinite(0, 3), False),
    ],
)
def test_what_it_may_be_the_cause_of(
    scale: float | None, error: Exception | None, excused: bool
) -> None:
    state = None if scale is None else torch.tensor([scale, 0.0], dtype=torch.float64)
    assert LossScale(state).excuses(error) is excused
