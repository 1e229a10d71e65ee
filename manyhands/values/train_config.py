# SPDX-License-Identifier: Apache-2.0
"""The settings of training itself, `[train]`: each with its manual underneath."""

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.values.errors import ConfigError
from manyhands.values.setting_fields import setting


def at_least(section: str, name: str, value: float | None, least: float, cure: str = "") -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"{section}.{name} must be at least {least}, got {value}. {cure}".strip())


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    batch: int = setting(128, "weights")
    """Records per optimizer step, over all workers together."""

    micro_batch: int | None = setting(None, "weights")
    """Records per forward pass: the unit that is dealt to workers. Must divide `batch`, and is part
    of the result (the number of workers is not). Left out: an eighth of the batch where that is
    whole, else the nearest larger power-of-two part."""

    epochs: int | None = setting(None, "end")
    """Passes over the data. Give this or `steps`; with neither, one epoch."""

    steps: int | None = setting(None, "end")
    """Optimizer steps, instead of epochs."""

    seed: int = setting(0, "weights")
    """Of weights, order of records and all randomness in training."""

    clip_norm: float | None = setting(None, "weights", live=True)
    """Gradients whose global norm is larger are scaled down to it."""

    not_finite: Literal["stop", "skip"] = setting("stop", "weights")
    """What becomes of a step whose loss or gradient is NaN or infinite. It is never applied: "stop"
    ends the run and names the micro-batch, its records and the first parameter; "skip" leaves
    weights, optimizer and buffers as they were, writes the step down as skipped, and goes on."""

    precision: Literal["fp32", "bf16", "fp16"] = setting("fp32", "weights")
    """"bf16" and "fp16" run forward under autocast. In "fp16" losses are scaled as by torch's
    GradScaler: a step whose gradient is not finite is skipped, and the scale halved, whatever
    `not_finite` says (which is about losses then)."""

    checkpoint_activations: tuple[str, ...] | str | None = setting(None, "weights")
    """Modules that keep no activations, which backward computes again, to save memory: names, or
    patterns in which `*` stands for one part, as in ["layers.*"]. Gradients have the bits that they
    have without it, except where a weight is used by several of them."""

    compile: bool = setting(False, "weights")
    """Compute forward and backward with code that torch.compile makes of the model. Part of the
    result: it rounds otherwise. Needs a C++ compiler, the same one, on every host."""

    threads: int = setting(1, "weights")
    """Threads in each worker. Part of the result: it changes how a matrix product is rounded."""

    portable: bool = setting(False, "weights")
    """Compute with kernels that give the same bits on every x86-64-v3 processor (AVX2 and FMA: all
    of the last ten years), whoever made it, so that unlike hosts compute alike. Slower, and part of
    the result: these bits are not those of a run without it. In fp32 only."""

    unlike: Literal["refuse", "warn"] = setting("refuse", "nothing")
    """A host that computes other bits than the first one, because its processor has other kernels
    (or, with `compile`, because its compiler is another one), is turned away; or ("warn") takes
    part, and the weights then depend on who computed what."""

    device: Literal["cpu", "cuda"] = setting("cpu", "weights")
    """"cuda" gives each worker the GPU of its rank on the host. Written, not tried."""

    sync: Literal["allreduce", "server", "alone"] = setting("allreduce", "nothing")
    """How workers agree. "allreduce": each updates a part of the weights; "server": servers do, and
    workers only compute ([server]); "alone" is one worker and plain PyTorch: the reference."""

    collective: Literal["auto", "shared", "sockets", "mpi", "gloo", "nccl"] = setting(
        "auto", "nothing"
    )
    """How bytes move. Every choice gives the same bits; "auto" says which it took and why. With
    "sockets" (and "auto") and "mpi", workers of a host share its memory, and hosts speak over that
    network; with "gloo" and "nccl" every worker has memory of its own."""

    overlap: bool = setting(True, "nothing")
    """Between hosts: send gradients while the last micro-batch is still being computed."""

    encrypt: Literal["auto"] | bool = setting("auto", "nothing")
    """Between hosts: true seals all that workers send each other, gradients and weights (over
    "sockets"; "mpi", "gloo" and "nccl", which speak for themselves, are refused). "auto" does not
    yet, because it cost more than 5 % of the speed where it was measured, and says so; false is
    silent about it."""

    ema: float | None = setting(None, "saved")
    """Keep an exponential moving average of the trained weights with this decay, as in 0.999:
    torch's (`AveragedModel` with `get_ema_multi_avg_fn`), taken after every step that is not
    skipped. Saved as ema.safetensors beside the weights, which it does not change."""

    swa: int | None = setting(None, "saved")
    """Keep the mean of the weights after each epoch, from this epoch (counted from 1) on: torch's
    stochastic weight averaging (`get_swa_multi_avg_fn`). Saved as swa.safetensors; until that epoch
    has ended, it holds the trained weights."""

    start_from: str | None = setting(None, "weights")
    """Weights to begin with: another run's folder, or a safetensors file."""

    audit_every: int | None = setting(None, "nothing")
    """After this many steps, compute one micro-batch a second time, on another worker, and compare
    every bit. A worker that computes wrongly is named and replaced."""

    def __post_init__(self) -> None:
        at_least("train", "batch", self.batch, 1)
        at_least("train", "micro_batch", self.micro_batch, 1)
        at_least("train", "epochs", self.epochs, 1)
        at_least("train", "steps", self.steps, 1)
        at_least("train", "threads", self.threads, 1)
        at_least("train", "audit_every", self.audit_every, 1)
        at_least("train", "swa", self.swa, 1)
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(
                f"train.ema is a decay between 0 and 1, as in 0.999; got {self.ema}. To keep no "
                "moving average, leave it out."
            )
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ConfigError(
                f"train.clip_norm must be a positive number, got {self.clip_norm}. "
                "To train without clipping, leave it out."
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"train.seed must be between 0 and 2**63 - 1, got {self.seed}.")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ConfigError(
                f"train.batch ({self.batch}) is not divisible by train.micro_batch "
                f"({self.micro_batch}). {_divisors_near(self.batch, self.micro_batch)}"
            )
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("train.epochs and train.steps are both set; leave one of them out.")
        if self.portable and self.precision != "fp32":
            raise ConfigError(
                f'train.portable = true does not hold with train.precision = "{self.precision}": '
                'torch chooses products in it by the processor. Use "fp32".'
            )
        if self.compile and (self.portable or self.checkpoint_activations):
            other = "portable" if self.portable else "checkpoint_activations"
            why = (
                "what a compiler makes depends on the processor"
                if self.portable
                else "what it makes keeps or computes again as it sees fit"
            )
            raise ConfigError(f"train.compile and train.{other}: {why}. Leave out one of them.")
        if self.device == "cpu" and self.collective == "nccl":
            raise ConfigError(
                'train.collective = "nccl" needs train.device = "cuda"; on the CPU use "shared", '
                '"sockets", "gloo" or "auto".'
            )
        if self.sync == "server" and self.collective in ("gloo", "nccl"):
            raise ConfigError(
                f'train.sync = "server" with train.collective = "{self.collective}": there every '
                'worker has weights of its own, and a server none to update. Use "auto".'
            )
        if self.device == "cuda" and self.collective not in ("auto", "nccl"):
            raise ConfigError(
                f'train.collective = "{self.collective}" works on the CPU; with train.device = '
                '"cuda" use "nccl" or "auto".'
            )

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """The patterns of `checkpoint_activations`."""
        given = self.checkpoint_activations or ()
        return (given,) if isinstance(given, str) else given

    @property
    def micro_batch_size(self) -> int:
        return self.micro_batch or self.batch // math.gcd(self.batch, 8)

    @property
    def micro_batches(self) -> int:
        """M: how many leaves the sum of a full step has, and so the most workers it can use."""
        return self.batch // self.micro_batch_size


def _divisors_near(batch: int, micro_batch: int) -> str:
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    below = max(d for d in divisors if d <= micro_batch) if micro_batch <= batch else batch
    above = min((d for d in divisors if d >= micro_batch), default=batch)
    nearest = f"{below} or {above}" if below != above else str(below)
    return f"Set train.micro_batch to {nearest}."
