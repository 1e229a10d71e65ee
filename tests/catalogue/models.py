"""Models: odd parameters, odd modules, odd ways through them."""

# pyright: basic

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.catalogue.building import HEAD, Net, bag, embedding, linear, net, param, with_layer
from tests.catalogue.case import Case, Settings, mlp, pictures, rows, sgd, tokens


def tied() -> nn.Module:
    net: Any = Net(
        lambda m, t: m.head(torch.tanh(m.embed(t)).mean(1))[:, :3],
        embed=nn.Embedding(20, 8),
        head=nn.Linear(8, 20, bias=False),
    )
    net.head.weight = net.embed.weight
    return net


def twice_the_same_block() -> nn.Module:
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return nn.Sequential(block, block, nn.Linear(6, 3))


def sometimes(m: Any, x: Tensor) -> Tensor:
    if float(x.sum()) > 0:
        x = x + m.other(x)
    return m.head(x)


def only_in_full_batches(m: Any, x: Tensor) -> Tensor:
    """In batches of 5 the micro-batches hold 3 and 2; the layer then waits for a whole step."""
    if len(x) == 3 and float(x[0, 0]) > 0.9:
        x = x + m.other(x)
    return m.head(x)


def channels_last() -> nn.Module:
    net: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    return net.to(memory_format=torch.channels_last)


def transposed() -> nn.Module:
    weight = nn.Parameter(torch.randn(3, 6).t() * 0.3)
    return Net(lambda m, x: x @ m.weight, weight=weight)


def complex_weights() -> nn.Module:
    return Net(
        lambda m, x: (x.to(torch.complex64) @ m.weight).abs() + m.scale,
        weight=param(6, 3, dtype=torch.complex64),
        scale=param(3),
    )


def mixed_dtypes() -> nn.Module:
    return Net(
        lambda m, x: m.last(m.first(x.double()).to(torch.bfloat16)).float(),
        first=nn.Linear(6, 8, dtype=torch.float64),
        last=nn.Linear(8, 3, dtype=torch.bfloat16),
    )


def frozen_part() -> nn.Module:
    net: Any = mlp()
    net[0].requires_grad_(False)
    return net


def recurrent(kind: type[nn.Module], out: int = 8, **options: Any) -> nn.Module:
    return Net(
        lambda m, t: m.head(m.cells(m.embed(t))[0][:, -1]),
        embed=nn.Embedding(20, 5),
        cells=kind(5, 8, batch_first=True, **options),
        head=nn.Linear(out, 3),
    )


def attention() -> nn.Module:
    return Net(
        lambda m, t: m.head(m.look(m.embed(t), m.embed(t), m.embed(t))[0].mean(1)),
        embed=nn.Embedding(20, 8),
        look=nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True),
        head=nn.Linear(8, 3),
    )


def transformer(nested: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return Net(
        lambda m, t: m.head(m.encode(m.embed(t), src_key_padding_mask=t == 0).mean(1)),
        embed=nn.Embedding(20, 8, padding_idx=0),
        encode=nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested),
        head=nn.Linear(8, 3),
    )


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def symmetric() -> nn.Module:
    net: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    nn.utils.parametrize.register_parametrization(net[0], "weight", Symmetric())
    return net


def checkpointed(reentrant: bool) -> nn.Module:
    def way(m: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_() if reentrant else x
        return m.head(checkpoint(m.body, x, use_reentrant=reentrant))

    body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU())
    return Net(way, body=body, head=nn.Linear(8, 3))


def hooked() -> nn.Module:
    net: Any = mlp()
    net[0].register_forward_hook(lambda m, i, o: o * 1.1)
    net[1].register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))
    net[2].register_forward_pre_hook(lambda m, i: (i[0] + 0.01,))
    net[2].weight.register_hook(lambda g: g * 3.0)
    return net


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def experts(m: Any, x: Tensor) -> Tensor:
    """Each record goes to the one that scores best; those that get nobody are not called."""
    scores = m.gate(x).softmax(1)
    best, which = scores.max(1)
    out = x.new_zeros(len(x), 3)
    for k, expert in enumerate(m.experts):
        mine = which == k
        if mine.any():
            out = out.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
    return out * best[:, None]


