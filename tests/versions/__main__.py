# SPDX-License-Identifier: Apache-2.0
"""The promise on other versions: `make test-versions VERSIONS="2.12.1 2.15.0@python3.12"`.

Each version is torch's, and after an @ the Python to use. It is installed by pip, with what we
require of other packages (pins of constraints.txt, but for torch), into a venv of its own in a
temporary folder, which is removed afterwards: about 5 GB and some minutes each, since PyPI's torch
brings CUDA's libraries. There `tests.versions.ring` is run. Versions may have other fingerprints
than each other; within a version all must be the same.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NEEDS_BYTES = 12 << 30
"""Of a venv, and of what pip keeps while it makes one."""
TIMEOUT_S = 1800


class Unusable(Exception):
    """It could not be installed, or did not run to its end."""


@dataclass(frozen=True, slots=True)
class Version:
    torch: str
    python: str = sys.executable

    @classmethod
    def of(cls, text: str) -> "Version":
        torch, _, python = text.partition("@")
        return cls(torch, python or sys.executable)


def tried(version: Version, under: Path) -> dict[str, Any]:
    """What the ring says of it."""
    venv, source = under / "venv", under / "source"
    source.mkdir()
    for name in ("manyhands", "tests"):
        left_out = shutil.ignore_patterns("__pycache__", "old_folders")
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("torch==")
    ]
    (under / "constraints.txt").write_text("\n".join([*pins, f"torch=={version.torch}"]))
    _run([version.python, "-m", "venv", str(venv)], under)
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--no-cache-dir", "-c", "constraints.txt"]
    _run([*pip, str(source)], under)
    said = _run([python, "-m", "tests.versions.ring"], source)
    return json.loads(said.splitlines()[-1])


def _run(command: list[str], where: Path) -> str:
    done = subprocess.run(
        command, cwd=where, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise Unusable(f"{' '.join(command[:4])}: code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.versions", description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="TORCH[@PYTHON]", type=Version.of)
    parser.add_argument("--under", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    wrong = 0
    for version in asked.versions:
        if shutil.disk_usage(asked.under).free < NEEDS_BYTES:
            print(f"{asked.under} has no {NEEDS_BYTES >> 30} GB free; give another --under")
            return 2
        with tempfile.TemporaryDirectory(prefix="manyhands-version-", dir=asked.under) as under:
            try:
                found = tried(version, Path(under))
            except (Unusable, subprocess.TimeoutExpired) as error:
                print(f"torch {version.torch}, {version.python}: {error}", flush=True)
                wrong += 1
                continue
        wrong += bool(found["unlike"])
        verdict = "NOT the same bits" if found["unlike"] else "the same bits"
        print(f"torch {found['torch']}, Python {found['python']}: {verdict}", flush=True)
        print(json.dumps(found, indent=2), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
