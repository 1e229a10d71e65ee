"""A model by which it is known who reads: only workers build it, so a process that has not
and reads is a reader. Who was where is noted in files."""

from pathlib import Path

import torch
from torch import nn

from manyhands.values.events import Warned, read_events

_in_worker = False


def build() -> nn.Module:
    global _in_worker
    _in_worker = True
    return net()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 3))


def in_worker() -> bool:
    return _in_worker


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def note(folder: Path, name: str) -> bool:
    """Whether nobody has noted it before."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def warned_in(run: Path) -> str:
    """What people were told."""
    return "\n".join(e.text for e in read_events(run / "events.jsonl") if isinstance(e, Warned))
