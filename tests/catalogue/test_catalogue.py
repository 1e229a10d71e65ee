"""Every case of the catalogue ends at the bits of plain PyTorch, or is refused by name."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import ManyhandsError
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import (
    batch_losses,
    buffers,
    data,
    losses,
    models,
    optimizers,
    phases,
    reference,
    refused,
    schedules,
)
from tests.catalogue.case import Case

KINDS = (models, buffers, losses, optimizers, schedules, phases, data, refused, batch_losses)
CASES: list[Case] = [case for kind in KINDS for case in kind.CASES]
NUMBERS = (1, 2, 3)
CALM = FaultPlan()
KILLED = [
    "sometimes-used",
    "batch-norm-average",
    "embedding-max-norm",
    "averages",
    "weights-of-zero",
]
KILLED += [
    "collate-masks",
    "own-noisy",
    "nadam-in-parts",
    "cyclic-momentum",
    "drawn",
    "augmented",
    "lookahead",
    "gan",
    "wgan-gp",
    "own-optimizers-in-phases",
]
KILLED += ["batch-temperature", "batch-norm-embedded"]
IN_BF16 = ["mlp", "wide", "batch-norm-2d", "attention", "weight", "clip", "gradient-penalty"]
IN_BF16 += ["mixed-dtypes", "one-micro-batch", "batch-temperature", "batch-shared"]


def parameters(cases: Sequence[Case], *, all_numbers: bool = False) -> list[object]:
    """Each with one number of workers, in turn; or each with those that it was not run with."""
    made: list[object] = []
    for k, case in enumerate(cases):
        first = NUMBERS[k % 3]
        for workers in [n for n in NUMBERS if n != first] if all_numbers else [first]:
            marks = [pytest.mark.slow] if case.slow or all_numbers else []
            marks += [pytest.mark.xfail(strict=True, reason=case.xfail)] if case.xfail else []
            made.append(pytest.param(case, workers, marks=marks, id=f"{case.name}-{workers}"))
    return made


def run(
    case: Case, workers: int, to: Path, launcher: Launcher, faults: FaultPlan = CALM
) -> mh.Report:
    task = mh.Task(
        model=case.model,
        loss=case.loss if case.batch_loss is None else None,
        embed=case.embed,
        batch_loss=case.batch_loss,
        optimizer=case.optimizer,
        schedule=case.schedule,
        schedule_every=case.schedule_every,  # pyright: ignore[reportArgumentType]
        every=case.every,
        offset=case.offset,
        share_batch=case.share_batch,
        data=case.data,
        collate=case.collate,
    )
    train = {k: v for k, v in asdict(case.settings).items() if v is not None}
    return mh.train(
        task,
        to=to,
        workers=min(workers, case.settings.batch // case.settings.micro_batch),
        config={"train": train},
        quiet=True,
        launcher=launcher,
        faults=faults,
    )


def check(case: Case, workers: int, to: Path, launcher: Launcher, faults: FaultPlan = CALM) -> None:
    if case.refused is not None:
        with pytest.raises(ManyhandsError) as refusal:
            run(case, workers, to, launcher, faults)
        said = str(refusal.value)
        assert re.search(case.refused, said), said
        return
    report = run(case, workers, to, launcher, faults)
    records = len(next(iter(case.data.values()))) if isinstance(case.data, dict) else len(case.data)
    # The one thing that is borrowed: which records an epoch visits, in which order.
    expected = reference.train(
        case, lambda epoch: order(case.settings.seed, epoch, records)[range(records)].tolist()
    )
    compare(load_file(report.weights), expected)


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() <= expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert reference.same(tensor, expected[name]), _difference(name, tensor, expected[name])
    stored = {expected[name].data_ptr() for name in found}
    missing = {n for n in expected.keys() - found.keys() if expected[n].data_ptr() not in stored}
    assert not missing, f"not saved, under any name: {missing}"


def _difference(name: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    apart = (found.to(torch.complex128) - expected.to(torch.complex128)).abs().max().item()
    return f"{name} differs by up to {apart}"


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("case", "workers"), parameters(CASES))
def test_a_case(case: Case, workers: int, launcher: Launcher, tmp_path: Path) -> None:
    check(case, workers, tmp_path / "run", launcher)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("case", "workers"), parameters(CASES, all_numbers=True))
def test_a_case_on_other_numbers_of_workers(
    case: Case, workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    check(case, workers, tmp_path / "run", launcher)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["gather", "update"])
@pytest.mark.parametrize("name", KILLED)
def test_a_case_in_which_a_worker_is_killed(
    name: str, moment: str, launcher: Launcher, tmp_path: Path
) -> None:
    plan = FaultPlan().kill(rank=1, at_step=2, at=moment).kill(rank=0, at_step=4, at=moment)
    check(named(name), 3, tmp_path / "run", launcher, plan)


@pytest.mark.slow
@pytest.mark.parametrize("workers", NUMBERS)
@pytest.mark.parametrize("name", IN_BF16)
def test_a_case_under_autocast(name: str, workers: int, launcher: Launcher, tmp_path: Path) -> None:
    case = named(name)
    case = replace(case, settings=replace(case.settings, precision="bf16"))
    check(case, workers, tmp_path / "run", launcher)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_the_reference_and_the_cases_know_nothing_of_manyhands() -> None:
    here = Path(__file__).parent
    others = [path for path in here.glob("*.py") if path.name != Path(__file__).name]
    assert len(others) == len(KINDS) + 4
    for path in others:
        assert not re.search(r"^\s*(import|from) manyhands", path.read_text(), re.M), path


def test_names_are_told_apart_and_every_case_says_what_it_shows() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.shows.endswith(".") for case in CASES)
