"""Runs are listed, compared and removed: real folders, what is printed, what is left."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.cli import exit_codes
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.run_folder import RunDir, locked

TASK = """
import torch, manyhands as mh
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
def task(lr=0.1, name="[bold]sgd"):
    return mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        data={"x": x, "y": x.sum(1)},
        held_out=0.25,
    )
"""
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def manyhands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["manyhands", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            exit_codes.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def two(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Under runs/, and one that failed before anything was saved."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    made: list[Path] = []
    for number, lr in enumerate((0.1, 0.2)):
        made.append(Path(f"runs/run-{number}"))
        settings = ["train.batch=16", f"train.steps={number + 1}"]
        mh.train(
            "task.py",
            to=made[-1],
            params={"lr": lr},
            workers=1,
            settings=settings,
            quiet=True,
            launcher=launcher,
        )

    def stop(event: object) -> None:
        raise ValueError("no more")

    with pytest.raises(mh.RunFailed):
        mh.train(
            "task.py", to="runs/broken", workers=1, quiet=True, launcher=launcher, on_step=stop
        )
    return made


def test_two_runs_are_compared(two: list[Path], manyhands: Call) -> None:
    code, out, _ = manyhands("runs", "--compare", "run-0", two[1])
    assert code == 0
    rows = {line.partition("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    assert rows["param lr"] == ["0.1", "0.2"] and rows["train.steps"] == ["1", "2"]
    assert rows["state"] == ["finished"] * 2 and rows["steps"] == ["1/1", "2/2"]
    assert "held-out loss" in rows and "fingerprint" in rows
    assert "param name" not in rows and "train.batch" not in rows  # they are the same
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    found = json.loads(manyhands("runs", "--compare", *two, "runs/broken", "--json")[1])
    assert [one["params"]["lr"] for one in found["runs"]] == ["0.1", "0.2", "0.1"]
    assert found["differences"]["state"] == ["finished", "finished", "failed"]
    code, _, err = manyhands("runs", "--compare", two[0])
    assert code == 2 and "name two runs" in err
    assert manyhands("runs", "--compare", two[0], "runs/nothing")[0] == 2


def test_parameters_are_listed_as_they_are(two: list[Path], manyhands: Call) -> None:
    out = manyhands("runs")[1]
    assert "lr=0.2" in out and "[bold]" in out.replace("\n", "")


def test_a_run_is_removed_when_told_so(two: list[Path], manyhands: Call) -> None:
    code, out, err = manyhands("rm", two[0])
    assert code == 2 and "--yes removes it" in err and "1 checkpoint" in out and two[0].exists()
    code, out, _ = manyhands("rm", two[0], "run-1", "--yes")
    assert code == 0 and "removed 2 runs" in out
    assert [path.name for path in Path("runs").iterdir()] == ["broken"]


def test_what_is_no_run_or_is_at_work_stays(two: list[Path], manyhands: Call) -> None:
    with locked(RunDir(two[0])):
        code, _, err = manyhands("rm", two[0], "--yes")
    assert code == 2 and "another process is at work in it" in err
    project = Path("project")
    project.mkdir()
    (project / "config.toml").write_text("")
    code, _, err = manyhands("rm", project, "--yes")
    assert code == 2 and "it is no run's folder" in err
    Path("link").symlink_to(two[0])
    assert "it is a link" in manyhands("rm", "link", "--yes")[2]
    assert manyhands("rm", "nowhere", "--yes")[0] == 2
    assert manyhands("rm", two[0], "nowhere", "--yes")[0] == 2  # then nothing is removed
    assert two[0].exists() and project.exists()


def test_nobody_removes_the_folder_that_they_are_in(
    two: list[Path], manyhands: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = two[0].absolute()
    monkeypatch.chdir(here / "logs")
    assert "you are in it" in manyhands("rm", here, "--yes")[2]
    assert here.exists()


def test_runs_without_a_checkpoint_are_pruned_and_older_ones_if_asked(
    two: list[Path], manyhands: Call
) -> None:
    code, out, _ = manyhands("runs", "--prune")
    assert code == 0 and "failed, and nothing was saved" in out and "--yes removes it" in out
    assert Path("runs/broken").exists()  # it was only shown
    code, out, _ = manyhands("runs", "--prune", "--yes")
    assert code == 0 and not Path("runs/broken").exists() and all(run.exists() for run in two)
    assert "no run is in the way" in manyhands("runs", "--prune", "--yes")[1]
    shown = json.loads(manyhands("runs", "--prune", "--keep", 1, "--json")[1])["would_go"]
    assert [Path(run["run"]).name for run in shown] == ["run-0"] and two[0].exists()
    assert manyhands("runs", "--prune", "--keep", 1, "--yes")[0] == 0
    assert not two[0].exists() and two[1].exists()
    assert manyhands("runs", "--keep", 1)[0] == 2


def test_bash_completes_commands_and_options() -> None:
    """As after `manyhands --install-completion bash`, in a real bash."""
    script = f"""
        PATH={Path(sys.executable).parent}:$PATH
        source <(manyhands --show-completion bash)
        complete_words() {{
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _manyhands_completion manyhands
            echo "${{COMPREPLY[@]}}"
        }}
        complete_words manyhands tr
        complete_words manyhands train --para
    """
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.split("\n")[:2] == ["train", "--param"], done.stderr
