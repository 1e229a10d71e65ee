# SPDX-License-Identifier: Apache-2.0
"""Shuffled batches, and CSV to TFRecord, beside what others use.

    python benchmarks/data.py [--quick] [--only mixed,bytes,csv] [--rounds 3] [--json FILE]

mixed: 200,000 records of an id, 32 floats, 5 to 20 tokens and a label. bytes: 20,000 records of
3 KB. Both are read in shuffled batches of 256, by one process and by two at once (the sum counts).
Everybody has a first epoch that does not count. manyhands reads with the exact global order and
with checksums on. csv: 100,000 records of two integers and 32 floats from CSV to TFRecord.

    manyhands            a prepared folder
    manyhands-tfrecord   the same in TFRecords, with their checksums
    arrow-take           whole batches taken from memory-mapped Arrow: no library, no order kept

Peers are looked for in the interpreters of BENCH_PEERS_PYTHON (separated by colons), then in this
one, and left out with the reason where they cannot be imported. Ratios are to the best peer.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import rows
from rows import Metric, Wanted, console

HERE = Path(__file__).parent / "data_peers"
sys.path.insert(0, str(HERE))
from peers import NEEDS, PEERS  # noqa: E402

OURS = ("manyhands", "manyhands-tfrecord")
CSV = ("tf.data", "tfrecord", "ray-data", "manyhands")
LIMIT_S = 400.0
METRICS = (Metric("records_per_s", "records/s"),)
TARGETS = {
    (f"{work} x{n}", "records_per_s"): Wanted("≥", 2.5)
    for work in ("mixed", "bytes")
    for n in (1, 2)
} | {("csv", "records_per_s"): Wanted("≥", 3.0)}


def make_inputs(folder: Path, quick: bool) -> None:
    draw = np.random.default_rng(0)
    count = 20_000 if quick else 200_000
    lengths = draw.integers(5, 21, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mixed = pa.table(
        {
            "id": pa.array(np.arange(count)),
            "x": pa.FixedSizeListArray.from_arrays(
                pa.array(draw.standard_normal(count * 32).astype(np.float32)), 32
            ),
            "tokens": pa.ListArray.from_arrays(
                pa.array(offsets),
                pa.array(draw.integers(0, 30_000, int(offsets[-1])).astype(np.int32)),
            ),
            "y": pa.array(draw.integers(0, 10, count)),
        }
    )
    raw = draw.integers(0, 256, (count // 10, 3000), dtype=np.uint8)
    for name, table in (
        ("mixed", mixed),
        ("bytes", pa.table({"data": pa.array([row.tobytes() for row in raw], pa.binary())})),
    ):
        path = str(folder / f"{name}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    with (folder / "records.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *(f"x{k}" for k in range(32)), "label"])
        for k, values in enumerate(draw.standard_normal((count // 2, 32)).round(6).tolist()):
            writer.writerow([k, *values, k % 10])


def interpreters() -> dict[str, list[str]]:
    """Contestant → the command that starts it; peers that cannot be imported are left out."""
    here = [sys.executable, str(HERE / "ours.py")]
    found: dict[str, list[str]] = {name: here for name in OURS}
    places = [p for p in os.getenv("BENCH_PEERS_PYTHON", "").split(":") if p] + [sys.executable]
    for name, module in NEEDS.items():
        for python in places:
            probe = f"import importlib.util as u, sys; sys.exit(u.find_spec('{module}') is None)"
            if subprocess.run([python, "-c", probe], check=False).returncode == 0:
                found[name] = [python, str(HERE / "peers.py")]
                break
        else:
            console.print(f"{name} is left out: no interpreter has {module}", style="dim")
    return found


def run(commands: Sequence[Sequence[str]]) -> float:
    """Start all, let them begin together, and add up what they say."""
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=quiet,
        )
        for command in commands
    ]
    try:
        for process in running:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and line.strip() != "ready":
                if line.startswith("{"):  # it had nothing to wait for
                    return float(json.loads(line)["records_per_s"])
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        total = 0.0
        for process in running:
            said, _ = process.communicate(timeout=LIMIT_S)
            answers = [line for line in said.splitlines() if line.startswith("{")]
            if not answers:
                raise RuntimeError(f"{' '.join(commands[0])} ended with {process.returncode}")
            total += float(json.loads(answers[-1])["records_per_s"])
        return total
    finally:
        for process in running:
            process.kill()
            process.wait()


def best_peer(metric: str, values: Mapping[str, float]) -> float | None:
    peers = [v for name, v in values.items() if name not in OURS and name != "arrow-take"]
    return max(peers, default=None)


def measure(asked: argparse.Namespace, folder: Path) -> list[rows.Row]:
    commands, samples = interpreters(), rows.Samples()
    chosen = [n for n in commands if not asked.contestants or n in asked.contestants]
    for work in (w for w in ("mixed", "bytes") if w in asked.only):
        for name in chosen:
            console.print(f"[dim]making {work} for {name}[/]")
            run([[*commands[name], name, "make", str(folder), work]])
    for round in range(rows.rounds_of(asked)):
        for work in asked.only:
            for consumers in (1,) if work == "csv" else (1, 2):
                label = work if work == "csv" else f"{work} x{consumers}"
                for name in chosen:
                    if work == "csv" and name not in CSV:
                        continue
                    what = ["csv", str(folder)] if work == "csv" else ["read", str(folder), work]
                    try:
                        value = run([[*commands[name], name, *what]] * consumers)
                    except RuntimeError as error:
                        console.print(f"{label} {name}: {error}", style="red")
                        continue
                    samples.setdefault((label, name, "records_per_s"), []).append(value)
                    console.print(f"{label} round {round + 1}  {name:<18} {value:,.0f} a second")
    return rows.summarise(samples, best_peer)


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument(
        "--only", type=lambda t: t.split(","), default=["mixed", "bytes", "csv"], metavar="WORK,..."
    )
    parser.add_argument(
        "--contestants", type=lambda t: t.split(","), default=[], metavar="NAME,..."
    )
    asked = parser.parse_args()
    unknown = set(asked.contestants) - {*PEERS, *OURS}
    if unknown:
        parser.error(f"there is no contestant {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
        make_inputs(Path(folder), asked.quick)
        found = measure(asked, Path(folder))
    rows.report(found, METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
