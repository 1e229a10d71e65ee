"""Buffers: running statistics, counters and whatever else forward changes beside the weights."""

# pyright: basic

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.catalogue.building import HEAD, conv_norm, linear, net, row_norm, vector, with_layer
from tests.catalogue.case import Case, Settings, pictures

P = pictures()


def batch_norm_frozen() -> nn.Module:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> "Frozen":
            return super().train(False)

    net: Any = nn.Sequential(nn.Linear(6, 8), Frozen(8), nn.ReLU(), nn.Linear(8, 3))
    net[1].running_mean.fill_(0.1)
    return net


def norm_twice(m: Any, x: Tensor) -> Tensor:
    return m.head(m.norm(m.second(F.relu(m.norm(m.first(x))))))


def norm_sometimes(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    return m.head(m.norm(x) if float(x.detach().sum()) > 0 else x)


def counts(m: Any, x: Tensor) -> Tensor:
    if m.training:
        m.calls += 1
    return m.head(x)


def averages(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    if m.training:
        m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return m.head(x - m.mean)


def assigns(m: Any, x: Tensor) -> Tensor:
    m.last = x.detach().mean(0)
    return m.head(x + m.last)


def old_spectral(layer: nn.Module) -> None:
    nn.utils.spectral_norm(layer)


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.4)
    prune.random_unstructured(layer, "bias", amount=2)


CASES = [
    Case("batch-norm", "Running statistics get each micro-batch's update, in order.",
         model=row_norm(lambda: nn.BatchNorm1d(8))),
    Case("batch-norm-2d", "The same over pictures.",
         model=conv_norm(lambda: nn.BatchNorm2d(4)), data=P),
    Case("batch-norm-3d", "And over films.", model=lambda: nn.Sequential(
             nn.Unflatten(2, (2, 2)), nn.BatchNorm3d(3), nn.Flatten(), nn.Linear(48, 3)), data=P),
    Case("batch-norm-average", "momentum=None is a plain average over all calls.",
         model=row_norm(lambda: nn.BatchNorm1d(8, momentum=None))),
    Case("batch-norm-untracked", "No running statistics.",
         model=row_norm(lambda: nn.BatchNorm1d(8, track_running_stats=False))),
    Case("batch-norm-not-affine", "Statistics and no weights.",
         model=row_norm(lambda: nn.BatchNorm1d(8, affine=False, momentum=0.3))),
    Case("batch-norm-frozen", "In eval mode inside a model that trains.", model=batch_norm_frozen),
    Case("batch-norm-twice", "Called twice in a forward.",
         model=net(norm_twice, first=linear(6, 8), second=linear(8, 8), head=linear(8, 3),
                   norm=lambda: nn.BatchNorm1d(8))),
    Case("batch-norm-sometimes", "Called in some micro-batches only.",
         model=net(norm_sometimes, first=linear(6, 8), head=linear(8, 3),
                   norm=lambda: nn.BatchNorm1d(8, momentum=None))),
    Case("batch-norm-one-record", "A micro-batch of one record, which BatchNorm2d can take.",
         model=conv_norm(lambda: nn.BatchNorm2d(4)),
         settings=Settings(batch=4, micro_batch=1), data=P),
    Case("group-norm", "GroupNorm.", model=conv_norm(lambda: nn.GroupNorm(2, 4)), data=P),
    Case("instance-norm", "Running statistics of InstanceNorm: merged as other float buffers.",
         model=conv_norm(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
         data=P),
    Case("layer-norm", "LayerNorm.", model=row_norm(lambda: nn.LayerNorm(8))),
    Case("rms-norm", "RMSNorm.", model=row_norm(lambda: nn.RMSNorm(8))),
    Case("spectral-norm", "Power iterations are buffers, and differ by micro-batch never.",
         model=with_layer(lambda layer: parametrizations.spectral_norm(layer))),
    Case("spectral-norm-old", "The one with hooks.", model=with_layer(old_spectral)),
    Case("pruned", "Masks are buffers, and what they hide stays.", model=with_layer(pruned)),
    Case("counter", "A whole-number buffer that counts calls.",
         model=net(counts, head=HEAD, calls=lambda: torch.zeros((), dtype=torch.long))),
    Case("averages", "A running mean of one's own: the weighted mean of the changes.",
         model=net(averages, first=linear(6, 8), head=linear(8, 3), mean=lambda: vector(8))),
    Case("assigned-buffer", "Forward puts another tensor in a buffer's place.",
         model=net(assigns, head=HEAD, last=lambda: vector(6))),
]  # fmt: skip
