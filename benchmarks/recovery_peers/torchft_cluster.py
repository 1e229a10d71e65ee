# SPDX-License-Identifier: Apache-2.0
"""torchft's lighthouse and two replica groups, each under a torchrun that restarts its worker.

python torchft_cluster.py [flags of torchft_lighthouse]
"""

import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import diary
from works import WORKERS


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scripts = Path(sysconfig.get_path("scripts"))
    lighthouse = [str(scripts / "torchft_lighthouse"), "--min_replicas", "1", *sys.argv[1:]]
    started = [start([*lighthouse, "--bind", f"[::]:{port}"])]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    launch += ["--max-restarts", "3", str(Path(__file__).with_name("torchft_worker.py"))]
    for group in range(WORKERS):
        variables = {
            "REPLICA_GROUP_ID": str(group),
            "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
        }
        started.append(start([sys.executable, *launch], **variables))
    for process in started:
        process.wait()


def start(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env={**os.environ, **variables}, preexec_fn=diary.die_with_parent
    )


if __name__ == "__main__":
    main()