def early_exit(m: Any, x: Tensor) -> Tensor:
    x = m.first(x).relu()
    out = m.exit(x)
    if float(out.detach().softmax(1).max()) > 0.6:
        return out
    return m.head(m.second(x).relu())


def deep_at_random(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        if not m.training or torch.rand(()) < 0.6:
            x = x + layer(x)
    return m.head(x)


def noise(m: Any, x: Tensor) -> Tensor:
    import random

    import numpy as np

    x = m.first(x) * float(np.random.uniform(0.5, 1.5)) + random.gauss(0, 0.1)
    return F.gumbel_softmax(m.head(x), tau=0.7)


def dropouts() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Dropout2d(0.3), nn.SELU(), nn.AlphaDropout(0.2),
        nn.FeatureAlphaDropout(0.2), nn.Flatten(), nn.RReLU(), nn.Linear(16, 3),
    )  # fmt: skip


def old_weight_norm(layer: nn.Module) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(layer)


T, P = tokens(), pictures()
CASES = [
    Case("mlp", "The plainest model."),
    Case("one-micro-batch", "One micro-batch a step is a loop one would write by hand.",
         settings=Settings(batch=12, micro_batch=12)),
    Case("a-module-itself", "A ready-made module is taken with its weights.", model=mlp()),
    Case("tied", "A weight under two names is one weight, with one gradient.", model=tied, data=T),
    Case("same-block-twice", "A module used twice gets both gradients, added by autograd.",
         model=twice_the_same_block),
    Case("never-used", "A parameter without gradient is skipped: no weight decay.",
         model=net(lambda m, x: m.head(x), head=HEAD, never=linear(4, 4))),
    Case("sometimes-used", "A layer that some micro-batches use counts as zero in the others.",
         model=net(sometimes, head=HEAD, other=linear(6, 6))),
    Case("used-in-some-steps", "A layer that no micro-batch of a step uses is skipped in it.",
         model=net(only_in_full_batches, head=HEAD, other=linear(6, 6))),
    Case("frozen-part", "Frozen weights stay as they are.", model=frozen_part),
    Case("nothing-frozen-by-the-optimizer", "Trainable weights that the optimizer does not have.",
         optimizer=lambda m: torch.optim.AdamW(m[2].parameters(), lr=1e-2)),
    Case("size-zero", "A parameter without elements.",
         model=net(lambda m, x: m.head(x) + m.none.sum(), head=HEAD, none=lambda: param(0))),
    Case("scalars", "Parameters of shape [].",
         model=net(lambda m, x: m.head(x) * m.a + m.b, head=HEAD, a=lambda: param(),
                   b=lambda: param())),
    Case("five-dimensions", "A convolution over volumes.",
         model=lambda: nn.Sequential(nn.Unflatten(1, (1, 3, 4, 4)), nn.Conv3d(1, 4, 3),
                                     nn.Flatten(), nn.Linear(16, 3)),
         data={"x": pictures()["x"].flatten(1), "y": pictures()["y"]}),
    Case("channels-last", "Weights that lie in memory in another order.",
         model=channels_last, data=P),
    Case("transposed", "A weight that is a transposed matrix.", model=transposed),
    Case("complex", "Complex weights.", model=complex_weights, optimizer=sgd),
    Case("float64", "Double weights.", model=lambda: mlp().double(),
         data={"x": rows()["x"].double(), "y": rows()["y"]}),
    Case("mixed-dtypes", "Double, bfloat16 and no float32 in one model.", model=mixed_dtypes),
    Case("half", "Weights in float16.",
         model=net(lambda m, x: m.head(x.half()).float(), head=lambda: nn.Linear(6, 3).half()),
         optimizer=sgd),
    Case("embedding", "Rows that are looked up, densely.", model=embedding(padding_idx=0), data=T),
    Case("embedding-sparse", "Sparse gradients are made dense.",
         model=embedding(sparse=True), data=T),
    Case("embedding-by-frequency", "Gradients scaled by frequency in the micro-batch.",
         model=embedding(scale_grad_by_freq=True), data=T),
    Case("embedding-max-norm", "Rows are shortened once, whichever micro-batches use them.",
         model=embedding(max_norm=1.0), data=T),
    Case("bag-mean", "EmbeddingBag.", model=bag(mode="mean"), data=T),
    Case("bag-max-sparse-norm", "EmbeddingBag with sparse gradients and max_norm.",
         model=bag(mode="sum", sparse=True, max_norm=1.5), data=T),
    Case("lstm", "Both directions, two layers, dropout between them.",
         model=lambda: recurrent(nn.LSTM, 16, num_layers=2, bidirectional=True, dropout=0.3),
         data=T),
    Case("lstm-projected", "An LSTM with proj_size.",
         model=lambda: recurrent(nn.LSTM, 4, proj_size=4), data=T),
    Case("gru", "A GRU.", model=lambda: recurrent(nn.GRU), data=T),
    Case("attention", "Attention with dropout.", model=attention, data=T),
    Case("transformer", "With padding and dropout.", model=lambda: transformer(False), data=T),
    Case("weight-norm", "As a parametrization.",
         model=with_layer(lambda layer: parametrizations.weight_norm(layer))),
    Case("weight-norm-old", "The one with hooks.", model=with_layer(old_weight_norm)),
    Case("orthogonal", "A parametrization with state.",
         model=with_layer(lambda layer: parametrizations.orthogonal(layer))),
    Case("symmetric", "A parametrization of one's own.", model=symmetric),
    Case("checkpoint", "Activations computed again in backward, with the same dropout.",
         model=lambda: checkpointed(False), slow=True),
    Case("checkpoint-reentrant", "The older kind.", model=lambda: checkpointed(True), slow=True),
    Case("in-place", "Activations in place.",
         model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3),
                                     nn.Hardtanh(inplace=True))),
    Case("hooks", "Hooks before and after forward, in backward, and on a weight's gradient.",
         model=hooked),
    Case("straight-through", "A custom autograd.Function.",
         model=net(lambda m, x: m.head(Sign.apply(m.first(x))), first=linear(6, 8),
                   head=linear(8, 3))),
    Case("experts", "Experts without records have no gradient.",
         model=net(experts, gate=linear(6, 4),
                   experts=lambda: nn.ModuleList(nn.Linear(6, 3) for _ in range(4)))),
    Case("early-exit", "How deep it goes depends on the data.",
         model=net(early_exit, first=linear(6, 8), exit=linear(8, 3), second=linear(8, 8),
                   head=linear(8, 3))),
    Case("stochastic-depth", "Layers left out at random.",
         model=net(deep_at_random, head=HEAD,
                   layers=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(3)))),
    Case("dropouts", "Every kind of dropout.", model=dropouts, data=P),
    Case("noise", "Randomness of torch, numpy and random in forward.",
         model=net(noise, first=linear(6, 8), head=linear(8, 3))),
    Case("parameter-list", "Parameters in a list and in a dict.",
         model=lambda: Net(lambda m, x: sum(x @ p for p in m.some) + m.more["a"],
                           some=nn.ParameterList([param(6, 3), param(6, 3)]),
                           more=nn.ParameterDict({"a": param(3)}))),
    Case("wide", "Tensors of several blocks, whose parts different workers update.",
         model=lambda: nn.Sequential(nn.Linear(6, 3001), nn.GELU(), nn.Linear(3001, 11),
                                     nn.ReLU(), nn.Linear(11, 3))),
]  # fmt: skip
