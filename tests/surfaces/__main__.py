"""`python -m tests.surfaces` shows what has changed; with --accept it is written down."""

import argparse
import contextlib
import difflib
import io
import sys
import tempfile
from pathlib import Path

from tests.surfaces.collect import SURFACES, kept, make, text_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.surfaces", description=__doc__)
    parser.add_argument("--accept", action="store_true", help="write the lists in tests/surfaces")
    accept = parser.parse_args().accept
    changed = False
    with tempfile.TemporaryDirectory() as folder:
        made = make(Path(folder))
        for name in SURFACES:
            path = kept(name)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(sys.stdout):
                now = text_of(name, made)
            before = path.read_text() if path.exists() else ""
            lines = before.splitlines(True), now.splitlines(True)
            for line in difflib.unified_diff(*lines, path.name, path.name, n=2):
                changed = True
                print(line, end="")
            if accept:
                path.write_text(now)
    sys.exit(changed and not accept)


if __name__ == "__main__":
    main()
