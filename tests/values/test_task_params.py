"""What is given for a task's parameters has the type of their defaults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.values.config import RunConfig, from_toml, to_toml
from manyhands.values.errors import ConfigError, TaskError
from manyhands.values.loaded_task import load_task
from manyhands.values.task_params import (
    called,
    given_params,
    params_text,
    read_params,
    recorded,
    settled,
)


def task(
    lr: float = 1e-3,
    width: int = 64,
    bias: bool = True,
    name: str = "adam",
    sizes: tuple[int, ...] = (3, 4),
    rates: tuple[float, ...] = (0.5, 1),
    words: list[str] = ["a"],  # noqa: B006
    limit: int | None = None,
    data: Path = Path("data"),
) -> dict[str, Any]:
    return dict(locals())


RIGHT: list[tuple[str, Any]] = [
    ("lr=3e-4", 3e-4),
    ("lr=1", 1.0),
    ("lr=.5", 0.5),
    ("width=128", 128),
    ("bias=false", False),
    ("bias=False", False),
    ("name=sgd", "sgd"),
    ('name="sgd"', "sgd"),
    ("name=3", "3"),
    ("name=", ""),
    ("sizes=[1, 2]", (1, 2)),
    ("sizes=1,2,3", (1, 2, 3)),
    ("sizes=(5,)", (5,)),
    ("sizes=[]", ()),
    ("rates=1,2", (1.0, 2.0)),
    ("words=x,y", ["x", "y"]),
    ('words=["x, y"]', ["x, y"]),
    ("limit=7", 7),
    ("limit=None", None),
    ("limit=some words", "some words"),
    ("data=other", Path("other")),
]


@pytest.mark.parametrize("text, value", RIGHT, ids=[text for text, _ in RIGHT])
def test_text_becomes_what_its_default_is(text: str, value: Any) -> None:
    found = settled(task, given_params([text]), "task.py")
    name = text.partition("=")[0]
    assert found[name] == value and type(found[name]) is type(value)
    assert called(task, found)[name] == value


@pytest.mark.parametrize("text, value", RIGHT, ids=[text for text, _ in RIGHT])
def test_what_was_written_down_comes_back(text: str, value: Any, tmp_path: Path) -> None:
    found = settled(task, given_params([text]), "task.py")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(RunConfig(), task="task.py", params=recorded(found)))
    assert from_toml(file.read_text(), where="") == (RunConfig(), "task.py")
    assert settled(task, read_params(file), "task.py") == found


WRONG = [
    ("width=1.5", "width is a whole number (by default 64)"),
    ("width=1e3", "width is a whole number"),
    ("width=true", "width is a whole number"),
    ("width=", "width is a whole number"),
    ("lr=fast", "lr is a number (by default 0.001)"),
    ("bias=1", "bias is true or false"),
    ("sizes=1,2.5", "sizes is a list, each of it a whole number (by default [3, 4])"),
    ("widht=3", "did you mean 'width'? It is task(lr=0.001, width=64, "),
    ("zzz=3", "no such parameter. It is task(lr=0.001, "),
    ("train.batch=3", "given by --set train.batch=3"),
    ("lr", "write it as name=value"),
    ("=3", "write it as name=value"),
]


@pytest.mark.parametrize("text, said", WRONG, ids=[text for text, _ in WRONG])
def test_what_does_not_fit_is_answered(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settled(task, given_params([text]), "task.py")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "name, value", [("width", 1.0), ("width", True), ("lr", "3e-4"), ("name", 3), ("sizes", "12")]
)
def test_python_and_toml_are_held_to_the_type_too(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--param {name}="):
        settled(task, {name: value}, "task.py")


def test_numbers_of_numpy_are_numbers() -> None:
    found = settled(task, {"width": np.int64(3), "lr": np.float32(0.5)}, "task.py")
    assert (found["width"], found["lr"]) == (3, 0.5)
    assert params_text(found).startswith("lr=0.5 width=3 bias=true name=adam sizes=[3, 4]")


def test_without_a_default_a_value_is_read_as_toml_and_needed() -> None:
    def needs(rate, word: str, /, *, depth: int, **others: Any) -> Any:
        return rate, word, depth, others

    given = given_params(["rate=0.5", "word=3", "depth=2", "more=[1, 2]"])
    found = settled(needs, given, "task.py")
    assert called(needs, found) == (0.5, "3", 2, {"more": [1, 2]})
    with pytest.raises(ConfigError, match=r"needs a value: --param word="):
        settled(needs, given_params(["rate=1", "depth=1"]), "task.py")
    with pytest.raises(ConfigError, match="depth is a whole number"):
        settled(needs, given_params(["rate=1", "word=x", "depth=x"]), "task.py")
    with pytest.raises(ConfigError, match="None, which cannot be written down"):
        settled(needs, {"rate": None, "word": "x", "depth": 1}, "task.py")
    with pytest.raises(ConfigError, match="of type object, which cannot"):
        settled(needs, {"rate": object(), "word": "x", "depth": 1}, "task.py")


def test_a_default_that_cannot_be_written_down_cannot_be_given() -> None:
    def odd(what: Any = print, lr: float = 0.1) -> None: ...

    assert settled(odd, {}, "task.py") == {"lr": 0.1}
    with pytest.raises(ConfigError, match="its default is of type builtin_function"):
        settled(odd, given_params(["what=3"]), "task.py")


TASK = """
import sys
import torch
import manyhands as mh

