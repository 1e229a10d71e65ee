"""Plain PyTorch that compiles its model, in a process of its own: compilers stay behind.

`python -m tests.support.compiled_loop FILE` trains the model of tests/stories/test_train_compile.py
and writes its tensors to FILE.
"""

# pyright: basic

import sys
from typing import Any

import torch
import torch._inductor.config as inductor
from safetensors.torch import save_file

inductor.compile_threads = 1
inductor.fallback_random = True


def compiled(make: Any) -> Any:
    def build() -> torch.nn.Module:
        model = make()
        model.compile(dynamic=False)
        return model

    return build


if __name__ == "__main__":
    from manyhands.data.ordering.epoch_order import order
    from tests.catalogue import reference
    from tests.catalogue.case import RECORDS, Case, Settings
    from tests.stories.test_train_compile import Net

    torch.set_num_threads(1)
    case = Case("compiled", "plain, and compiled", model=compiled(Net), settings=Settings())
    found = reference.train(case, lambda epoch: order(5, epoch, RECORDS)[range(RECORDS)].tolist())
    save_file(found, sys.argv[1])
