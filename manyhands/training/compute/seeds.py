# SPDX-License-Identifier: Apache-2.0
"""Randomness as a function of (seed, step, micro-batch, purpose), for torch, numpy and random.

`default_generator.manual_seed` costs a microsecond where `torch.manual_seed` costs 180 (it visits
every backend). Generators that user code made for itself cannot be reached from here.
"""

import hashlib
import random

import numpy as np
import torch

np.random  # noqa: B018 (numpy loads it late; a forked worker should find it loaded)  # pyright: ignore


def seed_for(*key: int | str) -> int:
    """63 bits that depend on the key and nothing else, the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(*key: int | str) -> None:
    """Seed torch (CPU, and CUDA when it is in use), numpy and random from a key."""
    value = seed_for(*key)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
