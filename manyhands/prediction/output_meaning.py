# SPDX-License-Identifier: Apache-2.0
"""What one number for two classes means: a logit, or a probability.

It cannot be told from the number: 0.3 may be either, and what a record is predicted to be must not
depend on the others in the file. It can be told from how it was computed, which autograd knows:
what comes out of a sigmoid is a probability, what comes out of a linear layer is none. Where
neither is the case nothing is guessed.
"""

from typing import Any, Literal

from torch import Tensor

Meaning = Literal["logits", "probabilities", "numbers"]

_ONLY_MOVED = (
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice", "Index", "T",
    "Transpose", "Permute", "ToCopy", "Clone", "Alias", "Expand", "Narrow", "Split", "Unbind",
    "Cat",
)  # fmt: skip
_PROBABILITIES = ("Sigmoid", "Softmax")
_LOGITS = (
    "Addmm", "Mm", "Bmm", "Addbmm", "Baddbmm", "Mv", "Addmv", "Dot", "Linear", "MkldnnLinear",
    "Convolution", "MkldnnConvolution", "Add", "Sub", "Sum", "NativeBatchNorm", "Embedding",
)  # fmt: skip


def meaning_of(output: Tensor) -> Meaning:
    """Of an output that was computed with gradients; "numbers" where it is not known."""
    node: Any = output.grad_fn
    while node is not None:
        name = type(node).__name__.partition("Backward")[0]
        if name in _PROBABILITIES:
            return "probabilities"
        if name in _LOGITS:
            return "logits"
        if name not in _ONLY_MOVED:
            return "numbers"
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return "numbers"
