"""The command line as people use it: real processes, exit codes, what is printed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.cli import exit_codes
from manyhands.launch.engines.launcher import Launcher

TASK = """
import torch, manyhands as mh
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
task = mh.Task(
    model=lambda: torch.nn.Linear(4, 1),
    loss=lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2).mean(),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    data={"x": x, "y": x.sum(1)},
    held_out=0.25,
    predict=lambda m, b: (m(b["x"])[:, 0], b["y"]),
    scores={"mae": lambda p, t: (p - t).abs().mean()},
)
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "line.py"
    path.write_text(TASK)
    return path


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def manyhands(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The command line in this process, with the warm launcher; returns (exit code, out, err)."""
    from contextlib import contextmanager

    from manyhands.driver.resolved_run import Attached
    from manyhands.stories import early_start

    @contextmanager
    def warm(where: object):
        yield Attached(launcher=launcher)
        launcher.stop()

    monkeypatch.setattr(early_start, "started_early", warm)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["manyhands", *map(str, arguments)])
        code = 0
        try:
            exit_codes.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(bool(error.code))
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_train_evaluate_fingerprint_status_and_runs(
    manyhands: Call, task: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "first"
    settings = ["--set", "train.batch=16", "--set", "train.epochs=3", "--set", "log.csv=true"]
    settings += ["--set", "log.every_steps=2", "--set", "log.tensorboard=true"]
    code, out, err = manyhands("train", task, "--to", run, "--workers", 3, *settings)
    assert code == 0, err
    assert "held-out mae" in out and "fingerprint" in out and f"  {run}\n" in out
    assert "workers: 3 (as asked)" in err and "micro-batches" in err
    scores = json.loads(manyhands("evaluate", run, "--json")[1])
    assert scores.keys() == {"loss", "mae"}
    report = json.loads((run / "report.json").read_text())
    assert scores == report["scores"]
    code, out, _ = manyhands("fingerprint", run)
    assert (code, out.strip()) == (0, report["fingerprint"])
    assert json.loads(manyhands("fingerprint", run, "--step", 9, "--json")[1])["fingerprint"]
    status = json.loads(manyhands("status", run, "--json")[1])
    assert (status["state"], status["step"], status["saved"]) == ("finished", 9, [9])
    assert [w["rank"] for w in status["workers"]] == [0, 1, 2]
    assert {"pid", "host", "step", "samples_per_s"} <= status["workers"][0].keys()
    assert "samples/s" in manyhands("status", run)[1]
    listed = json.loads(manyhands("runs", tmp_path / "runs", "--json")[1])
    assert [r["run"] for r in listed] == [str(run)]
    assert "finished" in manyhands("runs", tmp_path / "runs")[1]
    csv = (run / "metrics.csv").read_text().splitlines()
    assert csv[0] == "step,name,value" and any(line.startswith("8,train/loss,") for line in csv)
    assert any("held_out/mae" in line for line in csv)
    assert list((run / "tensorboard").iterdir())
    assert len(list((run / "logs").iterdir())) == 3
    assert (run / "task" / "line.py").read_text() == TASK


def test_toml_names_a_task(manyhands: Call, task: Path, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('task = "line.py"\n[train]\nbatch = 16\nsteps = 2\n')
    code, out, err = manyhands("train", toml, "--to", tmp_path / "run", "--json")
    assert code == 0, err
    assert json.loads(out)["step"] == 2
    code, out, err = manyhands(
        "resume", tmp_path / "run", "--workers", 2, "--set", "train.steps=5", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["step"] == 5


BAD = {
    "a misspelt setting": (["--set", "train.bacth=3"], "did you mean 'batch'"),
    "not divisible": (
        ["--set", "train.batch=10", "--set", "train.micro_batch=4"],
        "not divisible by train.micro_batch",
    ),
    "too many workers": (["--workers", 99], "Use --workers 8"),
    "no workers": (["--workers", 0], "at least 1"),
    "no time": (["--finish-by", "tea time"], "--finish-by tea time: not a time"),
    "a time that is past": (["--finish-by", "2020-01-01T08:00"], "is in the past"),
    "no speed": (["--samples-per-second", 0], "must be above 0"),
    "two wishes": (["--samples-per-second", 1, "--finish-by", "2h"], "give one of them"),
    "no choice": (["--samples-per-second", 1, "--workers", 2], "(--workers 1:2)"),
    "weights that are not there": (["--set", "train.start_from=nowhere"], "neither a run folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_request_is_exit_code_2(
    case: str, manyhands: Call, task: Path, tmp_path: Path
) -> None:
    arguments, says = BAD[case]
    code, _, err = manyhands("train", task, "--to", tmp_path / "run", *arguments)
    assert code == 2 and says in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


FILES = {
    "no task": ("x = 1", "defines no `task`"),
    "another type": ("task = 3", "has a `task` of type int"),
    "import error": ("import numpyy\n", "No module named 'numpyy'"),
    "syntax error": ("task = (", "SyntaxError"),
    "an incomplete task": ("import manyhands as mh\ntask = mh.Task(model=int)", "loss is missing"),
    "empty data": (TASK.replace("randn(64", "randn(0"), "data is empty"),
    "exit": ("raise SystemExit(3)", "could not be run"),
    "no module": (TASK.replace("torch.nn.Linear(4, 1)", "3", 1), "not a torch.nn.Module"),
    "a loss that is no number": (TASK.replace(".mean(),\n    opt", ",\n    opt"), "shape (2,)"),
    "a closure": (TASK.replace("SGD(m.parameters(), lr=0.1)", "LBFGS(m.parameters())"), "closure"),
    "a stranger": (TASK.replace("SGD(m.parameters()", "SGD([x.clone()]"), "are not the model's"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_task_is_exit_code_2(case: str, manyhands: Call, tmp_path: Path) -> None:
    text, says = FILES[case]
    path = tmp_path / "wrong.py"
    path.write_text(text)
    code, _, err = manyhands("train", path, "--to", tmp_path / "run", "--set", "train.batch=16")
    assert code == 2 and says in err and "Traceback" not in err, err
    assert not (tmp_path / "run").exists()


def test_a_missing_file_and_a_taken_folder(manyhands: Call, task: Path, tmp_path: Path) -> None:
    code, _, err = manyhands("train", tmp_path / "nothing.py")
    assert code == 2 and "cannot read the task file" in err
    (tmp_path / "taken").mkdir()
    code, _, err = manyhands("train", task, "--to", tmp_path / "taken")
    assert code == 2 and "already exists" in err
    for command in ("resume", "status", "evaluate", "fingerprint"):
        code, _, err = manyhands(command, tmp_path / "taken")
        assert code == 2 and "is not a run folder" in err


def test_a_failed_run_is_exit_code_1(manyhands: Call, task: Path, tmp_path: Path) -> None:
    task.write_text(TASK.replace('- b["y"]) ** 2', '- b["z"]) ** 2'))
    code, _, err = manyhands("train", task, "--to", tmp_path / "run", "--workers", 2, "--quiet")
    assert code == 1 and "KeyError: 'z'" in err and "line.py:6 in <lambda>" in err
    assert "worker-0" in err and "Traceback" not in err
    status = json.loads(manyhands("status", tmp_path / "run", "--json")[1])
    assert status["state"] == "failed" and "KeyError" in status["verdict"]


def processes_of(run: Path) -> list[str]:
    out = subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True, check=False)
    return out.stdout.split()


def start(task: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "manyhands", "train", str(task), "--to", str(run), *more]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def wait_for_step(run: Path, step: int) -> dict[str, object]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            status = json.loads((run / "status.json").read_text())
            if status["step"] >= step and status["workers"]:
                return status
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    raise AssertionError("it never got going")


def test_ctrl_c_saves_and_says_how_to_resume(manyhands: Call, task: Path, tmp_path: Path) -> None:
    run, calm = tmp_path / "run", tmp_path / "calm"
    settings = ["--set", "train.batch=16", "--set", "train.steps=1000000"]
    process = start(task, run, "--workers", "2", *settings)
    status = wait_for_step(run, 5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert f"manyhands resume {run}" in err
    gone(status)
    saved = json.loads(manyhands("status", run, "--json")[1])
    assert saved["state"] == "stopped"
    (step,) = saved["saved"]
    more = ["--set", f"train.steps={step + 7}"]
    code, _, err = manyhands("resume", run, "--workers", 3, *more)
    assert code == 0, err
    manyhands("train", task, "--to", calm, "--workers", 1, "--set", "train.batch=16", *more)
    assert manyhands("fingerprint", run)[1] == manyhands("fingerprint", calm)[1]


def gone(status: dict[str, object]) -> None:
    pids = [w["pid"] for w in status["workers"]]  # type: ignore[union-attr,index]
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "workers outlived the run"
        time.sleep(0.05)


def test_workers_die_with_a_killed_driver(task: Path, tmp_path: Path, manyhands: Call) -> None:
    run = tmp_path / "run"
    settings = ["--set", "train.batch=16", "--set", "train.steps=1000000"]
    process = start(task, run, "--workers", "3", *settings, "--set", "checkpoint.every_steps=5")
    status = wait_for_step(run, 8)
    deadline = time.monotonic() + 60
    while not list(run.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)  # it is written while training goes on
    process.kill()
    process.communicate(timeout=10)
    gone(status)
    found = json.loads(manyhands("status", run, "--json")[1])
    assert found["state"] == "died"
    steps = f"train.steps={max(found['saved']) + 3}"
    code, _, err = manyhands("resume", run, "--set", steps)
    assert code == 0, err


def test_inline_runs_in_this_process(task: Path, tmp_path: Path) -> None:
    import manyhands as mh

    report = mh.train(
        task,
        to=tmp_path / "run",
        workers=1,
        engine="inline",
        settings=["train.batch=16"],
        quiet=True,
    )
    assert report.step == 3
    with pytest.raises(mh.RequestError, match="--workers 1"):
        mh.train(
            task,
            to=tmp_path / "two",
            workers=2,
            engine="inline",
            settings=["train.batch=16"],
            quiet=True,
        )


def test_on_step_sees_every_step(task: Path, tmp_path: Path, launcher: Launcher) -> None:
    import manyhands as mh

    seen: list[int] = []
    mh.train(
        task,
        to=tmp_path / "run",
        workers=2,
        settings=["train.batch=16", "train.epochs=2"],
        on_step=lambda step: seen.append(step.step),
        quiet=True,
        launcher=launcher,
    )
    assert seen == [1, 2, 3, 4, 5, 6]


def test_the_commands_are_these() -> None:
    """Adding a command or an option is a decision: change this list with it."""
    from manyhands.cli.app import app

    found = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    assert found == {
        "prepare", "data", "train", "resume", "demo", "evaluate", "fingerprint", "status", "runs",
        "rm", "scale", "set", "pause", "continue", "stop",
        "worker", "token", "hosts", "doctor", "ledger", "replay", "audit", "predict",
    }  # fmt: skip


def test_the_demo_is_good_enough(manyhands: Call, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    code, out, err = manyhands("demo", "--to", run)
    assert code == 0, err
    assert json.loads((run / "report.json").read_text())["scores"]["accuracy"] >= 0.97
    assert "the same bits" in out
    assert json.loads((run / "report.json").read_text())["recoveries"] == 1