SEEN = list(sys.argv)
{before}
def task({parameters}):
    {body}

def whole(lr):
    return mh.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda m, b: m(b["x"]).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        data={{"x": torch.zeros(4, 1)}},
    )
"""


def file(folder: Path, parameters: str, body: str, before: str = "") -> Path:
    path = folder / "task.py"
    path.write_text(TASK.format(parameters=parameters, body=body, before=before))
    return path


def test_a_file_sees_no_arguments_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ["manyhands", "train", "task.py", "--workers", "3"]
    monkeypatch.setattr("sys.argv", ours)
    parse = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\n"
    path = file(tmp_path, "", "return whole(1.0)", parse + "parser.parse_args()\n")
    loaded = load_task(path)
    assert loaded.module is not None and [str(path)] == loaded.module.SEEN
    assert loaded.params == {}
    import sys

    assert sys.argv is ours
    needed = parse.replace("'--lr'", "'lr'")
    path = file(tmp_path, "", "return whole(1.0)", needed + "parser.parse_args()\n")
    with pytest.raises(TaskError, match="could not be run") as refused:
        load_task(path)
    assert "def task(lr=1e-3)" in str(refused.value) and sys.argv is ours
    path = file(tmp_path, "lr=0.5", "import sys; assert len(sys.argv) == 1; return whole(lr)")
    assert load_task(path, {"lr": 1}).params == {"lr": 1.0}


@pytest.mark.parametrize(
    "body, said",
    [
        ("raise ValueError('no such model')", ["task() of", "task.py:9 in task", "no such model"]),
        ("return [whole(lr)]", ["returned list; it must return mh.Task"]),
        ("whole(lr)", ["returned nothing: does it end with"]),
        ("return mh.Task(model=3)", ["model is int", "task.py:9 in task"]),
    ],
)
def test_what_a_function_does_instead_of_making_a_task_is_told(
    body: str, said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(TaskError) as refused:
        load_task(file(tmp_path, "lr=0.5", body))
    assert all(text in str(refused.value) for text in said), str(refused.value)


def test_a_task_without_parameters_says_how_it_gets_some(tmp_path: Path) -> None:
    path = file(tmp_path, "", "return whole(1.0)")
    with pytest.raises(ConfigError, match=r"task\(\) of .* has no parameters.*def task\(lr="):
        load_task(path, {"lr": 1})
    path.write_text(path.read_text() + "\ntask = whole(1.0)\n")
    with pytest.raises(TaskError, match=r"without parameters.*def task\(lr=\.\.\.\)"):
        load_task(path, {"lr": 1})
