"""Tables of rows (`mh.Embedding`): the bits of a plain loop, whoever holds the rows and dies."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.state.rows.row_init import FirstRows
from manyhands.values.errors import (
    CheckpointMismatch,
    ConfigError,
    OptimizerRefused,
    RequestError,
    RunDirError,
    RunFailed,
    TaskError,
)
from manyhands.values.planned_faults import FaultPlan
from tests.support.tasks import Factors, make, rate, ratings

SETTINGS = ["train.batch=32", "train.micro_batch=4", "train.steps=12", "recovery.silent_s=1"]

Go = Callable[..., mh.Report]


def task(**settings: Any) -> mh.Task:
    """Tables with these settings."""
    return replace(make("rows"), model=lambda: Factors(**settings))


@pytest.fixture
def go(tmp_path: Path, launcher: Launcher) -> Go:
    def run(
        *settings: str,
        given: mh.Task | None = None,
        workers: int = 2,
        name: str = "run",
        sync: str | None = None,
        faults: FaultPlan | None = None,
    ) -> mh.Report:
        return mh.train(
            given or make("rows"),
            to=tmp_path / name,
            workers=workers,
            sync=sync,
            settings=[*SETTINGS, *settings],
            quiet=True,
            launcher=launcher,
            faults=faults,
        )

    return run


_CALM: dict[Any, str] = {}


@pytest.fixture
def calm(go: Go) -> Callable[..., str]:
    """The fingerprint of one worker."""

    def found(*settings: str, **of_tables: Any) -> str:
        if (key := (settings, repr(of_tables))) not in _CALM:
            name = f"calm-{len(_CALM)}"
            report = go(*settings, given=task(**of_tables), workers=1, name=name)
            _CALM[key] = report.fingerprint
        return _CALM[key]

    return found


# ---- beside plain PyTorch


class PlainTables:
    """The same rows in plain tensors, with torch's optimizers on sparse gradients."""

    def __init__(self, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        data = ratings()
        self.ids = {"user": data["user"].unique(), "item": data["items"].unique()}
        first = Factors()
        self.weights = {
            name: torch.from_numpy(
                FirstRows(table.first, table.dim, seed=0, table=name)(self.ids[name].numpy())
            )
            for name, table in (("user", first.user), ("item", first.item))
        }
        self.optimizer = make_optimizer(list(self.weights.values()))

    def look_up(self, name: str, ids: Tensor) -> Tensor:
        at = torch.searchsorted(self.ids[name], ids.reshape(-1))
        return self.weights[name][at].requires_grad_()

    def sums(self, name: str, ids: Tensor, grad: Tensor) -> dict[int, Tensor]:
        """By row: positions in their order, one after the other."""
        found: dict[int, Tensor] = {}
        at = torch.searchsorted(self.ids[name], ids.reshape(-1)).tolist()
        for row, gradient in zip(at, grad, strict=True):
            found[row] = found[row] + gradient if row in found else gradient
        return found

    def step(self, gradients: dict[str, dict[int, Tensor]]) -> None:
        for name, rows in gradients.items():
            order = sorted(rows)
            sparse = torch.sparse_coo_tensor(
                torch.tensor([order]),
                torch.stack([rows[row] for row in order]),
                self.weights[name].shape,
                is_coalesced=True,
                check_invariants=True,
            )
            self.weights[name].grad = sparse
        with torch.sparse.check_sparse_tensor_invariants():
            self.optimizer.step()


def added(left: Any, right: Any) -> Any:
    """Two nodes of the tree: tensors, or rows of which each side has some."""
    if isinstance(left, dict):
        both = {row: left[row] + right[row] for row in left.keys() & right.keys()}
        return {**left, **right, **both}
    return left + right


def tree(leaves: Sequence[Any]) -> Any:
    while len(leaves) > 1:
        pairs = [leaves[k : k + 2] for k in range(0, len(leaves), 2)]
        leaves = [added(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def plain(
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], steps: int = 12
) -> tuple[PlainTables, nn.Module]:
    """Steps by hand: nothing of ours but the first values and the order of records."""
    seed_everything(0, "model")
    model, data, tables = Factors(), ratings(), PlainTables(make_optimizer)
    dense = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for step in range(steps):
        epoch, k = divmod(step, 8)
        batch = order(0, epoch, 256)[np.arange(32 * k, 32 * k + 32)]
        leaves: list[dict[str, Any]] = []
        for records in torch.from_numpy(batch).split(4):
            user, items, y = (data[k][records] for k in ("user", "items", "y"))
            rows = {"user": tables.look_up("user", user), "item": tables.look_up("item", items)}
            both = torch.cat([rows["user"], rows["item"].view(len(y), 3, -1).sum(1)], 1)
            made = model.head(torch.tanh(model.join(both))).squeeze(1)
            model.zero_grad()
            (nn.functional.mse_loss(made, y) * (4 / 32)).backward()
            leaf: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
            for name, ids in (("user", user), ("item", items)):
                gradient = rows[name].grad
                assert gradient is not None
                leaf[name] = tables.sums(name, ids, gradient)
            leaves.append(leaf)
        total = {name: tree([leaf[name] for leaf in leaves]) for name in leaves[0]}
        for name, parameter in model.named_parameters():
            parameter.grad = total[name]
        dense.step()
        tables.step({name: total[name] for name in ("user", "item")})
    return tables, model


def rows_of(run: str | Path, name: str, step: int | None = None) -> dict[int, Tensor]:
    table = mh.open_table(run, name, step=step)
    weights = np.array(table["weights"].to_pylist(), np.float32)
    return dict(zip(table["id"].to_pylist(), torch.from_numpy(weights), strict=True))


@pytest.mark.parametrize(
    ("kind", "settings", "make_optimizer"),
    [
        ("adagrad", {"lr": 0.2}, lambda rows: torch.optim.Adagrad(rows, lr=0.2)),
        ("adam", {"lr": 0.05}, lambda rows: torch.optim.SparseAdam(rows, lr=0.05)),
        ("sgd", {"lr": 0.5}, lambda rows: torch.optim.SGD(rows, lr=0.5)),
        ("sgd", {}, lambda rows: torch.optim.SGD(rows, lr=3e-2)),
    ],
)
def test_the_bits_of_a_plain_loop(
    go: Go,
    kind: str,
    settings: dict[str, Any],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    """The last has no rate of its own: it is the task's optimizer's."""
    report = go(given=task(optimizer=kind, **settings))
    tables, model = plain(make_optimizer)
    trained = mh.load(report.run, make("rows"))
    for name, parameter in model.named_parameters():
        assert torch.equal(trained.state_dict()[name], parameter), name
    for name in ("user", "item"):
        found = rows_of(report.run, name)
        assert sorted(found) == tables.ids[name].tolist()
        for row, weights in zip(tables.ids[name].tolist(), tables.weights[name], strict=True):
            assert torch.equal(found[row], weights), (name, row)
    user, items = torch.tensor([0, 7]), torch.tensor([[1, 2, 2], [3, 4, 999_999]])
    assert torch.isfinite(trained(user, items)).all()


def test_the_plainest_strategy_and_audits(go: Go, calm: Callable[..., str]) -> None:
    """`alone` is written to be obviously right; an audit computes micro-batches twice."""
    clip = "train.clip_norm=0.05"
    assert go(clip, "train.sync=alone", workers=1).fingerprint == calm(clip)
    audited = go(clip, "train.audit_every=2", name="audited")
    assert audited.fingerprint == calm(clip)


def test_a_task_of_another_default_dtype(go: Go, calm: Callable[..., str]) -> None:
    def wide() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        return Doubled()

    given = replace(make("rows"), model=wide)
    one, two = (go(given=given, workers=n, name=f"wide-{n}") for n in (1, 2))
    assert one.fingerprint == two.fingerprint


class Doubled(Factors):
    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        both = torch.cat([self.user(user), self.item(items).sum(1)], 1).double()
        return self.head(torch.tanh(self.join(both))).squeeze(1).float()


def test_another_run_begins_with_the_rows_of_this_one(go: Go, tmp_path: Path) -> None:
    first = go("train.steps=4")
    again = go("train.steps=1", f"train.start_from={first.weights}", name="again")
    before, after = rows_of(first.run, "user"), rows_of(again.run, "user")
    looked_up = set(ratings()["user"][torch.from_numpy(order(0, 0, 256)[np.arange(32)])].tolist())
    assert after.keys() == before.keys() | looked_up and before.keys() - looked_up
    for row in before.keys() - looked_up:
        assert torch.equal(before[row], after[row])
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes(Path(first.weights).read_bytes())
    with pytest.raises(RequestError, match="has no tables beside it, and the model has user, item"):
        go(f"train.start_from={bare}", name="bare")


# ---- whoever computes, updates and dies


@pytest.mark.parametrize(
    ("workers", "sync"), [(3, None), (1, "server:count=1"), (2, "server:count=3")]
)
def test_the_bits_of_one_worker(
    go: Go, calm: Callable[..., str], workers: int, sync: str | None
) -> None:
    report = go("train.clip_norm=0.05", workers=workers, sync=sync)
    assert report.fingerprint == calm("train.clip_norm=0.05")
    assert report.fingerprint != calm()


@pytest.mark.parametrize("at", ["gather", "update", "rows", "share", "save"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_is_killed(go: Go, calm: Callable[..., str], rank: int, at: str) -> None:
    clip = "train.clip_norm=0.05"
    faults = FaultPlan().kill(rank=rank, at_step=4, at=at)
    report = go(clip, "checkpoint.every_steps=4", faults=faults)
    assert report.fingerprint == calm(clip)
    assert report.recoveries == 1


def test_all_who_update_are_killed(go: Go, calm: Callable[..., str]) -> None:
    faults = FaultPlan()
    for rank in (1, 2):
        faults = faults.kill(rank=rank, at_step=4, at="rows")
    report = go(workers=1, sync="server:count=2", faults=faults)
    assert report.fingerprint == calm()


def test_it_is_resumed_by_others_and_replayed(
    go: Go, calm: Callable[..., str], launcher: Launcher
) -> None:
    report = go("train.steps=5", "checkpoint.every_steps=2", sync="server:count=2")
    report = mh.resume(
        report.run,
        make("rows"),
        workers=3,
        sync="allreduce",
        settings=["train.steps=12"],
        quiet=True,
        launcher=launcher,
    )
    assert report.fingerprint == calm()
    assert mh.fingerprint(report.run) == report.fingerprint
    again = mh.replay(report.run, make("rows"), step=5, to=12, launcher=launcher)
    assert again.same and 12 in again.compared_weights, again.differences


class OwnRate(torch.optim.SGD):
    """It changes its own rate in every step."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.7


def test_a_rate_that_the_optimizer_changes_itself(go: Go) -> None:
    """The rows of a step have the rate that the step began with, whoever updates them."""
    given = replace(
        task(optimizer="sgd"), optimizer=lambda model: OwnRate(model.parameters(), lr=0.3)
    )
    one, three = (go(given=given, workers=n, name=f"own-{n}") for n in (1, 3))
    killed = go(given=given, name="k", faults=FaultPlan().kill(rank=0, at_step=5, at="rows"))
    assert one.fingerprint == three.fingerprint == killed.fingerprint


def test_a_table_that_is_full_of_forgotten_rows(go: Go) -> None:
    def few() -> mh.Task:
        return replace(make("rows"), model=lambda: Forgetful())

    one, three = (go(given=few(), workers=n, name=f"few-{n}") for n in (1, 3))
    assert one.fingerprint == three.fingerprint


class Forgetful(Factors):
    def __init__(self) -> None:
        super().__init__()
        self.user = mh.Embedding(30, 8, init=0.3, expire=1)


def test_rows_that_stay_as_they_are(go: Go) -> None:
    class Frozen(Factors):
        def __init__(self) -> None:
            super().__init__()
            self.user.requires_grad_(False)

    report = go(given=replace(make("rows"), model=Frozen))
    assert not rows_of(report.run, "user") and rows_of(report.run, "item")


def test_a_snapshot_when_its_worker_no_longer_owns_the_rows(go: Go, calm: Any) -> None:
    """Somebody dies right after a save: what is still to be read is copied before others write."""
    n = 64
    g = torch.Generator().manual_seed(0)
    many = {"user": torch.randint(0, 20000, (n, 200), generator=g), "y": torch.ones(n)}
    given = mh.Task(
        model=Wide,
        loss=lambda m, b: (m(b["user"]) - b["y"]).square().mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-4),
        data=many,
    )
    faults = FaultPlan().kill(rank=1, at_step=8, at="gather")
    settings = ("train.steps=12", "checkpoint.every_steps=6", "checkpoint.keep_last=9")
    over = go(*settings, given=given, sync="server:count=2", faults=faults, name="over")
    alone = go("train.steps=6", given=given, workers=1, name="alone")
    assert over.recoveries >= 1
    assert mh.fingerprint(over.run, step=6) == alone.fingerprint


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = mh.Embedding(60000, 64, lr=0.1, expire=5, admit=2)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor) -> Tensor:
        return self.user(user).sum((-1, -2)) + self.bias


def test_a_checkpoint_is_of_its_step_though_training_went_on(go: Go) -> None:
    """Rows are read while later steps change them."""
    saved = go("checkpoint.every_steps=4", "checkpoint.keep_last=9", name="saved")
    for step in (4, 8):
        alone = go(f"train.steps={step}", name=f"until-{step}")
        assert mh.fingerprint(saved.run, step=step) == alone.fingerprint


def test_rates_follow_schedules_and_wishes(go: Go, calm: Callable[..., str]) -> None:
    def scheduled() -> mh.Task:
        schedule = lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)  # noqa: E731
        return replace(task(optimizer="sgd"), schedule=schedule)

    one = go(given=scheduled(), workers=1, name="one")
    two = go(given=scheduled(), faults=FaultPlan().kill(rank=1, at_step=6, at="rows"))
    assert one.fingerprint == two.fingerprint != calm(optimizer="sgd")


def test_what_is_admitted_and_forgotten(go: Go, calm: Callable[..., str]) -> None:
    settings: dict[str, Any] = {"admit": 2, "expire": 3}
    faults = FaultPlan().kill(rank=0, at_step=7, at="rows")
    report = go(given=task(**settings), workers=3, faults=faults)
    assert report.fingerprint == calm(**settings) != calm()
    kept, whole = rows_of(report.run, "user"), ratings()["user"].unique()
    assert 0 < len(kept) < len(whole)


def test_a_step_that_is_skipped_changes_nothing(go: Go) -> None:
    data = ratings()
    data["y"][5] = torch.nan
    broken = replace(make("rows"), data=data)
    with pytest.raises(RunFailed, match=r"step \d"):
        go(given=broken, name="refused")
    skips = "train.not_finite=skip"
    one = go(skips, given=broken, workers=1, name="one")
    two = go(skips, given=broken, workers=2, name="two")
    assert one.fingerprint == two.fingerprint
    assert all(torch.isfinite(row).all() for row in rows_of(two.run, "user").values())


def test_a_loss_over_the_whole_batch(go: Go) -> None:
    """Two towers of rows, with the rest of the batch as negatives."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = (mh.Embedding(500, 6, lr=0.1) for _ in range(2))
            self.heat = nn.Parameter(torch.zeros(()))

    def embed(model: Pairs, batch: Any) -> tuple[Tensor, Tensor]:
        return model.user(batch["user"]), model.item(batch["items"][:, 0])

    def apart(model: Pairs, left: Tensor, right: Tensor) -> Tensor:
        scores = left @ right.T * model.heat.exp()
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))

    def looks(model: Pairs, left: Tensor, right: Tensor) -> Tensor:
        return apart(model, left + model.user(torch.zeros(len(left), dtype=torch.int64)), right)

    given = mh.Task(
        model=Pairs,
        embed=embed,
        batch_loss=apart,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data=ratings(),
    )
    one, two = (go(given=given, workers=n, name=str(n)) for n in (1, 3))
    assert one.fingerprint == two.fingerprint
    before = FirstRows(Pairs().user.first, 6, seed=0, table="user")
    rows = rows_of(two.run, "user")
    ids = np.array(sorted(rows))
    moved = torch.from_numpy(before(ids)) != torch.stack([rows[int(i)] for i in ids])
    assert moved.any(1).all()
    with pytest.raises(RequestError, match="batch_loss looks up rows of 'user'"):
        go(given=replace(given, batch_loss=looks), name="looks")


def test_scores_and_predictions_see_the_rows(go: Go, tmp_path: Path) -> None:
    held = replace(
        make("rows"),
        held_out=ratings(64, seed=8),
        predict=lambda m, b: (m(b["user"], b["items"]), b["y"]),
        scores={"error": lambda made, right: (made - right).square().mean()},
    )
    report = go("train.seed=7", given=held)
    model = mh.load(report.run, held)
    with torch.no_grad():  # some ids are new, and read as their first values
        expected = float(rate(model, ratings(64, seed=8)))
    assert report.scores["error"] == pytest.approx(expected, rel=1e-6)
    assert mh.evaluate(report.run, held)["error"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("init", [0.1, (-1.0, 1.0), "zeros"])
def test_ids_of_any_shape(init: Any) -> None:
    table = mh.Embedding(100, 5, init=init)
    for ids in (torch.zeros(0), torch.zeros(2, 0), torch.tensor(3), torch.tensor([[1, 2]])):
        for kind in (torch.int32, torch.int64):
            assert table(ids.to(kind)).shape == (*ids.shape, 5)


# ---- what is refused, and how


def test_ids_that_are_none_and_tables_that_cannot_be(go: Go) -> None:
    with pytest.raises(TaskError, match=r"ids as torch\.float32"):
        mh.Embedding(5, 2)(torch.ones(3))
    with pytest.raises(ConfigError, match="rows must be at least 1"):
        mh.Embedding(0, 2)
    with pytest.raises(ConfigError, match="standard deviation"):
        mh.Embedding(5, 2, init="xavier")
    with pytest.raises(OptimizerRefused, match="no optimizer 'adamw'; there are sgd"):
        mh.Embedding(5, 2, optimizer="adamw")
    with pytest.raises(OptimizerRefused, match="lr=-1, which is out of range"):
        mh.Embedding(5, 2, lr=-1)
    with pytest.raises(ConfigError, match="whole numbers"):
        mh.Embedding(1e6, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="a table is saved under its name"):
        go(given=replace(make("rows"), model=lambda: nn.ModuleDict({"user id": Factors()})))
    with pytest.raises(RequestError, match="no parameter beside them"):
        go(given=replace(make("rows"), model=lambda: nn.Sequential(mh.Embedding(5, 2))))
    assert torch.equal(mh.Embedding(5, 2)(torch.tensor([3])).mul_(0), torch.zeros(1, 2))
    with pytest.raises(OptimizerRefused, match="momentum"):
        mh.Embedding(5, 2, optimizer="sgd", momentum=0.9)
    for setting in ("train.ema=0.9", "train.compile=true", "train.collective=gloo"):
        with pytest.raises(RequestError, match=r"mh\.Embedding"):
            go(setting, name=setting)
    with pytest.raises(RequestError, match=r"mh\.Embedding"):
        go(sync="server:count=1,mode=async")


def test_more_ids_than_rows(go: Go) -> None:
    with pytest.raises(RunFailed, match="table 'user'"):
        go(given=replace(make("rows"), model=Small))


def test_a_full_table_is_gone_on_with_when_it_may_have_more_rows(
    go: Go, calm: Callable[..., str], launcher: Launcher, tmp_path: Path
) -> None:
    """How many there may be is no part of the result: the bits are those of a large one."""
    with pytest.raises(RunFailed, match="more rows in the task and resume"):
        go("checkpoint.every_steps=1", given=replace(make("rows"), model=lambda: Sized(20)))
    how: dict[str, Any] = {"quiet": True, "launcher": launcher}
    report = mh.resume(tmp_path / "run", make("rows"), **how)
    assert report.step == 12 and report.fingerprint == calm()
    small = replace(make("rows"), model=lambda: Sized(2))
    with pytest.raises(RunFailed, match=r"table 'user' is full.*may have 2 rows, and has \d\d"):
        mh.resume(report.run, small, settings=["train.steps=13"], **how)


class Sized(Factors):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.user = mh.Embedding(rows, 8, init=0.3)


class UsersOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = mh.Embedding(4000, 8)
        self.join, self.head = nn.Linear(13, 6), nn.Linear(6, 1)


class Small(Factors):
    def __init__(self) -> None:
        super().__init__()
        self.user = mh.Embedding(20, 8)


def test_another_table_than_was_saved(go: Go, launcher: Launcher, tmp_path: Path) -> None:
    report = go("train.steps=2")
    with pytest.raises(RequestError, match=r"table 'user' with weights\[8\], sum\[8\]"):
        mh.resume(
            report.run,
            task(optimizer="adam"),
            settings=["train.steps=4"],
            quiet=True,
            launcher=launcher,
        )
    with pytest.raises(CheckpointMismatch, match="has table 'item', which the model has not"):
        mh.load(report.run, replace(make("rows"), model=UsersOnly))
    with pytest.raises(RunDirError, match="no table 'users'; there are: item, user"):
        mh.open_table(report.run, "users")
    with pytest.raises(TaskError, match="cannot be pickled"):
        torch.save(mh.load(report.run, make("rows")), os.devnull)
