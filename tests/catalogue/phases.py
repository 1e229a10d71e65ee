"""Several optimizers, each with a loss of its own: GANs, critics, alternating updates."""

# pyright: basic

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.catalogue.case import Case, Settings, classify
from tests.catalogue.data import Made, augmented
from tests.catalogue.optimizers import Noisy

lr: Any = torch.optim.lr_scheduler


class Gan(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.g = nn.Sequential(nn.Linear(4, 8), middle, nn.ReLU(), nn.Linear(8, 6))
        self.d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(8, 1))

    def fake(self, batch: Any) -> Tensor:
        return self.g(torch.randn(len(batch["x"]), 4))


def d_loss(model: Gan, batch: Any) -> Any:
    real, fake = model.d(batch["x"]), model.d(model.fake(batch).detach())
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    return loss, {"real": real.mean(), "fake": fake.mean()}


def g_loss(model: Gan, batch: Any) -> Any:
    return F.softplus(-model.d(model.fake(batch))).mean()


def critic_loss(model: Gan, batch: Any) -> Any:
    fake = model.fake(batch).detach()
    mix = torch.rand(len(fake), 1)
    between = (mix * batch["x"] + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model.d(between).sum(), between, create_graph=True)
    penalty = (slope.norm(2, 1) - 1).square().mean()
    return model.d(fake).mean() - model.d(batch["x"]).mean() + 10 * penalty


def generator_loss(model: Gan, batch: Any) -> Any:
    return -model.d(model.fake(batch)).mean()


def adam(part: str, rate: float = 1e-2) -> Any:
    return lambda model: torch.optim.Adam(getattr(model, part).parameters(), rate, betas=(0.5, 0.9))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)


def actor_loss(model: ActorCritic, batch: Any) -> Any:
    body = torch.tanh(model.body(batch["x"]))
    gain = batch["y"].float() - model.critic(body).squeeze(1).detach()
    return (F.cross_entropy(model.actor(body), batch["y"], reduction="none") * gain).mean()


def value_loss(model: ActorCritic, batch: Any) -> Any:
    body = torch.tanh(model.body(batch["x"])).detach()
    return F.mse_loss(model.critic(body).squeeze(1), batch["y"].float())


GAN = {"loss": {"d": d_loss, "g": g_loss}, "optimizer": {"d": adam("d"), "g": adam("g", 3e-3)}}
WGAN = {
    "model": lambda: Gan(norm=False),
    "loss": {"c": critic_loss, "g": generator_loss},
    "optimizer": {
        "c": lambda model: torch.optim.RMSprop(model.d.parameters(), 1e-2),
        "g": adam("g"),
    },
}
THIRDS = {f"{k}": lambda model, k=k: torch.optim.SGD(model[k].parameters(), 0.1) for k in (0, 1, 2)}

CASES = [
    Case("gan", "A generator sees the discriminator's new weights.", model=Gan, **GAN),
    Case("wgan-gp", "Gradient penalty; the generator every third.", **WGAN, every={"g": 3}),
    Case(
        "wgan-gp-later",
        "The generator in the last of three rounds.",
        **WGAN,
        every={"g": 3},
        offset={"g": 2},
    ),
    Case(
        "gan-own-batches",
        "Each step takes the next batch.",
        model=Gan,
        **GAN,
        share_batch=False,
        every={"d": 1, "g": 2},
    ),
    Case(
        "gan-schedules",
        "One schedule by the steps of its own optimizer.",
        model=Gan,
        **GAN,
        schedule={"g": lambda o: lr.StepLR(o, 2, 0.5)},
    ),
    Case(
        "gan-schedules-by-epoch",
        "Both schedules by epochs.",
        model=Gan,
        **GAN,
        schedule={n: lambda o: lr.ExponentialLR(o, 0.3) for n in "dg"},
        schedule_every="epoch",
        settings=Settings(epochs=3),
    ),
    Case(
        "gan-clipped",
        "Each phase clips its own gradient.",
        model=Gan,
        **GAN,
        settings=Settings(clip_norm=0.1),
    ),
    Case(
        "actor-critic",
        "Different optimizers over different parts.",
        model=ActorCritic,
        loss={"actor": actor_loss, "critic": value_loss},
        optimizer={
            "actor": lambda m: torch.optim.SGD([*m.body.parameters(), *m.actor.parameters()], 0.1),
            "critic": lambda m: torch.optim.Adagrad(m.critic.parameters(), 0.1),
        },
    ),
    Case(
        "three-phases-in-turn",
        "In each round one of three is due.",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)),
        loss={name: classify for name in THIRDS},
        optimizer=THIRDS,
        every={"0": 3, "1": 3, "2": 3},
        offset={"1": 1, "2": 2},
    ),
    Case(
        "whole-tensors-in-phases",
        "One of them looks at whole tensors.",
        model=Gan,
        loss=GAN["loss"],
        optimizer={
            "d": adam("d"),
            "g": lambda m: torch.optim.Adafactor(m.g.parameters(), lr=1e-2),
        },
    ),
    Case(
        "own-optimizers-in-phases",
        "One of them is not known to us, and draws random numbers.",
        model=Gan,
        loss=GAN["loss"],
        optimizer={"d": adam("d"), "g": lambda m: Noisy(m.g.parameters())},
    ),
    Case(
        "a-batch-drawn-once",
        "What is drawn at random in fetching a batch is the same for all phases of a round.",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)),
        loss={"a": classify, "b": classify},
        optimizer={
            "a": lambda m: torch.optim.SGD(m[0].parameters(), 0.1),
            "b": lambda m: torch.optim.SGD(m[1].parameters(), 0.1),
        },
        data=Made(augmented),
    ),
    Case(
        "in-two-optimizers",
        "A parameter belongs to one optimizer.",
        model=Gan,
        loss=GAN["loss"],
        optimizer={"d": adam("d"), "g": lambda m: torch.optim.SGD(m.parameters(), 0.1)},
        refused="parameter 'd.0.weight' is in two optimizers, 'd' and 'g'",
    ),
    Case(
        "a-list-of-optimizers",
        "Several optimizers have names.",
        model=Gan,
        loss=g_loss,
        optimizer=lambda m: [torch.optim.SGD(m.parameters(), 0.1)],
        refused="Several optimizers are given by name",
    ),
]
