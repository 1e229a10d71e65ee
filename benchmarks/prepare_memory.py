# SPDX-License-Identifier: Apache-2.0
"""Peak memory of preparing much data in little memory.

    python benchmarks/prepare_memory.py [--size 4GB] [--memory 512MB] [--workers 2]

A CSV of numbers, words and text is written, prepared, and every process is watched: its largest
unique set size (memory that is its own; mapped files that others could have are not counted), and
its resident set, beside `--memory`. Wanted: at most that for each process.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rows import console

from manyhands.values.byte_sizes import parse_bytes


def write_csv(path: Path, size: int) -> int:
    """Blocks of the same lines, each with numbers of its own; how many records."""
    draw = random.Random(0)
    words = [f"word{k}" for k in range(5000)]
    block = [
        f"{draw.gauss(0, 1):.6f},{draw.randint(0, 10**6)},{draw.choice(words)},"
        f"{' '.join(draw.choice(words) for _ in range(12))},{draw.randint(0, 9)}\n"
        for _ in range(20_000)
    ]
    records = written = 0
    with path.open("w") as file:
        file.write("number,x,y,word,text,label\n")
        while written < size:
            lines = [f"{records + k},{line}" for k, line in enumerate(block)]
            written += file.write("".join(lines))
            records += len(lines)
    return records


def watch(process: subprocess.Popen[bytes]) -> dict[int, tuple[int, int]]:
    """Process → its largest (unique, resident) size."""
    peaks: dict[int, tuple[int, int]] = {}
    while process.poll() is None:
        try:
            main = psutil.Process(process.pid)
            for one in [main, *main.children(recursive=True)]:
                full = one.memory_full_info()
                uss, rss = peaks.get(one.pid, (0, 0))
                peaks[one.pid] = max(uss, full.uss), max(rss, full.rss)
        except psutil.Error:
            pass
        time.sleep(0.1)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="4GB")
    parser.add_argument("--memory", default="512MB")
    parser.add_argument("--workers", default="2")
    asked = parser.parse_args()
    limit = parse_bytes(asked.memory)
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
        source = Path(folder) / "records.csv"
        records = write_csv(source, parse_bytes(asked.size))
        console.print(f"{records:,} records, {source.stat().st_size / 1e9:.2f} GB")
        command = [sys.executable, "-m", "manyhands", "prepare", str(source), "--label", "label"]
        command += ["--to", f"{folder}/data", "--role", "text=text", "--drop", "number"]
        command += ["--memory", asked.memory, "--workers", asked.workers, "-q"]
        began = time.monotonic()
        process = subprocess.Popen(command)
        peaks = watch(process)
        took = time.monotonic() - began
    speed = parse_bytes(asked.size) / took / 1e6
    console.print(
        f"exit {process.returncode}, {took:.0f} s, {speed:.0f} MB/s, memory {asked.memory}"
    )
    for pid, (uss, rss) in peaks.items():
        who = "driver" if pid == process.pid else "worker"
        console.print(
            f"{who} {pid}: unique {uss / 1e6:,.0f} MB ({uss / limit:.2f}×), "
            f"resident {rss / 1e6:,.0f} MB ({rss / limit:.2f}×)"
        )


if __name__ == "__main__":
    main()
