"""The walls: who imports whom, who reads the environment, what is public."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import manyhands
from manyhands.values import errors
from manyhands.values.version import VERSION

ROOT = Path(manyhands.__file__).parent
LOW = {"values", "accounting"}
TOP = {"stories", "driver", "worker", "cli", "testing", "zoo", "__init__", "__main__"}
STAGES = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"} - LOW - TOP
FILES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {n.split(".")[1] for n in names if n.startswith("manyhands.")}
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("manyhands.")]
            found |= {n.split(".")[1] for n in names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    here, used = part_of(path), imports(path)
    if here in LOW:
        assert used <= LOW, "values use values, accounting uses values"
    elif here in STAGES:
        assert used <= LOW | {here}, "stages never import another stage, or a story"


def test_every_file_has_a_room() -> None:
    assert {p.name for p in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_the_environment_is_read_in_one_place() -> None:
    reads = [p for p in FILES if re.search(r"os\.(environ|getenv)", p.read_text())]
    assert [p.name for p in reads] == ["world.py"]


def test_file_names_are_unique_and_say_something() -> None:
    names = [p.name for p in FILES if p.name != "__init__.py"]
    twice = {n for n in names if names.count(n) > 1}
    assert not twice
    assert not {"utils.py", "common.py", "helpers.py", "misc.py", "core.py"} & set(names)


def test_the_public_names_are_these() -> None:
    assert manyhands.__all__ == sorted(manyhands.__all__)
    for name in manyhands.__all__:
        assert getattr(manyhands, name) is not None
    assert callable(manyhands.train) and callable(manyhands.evaluate)


def test_importing_manyhands_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, manyhands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_errors_survive_pickling() -> None:
    samples = [
        errors.LossNotFinite(1, 2, 3, float("inf"), [4, 5]),
        errors.UnevenBuffer("seen", 7),
        errors.Interrupted("runs/x", 9),
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
