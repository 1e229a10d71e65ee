"""Losses: what they return, what they draw, and what they do on the way."""

# pyright: basic

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.catalogue.building import HEAD, embedding, linear, net, row_norm
from tests.catalogue.case import Case, Settings, classify, mlp, sgd, tokens

ONE = Settings(batch=12, micro_batch=12)


def per_token(model: nn.Module, batch: Any) -> Any:
    """A mean over what is not padding; how much that is differs by micro-batch."""
    kept = batch["x"] > 6
    scores = model(batch["x"])[:, None].expand(-1, batch["x"].shape[1], -1)[kept]
    target = batch["y"][:, None].expand_as(kept)[kept]
    return F.cross_entropy(scores, target), kept.sum()


def often_nothing(model: nn.Module, batch: Any) -> Any:
    """Micro-batches without a record of class 0 count nothing, and yet are computed."""
    kept = batch["y"] == 0
    value = (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * kept).sum()
    return value / kept.sum().clamp(min=1), float(kept.sum())


def penalty(model: nn.Module, batch: Any) -> Tensor:
    """A gradient penalty: the gradient with respect to the records is part of the loss."""
    x = batch["x"].clone().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return F.cross_entropy(scores, batch["y"]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def weight_penalty(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) + 1e-3 * sum(p.square().sum() for p in model.parameters())


def adversarial(model: nn.Module, batch: Any) -> Tensor:
    """A second forward on records that were changed along the gradient of the first."""
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), batch["y"]), x)
    return F.cross_entropy(model(x.detach() + 0.1 * slope.sign()), batch["y"])


def mixup(model: nn.Module, batch: Any) -> Tensor:
    part = torch.distributions.Beta(0.4, 0.4).sample()
    other = torch.randperm(len(batch["x"]))
    scores = model(part * batch["x"] + (1 - part) * batch["x"][other])
    both = [F.cross_entropy(scores, y) for y in (batch["y"], batch["y"][other])]
    return part * both[0] + (1 - part) * both[1]


def balance(m: Any, x: Tensor) -> Tensor:
    """Keeps an auxiliary loss on the module, for the loss to find."""
    x = m.first(x)
    m.extra = x.square().mean()
    return m.head(x.relu())


def with_extra(model: Any, batch: Any) -> Tensor:
    return classify(model, batch) + 0.01 * model.extra


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    """Records of a micro-batch are compared with each other."""
    z = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


def two_views(model: nn.Module, batch: Any) -> Tensor:
    a, b = (model(batch["x"] + 0.1 * torch.randn_like(batch["x"])) for _ in range(2))
    return F.mse_loss(a, b) - a.var(0).mean().clamp(max=1.0)


def alternates(model: nn.Module, batch: Any) -> Tensor:
    """Which of two losses is taken is drawn for every micro-batch."""
    scores = model(batch["x"])
    if torch.rand(()) < 0.5:
        return F.cross_entropy(scores, batch["y"])
    return F.multi_margin_loss(scores, batch["y"])


def in_eval(model: nn.Module, batch: Any) -> Tensor:
    """A teacher pass in eval mode and without gradient, by the model itself."""
    model.eval()
    with torch.no_grad():
        teacher = model(batch["x"]).softmax(1)
    model.train()
    return classify(model, batch) + F.kl_div(
        model(batch["x"]).log_softmax(1), teacher, reduction="batchmean"
    )


