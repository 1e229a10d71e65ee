"""Run by test_portable_kernels.py, in a process of its own: kernels are replaced for good."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from manyhands.training.compute.kernel_marks import fix_kernels
from manyhands.training.compute.portable_products import LARGE
from manyhands.values.errors import RequestError

FUNCTIONS = ["sqrt", "tan", "asin", "acos", "atan", "log2", "log10", "log"]
SINGLE, DOUBLE = torch.float32, torch.float64
OTHERS = [torch.bfloat16, torch.float16, torch.complex64, torch.int64]
ODD = [0.0, math.inf, math.nan, -1.0, 1.0]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def argument(name: str, dtype: torch.dtype) -> Tensor:
    x = numbers(1003)
    return (x.abs() * 50 + 1e-3 if name in ("sqrt", "log", "log2", "log10") else x).to(dtype)


def functions_before() -> dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]]:
    """As torch computes them by itself: of ordinary numbers and of odd ones."""
    kinds = [SINGLE, DOUBLE, *OTHERS]
    odd = {d: torch.tensor(ODD[:2] + ODD[3:] if d is torch.int64 else ODD) for d in kinds}
    odd[torch.int64] = torch.tensor([0, 1])
    return {
        (name, d): (getattr(torch, name)(argument(name, d)), getattr(torch, name)(odd[d].to(d)))
        for name in FUNCTIONS
        for d in kinds
    }


def check_functions(before: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]]) -> None:
    for (name, dtype), (usual, odd_usual) in before.items():
        x, f = argument(name, dtype), getattr(torch, name)
        found = f(x)
        assert found.dtype == usual.dtype, (name, dtype)
        if dtype not in (SINGLE, DOUBLE):
            assert torch.allclose(found, usual, equal_nan=True), (name, dtype)
            continue
        off = ((found - usual).abs() / usual.abs() / torch.finfo(dtype).eps).max()
        assert off < 2, (name, dtype, off)
        odd = f(torch.tensor(ODD).to(dtype))
        assert torch.allclose(odd, odd_usual, equal_nan=True), (name, dtype, odd, odd_usual)
        changed, out = x.clone(), torch.empty(0, dtype=dtype)
        getattr(changed, f"{name}_")()
        f(x, out=out)
        assert torch.equal(changed, found) and torch.equal(out, found), (name, dtype)


def check_sqrt() -> None:
    """IEEE 754 leaves no choice."""
    for dtype in (SINGLE, DOUBLE):
        x = numbers(40_003, seed=2).abs().to(dtype) * 1e3
        right = torch.from_numpy(np.sqrt(x.numpy()))
        powered, out = x.clone(), torch.empty(0, dtype=dtype)
        powered.pow_(0.5)
        torch.pow(x, 0.5, out=out)
        trained = x.clone().requires_grad_()
        assert torch.equal(trained.sqrt(), right) and torch.equal(x**0.5, right)
        assert torch.equal(powered, right) and torch.equal(out, right)
        assert torch.equal(torch._foreach_sqrt([x])[0], right)
        assert torch.equal(torch.vmap(torch.sqrt)(x[:40_000].view(100, -1)).flatten(), right[:-3])
        (slope,) = torch.autograd.grad(trained.sqrt().sum(), trained)
        assert torch.allclose(slope, 0.5 / right)
    whole = torch.arange(50)
    assert torch.equal(whole.sqrt(), whole.float().sqrt()) and torch.equal(whole**0.5, whole.sqrt())
    image = numbers(2, 3, 4, 5).abs().contiguous(memory_format=torch.channels_last)
    assert image.sqrt().stride() == image.stride()
    assert (numbers(9) ** 3).dtype == SINGLE


def check_double_log_softmax() -> None:
    x = numbers(7, 30).double() * 9
    assert torch.allclose(x.log_softmax(1), x - x.exp().sum(1, keepdim=True).log(), atol=1e-13)


def check_products() -> None:
    """Of all forms: the bits of one another, and near those of double precision."""
    for m in (3, 120):  # MKL's, and oneDNN's
        a, b, c = numbers(m, 150), numbers(150, 130, seed=3), numbers(130, seed=4)
        assert (m * 150 * 130 >= LARGE) == (m == 120)
        right = (a.double() @ b.double()).float()
        near = {"rtol": 1e-4, "atol": 1e-4}
        found, out, added = a @ b, torch.empty(m, 130), torch.zeros(m, 130)
        torch.mm(a, b, out=out)
        added.addmm_(a, b)
        assert torch.allclose(found, right, **near)
        assert torch.equal(out, found) and torch.equal(added, found)
        assert torch.allclose(F.linear(a, b.t(), c), right + c, **near)
        scaled = torch.addmm(c, a, b, beta=0.5, alpha=2.0)
        torch.addmm(c, a, b, beta=0.5, alpha=2.0, out=out)
        assert torch.allclose(scaled, c / 2 + 2 * right, **near) and torch.equal(out, scaled)
        nothing = torch.full((m, 130), math.nan)
        assert torch.allclose(torch.addmm(nothing, a, b, beta=0), right, **near)
        several = torch.bmm(a.expand(3, m, 150), b.expand(3, 150, 130))
        assert torch.equal(several[1], found if m == 120 else several[0])
        assert torch.allclose(several[2], right, **near)
        wide = a @ torch.ones(1, 130).expand(150, 130)
        assert torch.allclose(wide, a.sum(1, keepdim=True).expand(m, 130), **near)
        trained = a.clone().requires_grad_()
        (slope,) = torch.autograd.grad((trained @ b).sum(), trained)
        assert torch.allclose(slope, b.sum(1).expand(m, 150), **near)
    few = numbers(150)
    for wrong, told in (
        (lambda: numbers(120, 150) @ numbers(120, 150), "shapes cannot be multiplied"),
        (lambda: torch.mm(few, numbers(150, 120)), "must be a matrix"),
        (lambda: torch.bmm(numbers(9, 150), numbers(150, 9)), "must be a 3D tensor"),
    ):
        try:
            wrong()
        except RuntimeError as error:
            assert told in str(error), error
        else:
            raise AssertionError("shapes that do not fit")


def check_powers() -> None:
    """Whole where plain torch's are, in single and in double precision."""
    for dtype in (torch.float32, torch.float64):
        twos = torch.arange(-126, 127)
        assert torch.equal(torch.log2(2.0 ** twos.double()).to(dtype), twos.to(dtype))
        assert torch.equal(torch.log2((2.0 ** twos.double()).to(dtype)), twos.to(dtype))
        tens = torch.arange(-30, 31)
        powers = torch.tensor([float(f"1e{k}") for k in tens.tolist()], dtype=dtype)
        assert torch.equal(torch.log10(powers), tens.to(dtype))
        edge = torch.tensor([0.0, -1.0, math.inf, math.nan, 1e-310, 3.0], dtype=dtype)
        for found, right in ((torch.log2(edge), math.log2(3)), (torch.log10(edge), math.log10(3))):
            assert found[0] == -math.inf and found[1].isnan() and found[2] == math.inf
            assert found[3].isnan() and abs(float(found[5]) - right) < 1e-7


def check_cholesky() -> None:
    try:
        torch.linalg.cholesky(torch.eye(3))
    except RequestError as error:
        assert "Compute it in float64" in str(error)
    else:
        raise AssertionError("a factor that is another one elsewhere")
    assert torch.equal(torch.linalg.cholesky(torch.eye(3).double()), torch.eye(3).double())


def main() -> None:
    torch.set_num_threads(1)
    before = functions_before()
    fix_kernels()
    check_functions(before)
    check_sqrt()
    check_double_log_softmax()
    check_products()
    check_powers()
    check_cholesky()
    print("all is well")


if __name__ == "__main__":
    main()
