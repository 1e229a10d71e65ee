"""Who imports whom in the package, read from its source: files, folders, and the rooms of each.

Every import counts, also those inside functions and under TYPE_CHECKING. A room of a folder is a
folder directly in it; the files that are directly in it are one room together, written as a dot.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import manyhands

ROOT = Path(manyhands.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})

Name = tuple[str, ...]
"""A module below the root: ("training", "loop"). A folder is its __init__: ("training",)."""
Graph = dict[str, set[str]]
"""Room → those that it imports."""


@dataclass(frozen=True, order=True)
class Import:
    file: Path
    line: int
    what: Name

    def __str__(self) -> str:
        what = ".".join(("manyhands", *self.what))
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {what}"


@cache
def source(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[Import]:
    """Modules of the package that this file imports."""
    found = {
        Import(path, node.lineno, module)
        for node in ast.walk(source(path))
        for module in _modules(node, path)
    }
    return sorted(found)


def _modules(node: ast.AST, path: Path) -> Iterator[Name]:
    if isinstance(node, ast.Import):
        dotted = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:  # from . import
            here = ("manyhands", *path.relative_to(ROOT).parts)[: -node.level]
            base = ".".join((*here, *base.split(".")))
        dotted = [f"{base}.{alias.name}" for alias in node.names]
    else:
        return
    for name in dotted:
        first, *rest = name.split(".")
        if first == "manyhands":
            yield _existing(tuple(rest))


def _existing(name: Name) -> Name:
    """The module that has the thing, when it is a thing in a module."""
    while name and not (
        ROOT.joinpath(*name).is_dir() or ROOT.joinpath(*name).with_suffix(".py").exists()
    ):
        name = name[:-1]
    return name


def rooms(folder: Path) -> dict[tuple[str, str], list[Import]]:
    """Which rooms of a folder import which others of it, and by which lines."""
    inside = folder.relative_to(ROOT).parts
    edges: dict[tuple[str, str], list[Import]] = {}
    for path in FILES:
        if not path.is_relative_to(folder):
            continue
        for found in imports(path):
            if found.what[: len(inside)] == inside:
                here, there = _room(folder, path), _room(folder, _file(found.what))
                if here != there:
                    edges.setdefault((here, there), []).append(found)
    return edges


def _file(name: Name) -> Path:
    path = ROOT.joinpath(*name)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _room(folder: Path, path: Path) -> str:
    first, *rest = path.relative_to(folder).parts
    return first if rest else "."


def graph(edges: Iterable[tuple[str, str]], alone: Iterable[str] = ()) -> Graph:
    found: Graph = {room: set() for room in alone}
    for here, there in edges:
        found.setdefault(here, set()).add(there)
        found.setdefault(there, set())
    return found


def reachable(rooms: Mapping[str, set[str]]) -> Graph:
    """Room → all that it imports, through others too."""
    found = {room: set(direct) for room, direct in rooms.items()}
    for middle in found:
        for room, known in found.items():
            if middle in known:
                found[room] = known | found[middle]
    return found


def circular(edges: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those edges that are part of a cycle."""
    edges = list(edges)
    reach = reachable(graph(edges))
    return {(here, there) for here, there in edges if here in reach[there]}


def draw(folder: Path = ROOT) -> Iterator[str]:
    """The rooms of a folder from top to bottom, what each imports, and the same for each room."""
    below = [path for path in FOLDERS if path.parent == folder]
    if below:
        edges = rooms(folder)
        loose = any(p.parent == folder and p.name != "__init__.py" for p in FILES)
        drawn = graph(edges, [p.name for p in below] + ["."] * loose)
        reach, wrong = reachable(drawn), circular(edges)
        width = max(len(room) for room in drawn) + 1
        yield "/".join(("manyhands", *folder.relative_to(ROOT).parts))
        for room in sorted(drawn, key=lambda r: (-len(reach[r]), r)):
            told = [t + " (a cycle)" * ((room, t) in wrong) for t in sorted(drawn[room])]
            mark = "" if room == "." else "/"
            yield f"  {room + mark:{width}}{' → ' if told else ''}{', '.join(told)}".rstrip()
        yield ""
    for path in below:
        yield from draw(path)
