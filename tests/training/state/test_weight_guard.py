"""Weights are written by the optimizer and by nobody else, or the writer is named."""

import faulthandler
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.training.memory.memory import Memory
from manyhands.training.state.replica import Replica
from manyhands.values.errors import TaskError
from tests.support.hands import segment

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, odd: "Callable[[Net], None]" = lambda net: None) -> None:
        super().__init__()
        self.odd = odd
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.odd(self)
        return self.last(self.first(x).relu())


def normalize(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.copy_(F.normalize(net.first.weight))


def other_memory(net: Net) -> None:
    net.first.weight.data = net.first.weight.data * 0.5


def unseen(net: Net) -> None:
    net.first.weight.data.mul_(0.5)


def another(net: Net) -> None:
    net.first.weight = nn.Parameter(net.first.weight.detach().clone())


def grows(net: Net) -> None:
    if not hasattr(net, "more"):
        net.more = nn.Linear(4, 4)


def thaws(net: Net) -> None:
    net.last.bias.requires_grad_()


def freezes(net: Net) -> None:
    net.first.bias.requires_grad_(False)


def hooks(net: Net) -> None:
    net.first.register_forward_hook(lambda *_: None)


def hooks_a_gradient(net: Net) -> None:
    net.first.weight.register_hook(lambda _: None)


def replica(net: nn.Module, fd: int | None, *, protect: bool) -> Replica:
    trainable = [p for p in net.parameters() if p.requires_grad]
    made = Replica(net, torch.optim.SGD(trainable, lr=0.1), None, Memory(fd), CPU, protect=protect)
    made.publish()
    made.adopt()
    return made


def compute(made: Replica) -> None:
    with made.guard:
        made.model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("protect", [True, False])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (normalize, r"module 'first' \(Linear\) writes to its parameter 'weight'"),
        (unseen, r"module 'first' \(Linear\) writes to its parameter 'weight'"),
        (other_memory, "module 'first' .* gives other memory to its parameter 'weight'"),
        (another, "module 'first' .* another one in the place of its parameter 'weight'"),
        (grows, "'more.weight' of the model was made while it computed"),
        (thaws, "'last.bias' was frozen when the model was built"),
        (freezes, "'first.bias' was frozen while a micro-batch was computed"),
        (hooks, "module 'first' was given a hook"),
        (hooks_a_gradient, "parameter 'first.weight' was given a hook"),
    ],
)
def test_who_writes_weights_is_named(
    odd: Callable[[Net], None], says: str, late: bool, protect: bool
) -> None:
    if late and protect and odd in (normalize, unseen):
        pytest.skip("a store to memory that can only be read: see below")
    if late and odd is grows:
        pytest.skip("names are looked at once in a while")
    if not late and odd in (hooks, hooks_a_gradient):
        pytest.skip("what a model does in its first forward, it does on every worker")
    net = Net()
    made = replica(net, None, protect=protect)
    if late:
        compute(made)
    net.odd = odd
    before = {name: lane.clone() for name, lane in made.weights.items()}
    with pytest.raises(TaskError, match=says):
        compute(made)
    if not late:  # it was a rehearsal
        assert all(torch.equal(before[name], lane) for name, lane in made.weights.items())


def test_mode_and_threads_end_with_the_micro_batch_that_changed_them() -> None:
    def changes(net: Net) -> None:
        net.first.eval()
        torch.set_num_threads(threads + 1)

    net, threads = Net(), torch.get_num_threads()
    net.last.eval()
    made = replica(net, None, protect=False)
    net.odd = changes
    for _ in range(2):
        compute(made)
        assert [net.training, net.first.training, net.last.training] == [True, True, False]
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize("shared", [True, False])
def test_a_store_to_protected_weights_ends_the_process_that_makes_it(shared: bool) -> None:
    with segment() as fd:
        net = Net()
        made = replica(net, fd if shared else None, protect=True)
        compute(made)
        if (child := os.fork()) == 0:
            faulthandler.disable()  # pytest's: it would tell of an end that is wanted
            with suppress(BaseException):
                net.odd = unseen
                compute(made)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
        compute(made)


def test_what_the_optimizer_writes_the_module_sees() -> None:
    net = Net()
    made = replica(net, None, protect=True)
    for lane in made.weights.values():
        lane.fill_(0.25)
    assert torch.equal(net.first.weight, torch.full((4, 4), 0.25))


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_stock_ways_to_shape_weights_are_no_alarm(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = Net()
    net.first = wrap(net.first)  # pyright: ignore[reportAttributeAccessIssue]
    made = replica(net, None, protect=True)
    before = {dtype: lane.clone() for dtype, lane in made.weights.items()}
    for _ in range(3):
        made.buffers.begin(alone=True)
        compute(made)
    assert all(torch.equal(before[dtype], lane) for dtype, lane in made.weights.items())


def as_attribute(net: Net) -> None:
    net.shadow = net.first.weight.data


def as_buffer(net: Net) -> None:
    net.register_buffer("shadow", net.first.weight.detach()[0])


def in_a_list(net: Net) -> None:
    vars(net.first)["shadows"] = [net.first.weight.data.view(-1)]


@pytest.mark.parametrize("give", [as_attribute, as_buffer, in_a_list])
def test_second_views_of_a_parameter_are_refused(give: Callable[[Net], None]) -> None:
    net = Net()
    give(net)
    with pytest.raises(TaskError, match="second view of the memory of parameter"):
        replica(net, None, protect=False)
