# SPDX-License-Identifier: Apache-2.0
r"""The MLP of works.py under TensorFlow's ParameterServerStrategy: how many samples a second.

    python tensorflow_servers.py --servers 1 --workers 2 --steps 600 --batch 256 --records 4096 \
        --to FILE

Chief, workers and servers are processes of this host, each with one thread for its operations. Each
function that is scheduled is one step on one batch by one worker, applied when it comes: what
`server:mode=async` does. Made as cheap as can be: records lie in memory, variables are plain, and
Adam is TensorFlow's own fused kernel, without weight decay and without correction of its bias.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

SIZES, LEARNING_RATE = (784, 512, 512, 10), 1e-3


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        lines = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [line.getsockname()[1] for line in lines]


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def tensorflow() -> Any:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    return tf


def serve() -> None:
    """As TF_CONFIG says: a worker or a server, until the chief ends it."""
    tf = tensorflow()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        start=True,
    ).join()


def train(asked: argparse.Namespace, cluster: dict[str, list[str]]) -> float:
    tf = tensorflow()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    dice = np.random.default_rng(0)
    with strategy.scope():
        layers = [
            (
                tf.Variable(dice.normal(0, a**-0.5, (a, b)).astype(np.float32)),
                tf.Variable(np.zeros(b, np.float32)),
            )
            for a, b in pairwise(SIZES)
        ]
        flat = [variable for layer in layers for variable in layer]
        moments = [[tf.Variable(tf.zeros_like(v)) for v in flat] for _ in range(2)]

    def records() -> Any:
        """Each batch another stretch of shuffled records, straight from memory."""
        own = np.random.default_rng(1)
        x = tf.constant(own.normal(size=(asked.records, SIZES[0])).astype(np.float32))
        y = tf.constant(own.integers(0, SIZES[-1], asked.records))
        places = tf.data.Dataset.range(asked.records).shuffle(asked.records).repeat()
        chosen = places.batch(asked.batch, drop_remainder=True)
        return chosen.map(lambda rows: (tf.gather(x, rows), tf.gather(y, rows)))

    @tf.function
    def step(iterator: Any) -> Any:
        def replica(batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                for k, (weight, bias) in enumerate(layers):
                    x = tf.matmul(x, weight) + bias
                    x = tf.nn.relu(x) if k < len(layers) - 1 else x
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
                loss = tf.reduce_mean(losses)
            for v, g, m1, m2 in zip(flat, tape.gradient(loss, flat), *moments, strict=True):
                tf.raw_ops.ResourceApplyAdam(
                    var=v.handle,
                    m=m1.handle,
                    v=m2.handle,
                    beta1_power=0.0,
                    beta2_power=0.0,
                    lr=LEARNING_RATE,
                    beta1=0.9,
                    beta2=0.999,
                    epsilon=1e-8,
                    grad=g,
                )
            return loss

        return strategy.run(replica, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(records))
    warm = max(2 * asked.workers, asked.steps // 10)
    for _ in range(warm):
        last = coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    began = time.perf_counter()
    for _ in range(asked.steps):
        last = coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    took_s = time.perf_counter() - began
    loss = float(last.fetch())
    if not np.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    return asked.steps * asked.batch / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("servers", "workers", "steps", "batch", "records"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True)
    asked = parser.parse_args()
    ports = iter([f"127.0.0.1:{port}" for port in free_ports(1 + asked.servers + asked.workers)])
    cluster = {
        "chief": [next(ports)],
        "ps": [next(ports) for _ in range(asked.servers)],
        "worker": [next(ports) for _ in range(asked.workers)],
    }
    others: list[subprocess.Popen[bytes]] = []
    try:
        for kind in ("ps", "worker"):
            for index in range(len(cluster[kind])):
                told = {"cluster": cluster, "task": {"type": kind, "index": index}}
                others.append(
                    subprocess.Popen(
                        [sys.executable, __file__],
                        env={**os.environ, "TF_CONFIG": json.dumps(told)},
                        preexec_fn=die_with_parent,
                    )
                )
        asked.to.write_text(json.dumps({"samples_per_s": train(asked, cluster)}))
    finally:
        for process in others:
            process.kill()
            process.wait()
    os._exit(0)  # the coordinator's threads wait for servers that are gone


if __name__ == "__main__":
    serve() if "TF_CONFIG" in os.environ else main()
