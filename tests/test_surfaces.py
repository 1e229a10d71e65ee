"""What others rely on does not change by accident: lists that a person must edit.

tests/surfaces has a list for each surface, and collect.py how each is found out.
"""

import difflib
from pathlib import Path
from typing import Any

import pytest

from tests.surfaces.collect import SURFACES, Evidence, kept, make, text_of

HOW = """
If that is meant: python -m tests.surfaces --accept, and a line in CHANGELOG.md for those who rely
on it. Old run folders and prepared folders must stay readable (tests/stories/test_old_folders.py).
"""


@pytest.fixture(scope="module")
def evidence(launcher: Any, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return make(tmp_path_factory.mktemp("surfaces"), launcher)


@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_is_as_it_was_written_down(name: str, evidence: Evidence) -> None:
    path: Path = kept(name)
    before, now = path.read_text().splitlines(), text_of(name, evidence).splitlines()
    if before != now:
        changes = "\n".join(difflib.unified_diff(before, now, path.name, "now", n=2, lineterm=""))
        pytest.fail(f"{SURFACES[name].__doc__ or name}\n\n{changes}\n{HOW}", pytrace=False)


def test_every_list_is_compared() -> None:
    folder = kept("x").parent
    assert {path.stem for path in folder.glob("*.txt")} == SURFACES.keys()
