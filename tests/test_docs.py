"""Docs and examples are run, not believed."""

import re
import tomllib
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.config import SECTIONS, from_toml
from manyhands.values.option_fields import help_texts
from tests.support import doc_tables

ROOT = Path(mh.__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(p for p in (ROOT / "examples").iterdir() if p.suffix in (".py", ".toml"))
PROGRAMS = [p for p in EXAMPLES if "__main__" in p.read_text()]
PORTED = [p for p in EXAMPLES if "mh.from_" in p.read_text()]
"""They are run in tests/adapters: what they import takes many seconds."""
TASKS = [p for p in EXAMPLES if p not in (*PROGRAMS, *PORTED)]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_code_blocks_are_right(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for code in blocks(page, "python"):
        compile(code, str(page), "exec")
    for text in blocks(page, "toml"):
        tomllib.loads(text)
        from_toml(text, where=str(page))


def test_every_setting_is_in_the_manual() -> None:
    import dataclasses

    text = (ROOT / "docs" / "config.md").read_text()
    for name, section in SECTIONS.items():
        assert f"[{name}]" in text
        for field in dataclasses.fields(section):
            assert f"`{field.name}`" in text, f"{name}.{field.name}"


def test_settings_mean_in_the_manual_what_they_mean_in_the_code() -> None:
    def plain(text: str) -> str:
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links
        return re.sub(r'[`"\\]', "", text)

    manual = plain((ROOT / "docs" / "config.md").read_text())
    for name, section in SECTIONS.items():
        for setting, text in help_texts(section).items():
            assert plain(text) in manual, f"{name}.{setting}: {text}"


def test_the_tables_of_options_are_those_of_the_code() -> None:
    text = doc_tables.PAGE.read_text()
    assert doc_tables.written(text) == text, "make docs writes them anew"


def test_the_manual_says_which_settings_are_part_of_the_result() -> None:
    text = doc_tables.SETTINGS_PAGE.read_text()
    assert doc_tables.with_effects(text) == text, "make docs writes it anew"


@pytest.mark.parametrize("path", TASKS, ids=lambda p: p.name)
def test_examples_run(path: Path, launcher: Launcher, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
    report = mh.train(
        path,
        to=tmp_path / "run",
        workers=2,
        settings=["train.steps=3"],
        quiet=True,
        launcher=launcher,
    )
    assert report.step == 3


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_examples_that_call_us_from_python_run(program: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
