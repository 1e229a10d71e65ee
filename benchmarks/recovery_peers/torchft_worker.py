# SPDX-License-Identifier: Apache-2.0
"""torchft: replica groups of one worker each, after its own train_ddp.py example.

When a group dies the others go on without it, with a smaller batch; it comes back through torchrun
and fetches the weights from a group that is alive. Nothing is written to disk.
"""

import os
from datetime import timedelta
from typing import Any

import diary
import torch
import torchft
from works import LEARNING_RATE, WORKERS, WORKS


def main() -> None:
    diary.die_with_parent()
    group, work = int(os.environ["REPLICA_GROUP_ID"]), WORKS[diary.WORK]
    torch.manual_seed(0)
    module = work.model()

    def load_state_dict(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=30),
    )
    model = torchft.DistributedDataParallel(manager, module)
    plain = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    optimizer = torchft.Optimizer(manager, plain)
    for batch in diary.batches_from(0, rank=group, num_ranks=WORKERS, data=work.data()):
        diary.note(manager.current_step(), group)
        optimizer.zero_grad()  # asks who is in
        work.loss(model, batch).backward()
        optimizer.step()  # or not, when someone was lost on the way


if __name__ == "__main__":
    main()
