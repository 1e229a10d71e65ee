"""Losses over the whole batch: embeddings of all micro-batches, compared with each other."""

# pyright: basic

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.catalogue.building import linear, net, param, row_norm
from tests.catalogue.case import Case, Settings, mlp, sgd, tokens

ONE = Settings(batch=12, micro_batch=12)
CLIPPED = Settings(clip_norm=0.05)


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


def warm() -> nn.Parameter:
    return nn.Parameter(torch.tensor(0.7))


TOWERS = net(lambda m, x: m.left(x), left=tower, right=tower, heat=warm)


def both(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model.left(batch["x"]), model.right(batch["x"].flip(1))


def pairs(model: Any, left: Tensor, right: Tensor) -> Any:
    """Each record's two sides belong together, and to no other record's."""
    left, right = F.normalize(left, dim=1), F.normalize(right, dim=1)
    scores = left @ right.T * model.heat.exp()
    mine = torch.arange(len(left))
    value = F.cross_entropy(scores, mine) + F.cross_entropy(scores.T, mine)
    return value, {"right": (scores.argmax(1) == mine).float().mean()}


def with_label(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch["x"]), batch["y"]


def batch_hard(model: Any, made: Tensor, label: Tensor) -> Tensor:
    """The furthest of the same class against the nearest of another."""
    apart = torch.cdist(made, made) + 1e-3
    same = label[:, None] == label[None]
    far = apart.masked_fill(~same, -1.0).amax(1)
    near = apart.masked_fill(same, 1e3).amin(1)
    return F.softplus(far - near).mean()


def one(model: Any, batch: Any) -> Tensor:
    return model(batch["x"])


def noisy(model: Any, batch: Any) -> tuple[Tensor, ...]:
    """Two views of a record, drawn with torch and with random."""
    return tuple(model(batch["x"] + random.random() * torch.randn_like(batch["x"])) for _ in "ab")


def like_each_other(model: Any, made: Tensor) -> Tensor:
    return F.cross_entropy(made @ made.T / 0.5, torch.arange(len(made)))


def spread(model: Any, a: Tensor, b: Tensor) -> Tensor:
    """Draws, too."""
    a = F.dropout(a, 0.2) + 0.1 * torch.randn_like(a)
    return F.mse_loss(a, b) - a.var(0).mean().clamp(max=1.0)


SHARED = net(lambda m, x: m.body(x), body=mlp, project=linear(3, 3), never=linear(3, 3))


def projected(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """With a layer that batch_loss uses too, and something that needs no gradient."""
    soft = torch.stack([batch["x"][:, k] for k in range(3)], dim=1).softmax(1)
    return model.project(model.body(batch["x"])), soft


def through_projection(model: Any, made: Tensor, soft: Tensor) -> Tensor:
    scores = model.project(made.relu()) + made @ model.project.weight
    return F.cross_entropy(scores, soft) + like_each_other(model, scores)


def unused(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model[0](batch["x"]), model(batch["x"])


def reads() -> nn.Module:
    return nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)


TEXT = net(
    lambda m, t: m.reader(m.table(t))[0][:, -1],
    table=lambda: nn.Embedding(20, 8),
    reader=reads,
)


# Refused


def in_place(model: Any, batch: Any) -> Tensor:
    batch["x"] += 1
    return model(batch["x"])


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(6, 3), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.rand((), generator=self.generator)


def clamps(model: Any, left: Tensor, right: Tensor) -> Any:
    model.heat.data.clamp_(max=0.1)
    return pairs(model, left, right)


def norm_inside(model: Any, made: Tensor) -> Tensor:
    return like_each_other(model, model.norm(made))


def refuse(name: str, shows: str, refused: str, **rest: Any) -> Case:
    given: dict[str, Any] = {"embed": one, "batch_loss": like_each_other}
    return Case(f"batch-{name}", shows, refused=refused, **{**given, **rest})


def by(change: Callable[[Tensor], Any]) -> Callable[[Any, Any], Any]:
    return lambda model, batch: change(model(batch["x"]))


CASES = [
    Case(
        "batch-temperature",
        "Two towers with dropout, and a temperature that only the batch loss uses.",
        model=TOWERS,
        embed=both,
        batch_loss=pairs,
    ),
    Case(
        "batch-temperature-sgd",
        "The same with one optimizer more, and gradients that are clipped.",
        model=TOWERS,
        embed=both,
        batch_loss=pairs,
        optimizer=sgd,
        settings=CLIPPED,
    ),
    Case("batch-hard", "Labels among the embeddings.", embed=with_label, batch_loss=batch_hard),
    Case(
        "batch-one",
        "A step of a single micro-batch.",
        model=TOWERS,
        embed=both,
        batch_loss=pairs,
        settings=ONE,
    ),
    Case(
        "batch-norm-embedded",
        "Statistics are taken from one of the two passes.",
        model=row_norm(lambda: nn.BatchNorm1d(8)),
        embed=one,
        batch_loss=like_each_other,
    ),
    Case(
        "batch-norm-average-embedded",
        "So are those that count their calls.",
        model=row_norm(lambda: nn.BatchNorm1d(8, momentum=None)),
        embed=noisy,
        batch_loss=spread,
    ),
    Case(
        "batch-shared",
        "A layer in embed and in batch_loss, a layer in neither, and soft targets.",
        model=SHARED,
        embed=projected,
        batch_loss=through_projection,
    ),
    Case(
        "batch-unused",
        "An embedding that the loss does not look at.",
        embed=unused,
        batch_loss=lambda model, first, last: like_each_other(model, last),
    ),
    Case(
        "batch-lstm",
        "Kernels that compute other bits where no gradient is wanted.",
        model=TEXT,
        data=tokens(),
        embed=one,
        batch_loss=like_each_other,
    ),
    Case(
        "batch-only-direct",
        "Everything that is trained is in the batch loss.",
        model=net(lambda m, x: x, scale=lambda: param(6)),
        embed=one,
        batch_loss=lambda model, x: like_each_other(model, x * model.scale),
    ),
    refuse(
        "in-place", "A batch that embed writes to.", r"micro-batch \d of step 0", embed=in_place
    ),
    refuse("own-generator", "Masks that differ.", "embed gave other rows", model=Draws),
    refuse(
        "clamped",
        "Weights that the batch loss writes.",
        "writes to its parameter 'heat'",
        model=TOWERS,
        embed=both,
        batch_loss=clamps,
    ),
    refuse(
        "norm-inside",
        "A BatchNorm in the batch loss.",
        "batch_loss changes 'norm.running_mean'",
        model=net(lambda m, x: m.body(x), body=mlp, norm=lambda: nn.BatchNorm1d(3)),
        batch_loss=norm_inside,
    ),
    refuse("detached", "Nothing to train.", "does not depend", embed=by(lambda t: t.detach())),
    refuse("mean", "No rows.", "a tensor without rows", embed=by(lambda t: t.mean())),
    refuse("dict", "No tensor.", "embed returned dict", embed=by(lambda t: {"t": t})),
    refuse(
        "ragged",
        "Rows that differ in length.",
        r"float32\[rows, \d\]",
        embed=lambda model, batch: model(batch["x"])[:, : 1 + int(batch["i"].sum()) % 3],
    ),
    refuse(
        "weighted",
        "A weight has no meaning.",
        "batch_loss returned a weight",
        batch_loss=lambda model, t: (like_each_other(model, t), len(t)),
    ),
    refuse(
        "two-losses",
        "One number is made small.",
        "batch_loss returned 2 losses",
        batch_loss=lambda model, t: (like_each_other(model, t), t.square().mean()),
    ),
    refuse(
        "infinite",
        "A loss that is not finite over embeddings that are.",
        "the batch loss is inf at step 0, though",
        batch_loss=lambda model, t: like_each_other(model, t) / 0,
    ),
    refuse(
        "infinite-embedding",
        "Embeddings that are not finite: the micro-batch is named.",
        r"the loss is nan at step \d, micro-batch \d",
        embed=lambda model, batch: model(batch["x"]) / (batch["i"][:, None] != 20),
    ),
]