def only_head(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        hidden = model[1](model[0](batch["x"]))
    return F.cross_entropy(model[2](hidden), batch["y"])


def functional(model: nn.Module, batch: Any) -> Tensor:
    """Through torch.func: weights given by hand, a gradient for each record."""
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def one(x: Tensor, y: Tensor) -> Tensor:
        scores = torch.func.functional_call(model, weights, (x[None],))
        return F.cross_entropy(scores, y[None])

    return torch.func.vmap(one)(batch["x"], batch["y"]).mean()


def inner_step(model: nn.Module, batch: Any) -> Tensor:
    """One step of MAML: weights of its own for the inner step, gradient through it."""
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def at(weights: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(
            torch.func.functional_call(model, weights, (batch["x"],)), batch["y"]
        )

    slopes = torch.autograd.grad(at(weights), list(weights.values()), create_graph=True)
    pairs = zip(weights.items(), slopes, strict=True)
    return at({name: w - 0.1 * g for (name, w), g in pairs})


def scaled_in_place(model: nn.Module, batch: Any) -> Tensor:
    loss = classify(model, batch)
    loss *= 2.0
    return loss


def backward_itself(model: nn.Module, batch: Any) -> Tensor:
    """Adds a gradient of its own before the one that is asked for."""
    (0.1 * model(batch["x"]).square().mean()).backward()
    return classify(model, batch)


CASES = [
    Case("mean-of-one-element", "A mean of shape [1] is a mean.",
         loss=lambda m, b: classify(m, b).reshape(1)),
    Case("numbers", "Numbers to log do not touch the weights.",
         loss=lambda m, b: (classify(m, b), {"records": len(b["x"]), "half": torch.tensor(0.5)})),
    Case("weight", "A mean over something else than records counts by its weight.",
         model=embedding(), loss=per_token, data=tokens()),
    Case("weight-and-numbers", "Both.",
         loss=lambda m, b: (classify(m, b), b["y"].sum() + 1, {"one": 1})),
    Case("weights-of-zero", "Micro-batches that count nothing.", loss=often_nothing),
    Case("weight-one-micro-batch", "A weight divides out.", settings=ONE,
         loss=lambda m, b: (classify(m, b), 7.0)),
    Case("weight-with-clip", "Clipped after it was divided.", settings=Settings(clip_norm=0.2),
         loss=lambda m, b: (classify(m, b), b["y"].sum() + 1)),
    Case("gradient-penalty", "A second derivative, through torch.autograd.grad.", loss=penalty,
         model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))),
    Case("weight-penalty", "The weights themselves are in the loss.", loss=weight_penalty),
    Case("adversarial", "A gradient with respect to the records, between two passes.",
         loss=adversarial),
    Case("mixup", "Random numbers in the loss.", loss=mixup),
    Case("auxiliary", "A loss kept on a module.", loss=with_extra,
         model=net(balance, first=linear(6, 8), head=linear(8, 3))),
    Case("contrastive", "Records of a micro-batch compared with each other.", loss=contrastive),
    Case("two-views", "Two noisy passes.", loss=two_views),
    Case("alternates", "Which loss is taken is drawn.", loss=alternates),
    Case("teacher-in-eval", "A pass in eval mode in between, with BatchNorm and dropout.",
         loss=in_eval, model=row_norm(lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2)))),
    Case("only-the-head", "Layers below a no_grad have no gradient.", loss=only_head),
    Case("functional", "torch.func: one forward for each record.", loss=functional, slow=True),
    Case("inner-step", "An inner step of gradient descent, and the gradient through it.",
         loss=inner_step),
    Case("scaled-in-place", "A loss that was changed in place.", loss=scaled_in_place),
    Case("backward-itself", "A gradient that was there before is added to.", loss=backward_itself),
    Case("loss-in-float64", "A loss in double, of weights in float.",
         loss=lambda m, b: F.cross_entropy(m(b["x"]).double(), b["y"])),
    Case("loss-in-bfloat16", "A loss in bfloat16, times a share that it rounds.",
         loss=lambda m, b: F.cross_entropy(m(b["x"]).bfloat16(), b["y"])),
    Case("sum-of-losses", "A list of losses, summed.",
         loss=lambda m, b: torch.stack([classify(m, b), m(b["x"]).square().mean()]).sum()),
    Case("clip", "The norm over all blocks of the gradient.", settings=Settings(clip_norm=0.1)),
    Case("clip-one-micro-batch", "torch's own clip_grad_norm_.",
         settings=Settings(batch=12, micro_batch=12, clip_norm=0.1), optimizer=sgd),
    Case("clip-wide", "Many blocks.", settings=Settings(clip_norm=0.05), optimizer=sgd,
         model=lambda: nn.Sequential(nn.Linear(6, 4001), nn.ReLU(), nn.Linear(4001, 11),
                                     nn.ReLU(), nn.Linear(11, 3))),
    Case("clip-unused", "What has no gradient has no norm.", settings=Settings(clip_norm=0.05),
         model=net(lambda m, x: m.head(x), head=HEAD, never=linear(4, 4))),
    Case("clip-not-reached", "A norm that is never reached changes nothing.",
         settings=Settings(clip_norm=1e6), model=mlp),
]  # fmt: skip
