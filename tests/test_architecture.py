"""The walls: who imports whom, what names mean, who reads the environment, what is public.

`python -m tests.test_architecture` draws the imports between folders, from top to bottom.
"""

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import manyhands
from manyhands.values import errors
from manyhands.values.version import VERSION
from tests.support.imports import FILES, FOLDERS, ROOT, circular, draw, imports, rooms, source

PROGRAMS = {"__init__", "__main__"}
ABOVE = {"stories", "driver", "worker", "cli", "testing", "zoo"}
STAGES = {path.name for path in FOLDERS if path.parent == ROOT} - ABOVE - {"values", "accounting"}
BELOW = {"values", "accounting", *STAGES}

MAY_IMPORT: dict[str, set[str]] = {
    "values": {"values"},
    "accounting": {"values", "accounting"},
    **{stage: {"values", "accounting", stage} for stage in sorted(STAGES)},
    "driver": {"driver", *BELOW},
    "worker": {"worker", *BELOW},
    "stories": {"stories", "driver", "worker", *BELOW},
    "cli": {"cli", "stories", "monitor", "values", "accounting"},
    "zoo": {"zoo", ""},  # ready tasks are written as users write theirs: with the public names
    "testing": {"testing", "stories", "driver", "worker", *BELOW},
    "__init__": {"stories", *BELOW},
    "__main__": {"cli"},
}
"""Folder (or file) of the root → what its files may import. Of manyhands itself: ""."""


def hold(rule: str, offences: Iterable[object]) -> None:
    """There are none, or no more than we know of."""
    found = sorted(str(offence) for offence in offences)
    if found:
        listed = "\n  ".join(found)
        pytest.fail(f"{rule}: {len(found)} offences:\n  {listed}", pytrace=False)


# ---- who imports whom


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_down(folder: str) -> None:
    may = MAY_IMPORT[folder]
    files = [p for p in FILES if p.relative_to(ROOT).parts[0].removesuffix(".py") == folder]
    assert files, f"there is no {folder}: MAY_IMPORT has a line too many"
    every = (found for path in files for found in imports(path))
    hold(f"imports of {folder}", (f for f in every if (f.what[0] if f.what else "") not in may))


def test_every_folder_has_its_place_in_the_order() -> None:
    here = {path.name for path in FOLDERS if path.parent == ROOT} | PROGRAMS
    assert here == MAY_IMPORT.keys()


def test_the_product_imports_nothing_that_is_for_testing_it() -> None:
    product = [p for p in FILES if not p.is_relative_to(ROOT / "testing")]
    found = (f for path in product for f in imports(path))
    hold("testing is imported", (f for f in found if f.what[:1] == ("testing",)))


def test_nothing_but_the_program_imports_the_command_line() -> None:
    others = [p for p in FILES if not p.is_relative_to(ROOT / "cli") and p.stem != "__main__"]
    found = (f for path in others for f in imports(path))
    hold("cli is imported", (f for f in found if f.what[:1] == ("cli",)))


def test_rooms_of_a_folder_import_in_one_direction() -> None:
    """Folders in a folder, and the files directly in it, which are one room together."""
    wrong: list[str] = []
    for folder in FOLDERS:
        edges, name = rooms(folder), "/".join(("manyhands", *folder.relative_to(ROOT).parts))
        for here, there in circular(edges):
            wrong += [f"{name}: {here} → {there}, and back: {edges[here, there][0]}, ..."]
    hold("cycles", wrong)


# ---- names


def test_every_file_has_a_room() -> None:
    assert {p.name for p in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_file_names_are_unique_and_say_something() -> None:
    names = [p.name for p in FILES if p.name != "__init__.py"]
    hold("file names", {n for n in names if names.count(n) > 1})
    assert not {"utils.py", "common.py", "helpers.py", "misc.py", "core.py"} & set(names)


def test_a_class_name_means_one_thing() -> None:
    """Classes everywhere, and what a module gives a name like that of a class."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for name, line in nouns(path):
            places.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{line}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    hold("class names", (f"{name}: {', '.join(where)}" for name, where in twice.items()))


def nouns(path: Path) -> Iterator[tuple[str, int]]:
    tree = source(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if re.match(r"_*[A-Z]", name) and name != name.upper():
                yield name, node.lineno


def test_folders_are_nouns_and_no_public_name() -> None:
    """`mh.train` is a function, so the folder is training/: an import never hides a name."""
    names = {path.name for path in FOLDERS if path != ROOT}
    hold("folders", names & set(manyhands.__all__))


# ---- the rest


def test_the_environment_is_read_in_one_place() -> None:
    reads = [p for p in FILES if re.search(r"os\.(environ|getenv)", p.read_text())]
    assert [p.name for p in reads] == ["environment.py"]


def test_the_public_names_are_there() -> None:
    assert manyhands.__all__ == sorted(manyhands.__all__)
    for name in manyhands.__all__:
        assert getattr(manyhands, name) is not None
    assert callable(manyhands.train) and callable(manyhands.evaluate)


def test_importing_manyhands_imports_no_torch() -> None:
    code = "import sys, manyhands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_worker_imports_no_compiler() -> None:
    """1.5 s, which every start of a run would take longer."""
    code = "import sys, manyhands.worker.lifecycle; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_errors_survive_pickling() -> None:
    samples = [
        errors.LossNotFinite(1, 2, 3, float("inf"), [4, 5]),
        errors.GradientNotFinite(1, 2, 3, "weight", [4, 5]),
        errors.UnevenBuffer("seen", 7),
        errors.TableFull("user", 10, 9, 2, 7, "rows"),
        errors.Interrupted("runs/x", 9, "manyhands resume runs/x"),
        errors.RunFailed("why"),
        errors.ConfigError("what"),
    ]
    for error in samples:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
    drawn = errors.__doc__ or ""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert name in drawn, f"{name} is missing in the tree of errors"


def test_the_version_is_the_same_everywhere() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text()
    assert f'version = "{VERSION}"' in text


if __name__ == "__main__":
    print("\n".join(draw()))
