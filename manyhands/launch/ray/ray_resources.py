# SPDX-License-Identifier: Apache-2.0
"""What a worker needs of a Ray cluster, in numbers. Pure."""

import math
import re
from collections.abc import Mapping
from typing import Any

from manyhands.values.errors import RequestError

Resources = dict[str, float]
"""CPU, GPU, memory (bytes), and whatever a cluster calls its own."""

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_resources(text: str) -> Resources:
    """ "CPU=2,memory=2GB,disk=1" → {"CPU": 2.0, "memory": 2e9, "disk": 1.0}; zeros are left out."""
    found: Resources = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, amount = (p.strip() for p in part.partition("="))
        name = {"cpu": "CPU", "gpu": "GPU", "memory": "memory"}.get(name.lower(), name)
        value = _amount(amount, of_bytes=name == "memory")
        if not name or value is None:
            raise RequestError(
                f"--worker-resources {text}: write it as CPU=2,GPU=1,memory=2GB,NAME=1."
            )
        if value >= 1 and value != int(value):
            raise RequestError(f"--worker-resources {part}: Ray takes whole numbers from 1 on.")
        if value:
            found[name] = value
    if not found:
        raise RequestError(f"--worker-resources {text}: a worker needs something, CPU=1 say.")
    return found


def _amount(text: str, *, of_bytes: bool) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text, re.IGNORECASE)
    if match is None or (match[2] and not of_bytes):
        return None
    number = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()]
    return float(int(number)) if of_bytes else number


def times(each: Resources, free: Mapping[str, float]) -> int:
    """How often it fits, by the sums over all nodes."""
    return min(math.floor(free.get(name, 0.0) / need + 1e-9) for name, need in each.items())


def missing(each: Resources, workers: int, there: Mapping[str, float]) -> Resources:
    """What is too little for so many: name → need of each."""
    return {k: need for k, need in each.items() if need * workers > there.get(k, 0.0) + 1e-9}


def actor_options(each: Resources) -> dict[str, Any]:
    """As Ray's `options` take it."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    how: dict[str, Any] = {"num_cpus": 0}
    how |= {named[name]: amount for name, amount in each.items() if name in named}
    own = {name: amount for name, amount in each.items() if name not in named}
    return how | ({"resources": own} if own else {})
