"""What a setting says of itself (values/setting_fields.py) is tried: every one is changed."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.config import EFFECTS
from manyhands.values.errors import ConfigError
from tests.support.prepared_folders import fixed, write_folder
from tests.support.tasks import make
from tests.support.web import Web

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="aiohttp is not installed"
)

OTHER = {
    "train.sync": "alone",
    "server.count": "2",
    "train.collective": "gloo",
    "train.overlap": "false",
    "train.encrypt": "false",
    "train.unlike": "warn",
    "train.audit_every": "2",
    "data.transfer": "replicate",
    "data.placement": "block",
    "data.readers": "2",
    "data.cache": "{folder}/other-cache",
    "data.cache_limit": "1MB",
    "checkpoint.every_steps": "2",
    "checkpoint.every_s": "0.01",
    "checkpoint.keep_last": "1",
    "checkpoint.keep_best": "loss",
    "log.every_steps": "1",
    "log.csv": "true",
    "log.tensorboard": "true",
    "recovery.silent_s": "20",
    "recovery.host_s": "9",
    "recovery.stuck_s": "60",
    "recovery.starting_s": "500",
    "recovery.evaluate_s": "200",
    "recovery.losses": "1",
    "recovery.rebalance": "false",
    # These say when a run ends and how it is scored: with as many steps they change no weight.
    "evaluate.every_steps": "2",
    "evaluate.stop_early": "50",
    "evaluate.by": "error:min",
    "evaluate.batch": "3",
    # These are saved beside the weights, and change none of them.
    "train.ema": "0.9",
    "train.swa": "1",
    # These change the weights.
    "train.batch": "12",
    "train.micro_batch": "4",
    "train.seed": "1",
    "train.clip_norm": "0.01",
    "train.precision": "bf16",
    "train.start_from": "{folder}/start.safetensors",
    "train.epochs": "1",
    "train.steps": "6",
}
"""Setting → another value than the usual one."""

ELSEWHERE = {
    "server.mode": "where it is not sync, weights depend on timing; test_merging_servers.py",
    "server.staleness": "likewise; test_merging_servers.py",
    "train.checkpoint_activations": "keeps the bits, here; test_checkpointed_activations.py",
    "train.compile": "needs a compiler, and time; test_train_compile.py",
    "train.threads": "one more thread rounds a small product as before; docs/exactness.md",
    "train.device": "there is no GPU here",
    "train.portable": "other kernels may round a small product as before",
    "train.not_finite": "everything here is finite",
    "data.pass_records": "is for streams; tests/stories/test_streams.py",
    "data.shuffle_window": "is for streams; tests/stories/test_streams.py",
    "data.fold": "has a test of its own below",
    "evaluate.weights": "needs an average that is kept; test_weight_averages.py",
}
"""Setting → why its effect is not tried in one small run."""


def test_every_setting_is_tried() -> None:
    assert set(OTHER) | set(ELSEWHERE) == set(EFFECTS)


def table(first: int, rows: int) -> pa.Table:
    x = np.random.default_rng(first).normal(size=(rows, 4)).astype(np.float32)
    return pa.table({"_id": np.arange(first, first + rows), "x": fixed(x), "y": x.sum(axis=1)})


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    folder = tmp_path_factory.mktemp("web")
    write_folder(folder / "sums", {"train": [table(0, 20), table(20, 20)], "test": [table(99, 9)]})
    server = Web(folder)
    yield server
    server.end()


def task_over(web: Web) -> mh.Task:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 1))

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]).squeeze(1) - batch["y"]).square().mean()

    return mh.Task(
        model=net,
        loss=loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        data=web.url("sums"),
        predict=lambda model, batch: (model(batch["x"]).squeeze(1), batch["y"]),
        scores={"error": lambda found, right: float((found - right).abs().mean())},
    )


def trained(web: Web, launcher: Launcher, folder: Path, *settings: str) -> str:
    """The fingerprint of five steps, by two workers where the settings leave it to us."""
    base = ["train.batch=8", "train.micro_batch=2", "train.steps=5", f"data.cache={folder}/cache"]
    report = mh.train(
        task_over(web),
        to=folder / "run",
        workers=1 if "train.sync=alone" in settings else 2,
        settings=[*base, *settings],
        quiet=True,
        launcher=launcher,
    )
    return report.fingerprint


@pytest.fixture(scope="module")
def usual(web: Web, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(web, launcher, tmp_path_factory.mktemp("usual"))


def wanted_modules(setting: str) -> None:
    if setting == "log.tensorboard":
        pytest.importorskip("tensorboard")


@pytest.mark.parametrize(
    "setting", [s for s in OTHER if EFFECTS[s] in ("nothing", "scores", "saved")]
)
def test_what_is_no_part_of_the_result_changes_no_bit(
    setting: str, usual: str, web: Web, launcher: Launcher, tmp_path: Path
) -> None:
    wanted_modules(setting)
    value = OTHER[setting].format(folder=tmp_path)
    assert trained(web, launcher, tmp_path, f"{setting}={value}") == usual


@pytest.mark.parametrize("setting", [s for s in OTHER if EFFECTS[s] == "end"])
def test_what_says_where_a_run_ends_changes_no_bit_of_a_run_that_ends_there(
    setting: str, usual: str, web: Web, launcher: Launcher, tmp_path: Path
) -> None:
    found = trained(web, launcher, tmp_path, f"{setting}={OTHER[setting]}")
    longer = setting == "train.steps"  # an epoch has five steps, and so have the others
    assert (found == usual) is not longer


@pytest.mark.parametrize("setting", [s for s in OTHER if EFFECTS[s] == "weights"])
def test_what_is_part_of_the_result_changes_it(
    setting: str, usual: str, web: Web, launcher: Launcher, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(7)
    save_file(dict(task_over(web).model().state_dict()), tmp_path / "start.safetensors")
    value = OTHER[setting].format(folder=tmp_path)
    assert trained(web, launcher, tmp_path, f"{setting}={value}") != usual


# ---- resume


@pytest.fixture(scope="module")
def stopped(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "a run"
    mh.train(make("cnn"), to=folder, workers=1, settings=BASE, quiet=True, launcher=launcher)
    return folder


BASE = ["train.batch=24", "train.micro_batch=6", "train.steps=2"]
ANOTHER = OTHER | {
    "train.checkpoint_activations": '["head"]',
    "train.compile": "true",
    "train.threads": "2",
    "train.device": "cuda",
    "train.portable": "true",
    "train.not_finite": "skip",
    "data.fold": "2",
    "data.pass_records": "7",
    "data.shuffle_window": "8",
}


@pytest.mark.parametrize("setting", [s for s, e in EFFECTS.items() if e in ("weights", "saved")])
def test_a_resumed_run_keeps_what_its_steps_followed_from(
    setting: str, stopped: Path, launcher: Launcher
) -> None:
    settings = ["train.steps=4", f"{setting}={ANOTHER[setting].format(folder='/tmp')}"]
    before = (stopped / "config.toml").read_text()
    with pytest.raises(ConfigError) as refused:
        mh.resume(stopped, make("cnn"), settings=settings, quiet=True, launcher=launcher)
    said = str(refused.value)
    assert f"{setting} is part of the result" in said and "start a new one" in said
    assert (stopped / "config.toml").read_text() == before


@pytest.mark.parametrize("kind", ["odd", pytest.param("transformer", marks=pytest.mark.slow)])
def test_whoever_computes_goes_on_with_what_others_saved(
    kind: str, launcher: Launcher, tmp_path: Path
) -> None:
    """One alone keeps whole tensors of optimizer state, several keep stretches of them."""

    def train(to: Path, steps: int, sync: str) -> mh.Report:
        return mh.train(
            make(kind),
            to=to,
            workers=1 if sync == "alone" else 3,
            settings=[*BASE, f"train.steps={steps}", f"train.sync={sync}"],
            quiet=True,
            launcher=launcher,
        )

    calm = train(tmp_path / "calm", 4, "allreduce")
    for before, after in (("alone", "allreduce"), ("allreduce", "alone")):
        train(tmp_path / before, 2, before)
        again = mh.resume(
            tmp_path / before,
            make(kind),
            workers=1 if after == "alone" else 2,
            settings=["train.steps=4", f"train.sync={after}"],
            quiet=True,
            launcher=launcher,
        )
        assert again.fingerprint == calm.fingerprint


def test_a_setting_that_stays_what_it_was_is_no_change(launcher: Launcher, tmp_path: Path) -> None:
    mh.train(
        make("cnn"), to=tmp_path / "run", workers=1, settings=BASE, quiet=True, launcher=launcher
    )
    settings = ["train.steps=3", "train.batch=24", "train.seed=0"]
    again = mh.resume(
        tmp_path / "run", make("cnn"), settings=settings, quiet=True, launcher=launcher
    )
    assert again.step == 3


@pytest.mark.parametrize("setting", ["train.overlap=false", "train.audit_every=1", "log.csv=true"])
def test_a_resumed_run_may_be_computed_otherwise(
    setting: str, launcher: Launcher, tmp_path: Path
) -> None:
    def train(to: Path, steps: int) -> mh.Report:
        settings = [*BASE, f"train.steps={steps}"]
        return mh.train(
            make("cnn"), to=to, workers=2, settings=settings, quiet=True, launcher=launcher
        )

    calm = train(tmp_path / "calm", 4)
    train(tmp_path / "run", 2)
    again = mh.resume(
        tmp_path / "run",
        make("cnn"),
        workers=1,
        settings=["train.steps=4", setting],
        quiet=True,
        launcher=launcher,
    )
    assert again.fingerprint == calm.fingerprint


def test_no_run_goes_on_with_what_it_holds_out(launcher: Launcher, tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(40)))
    mh.prepare(csv, to=tmp_path / "data", label="y", folds=4, workers=1, quiet=True)
    file = tmp_path / "task.py"
    file.write_text(FOLDED.format(data=str(tmp_path / "data")))

    def settings(*more: str) -> list[str]:
        return ["train.batch=4", "train.micro_batch=2", *more]

    mh.train(
        file,
        to=tmp_path / "run",
        workers=1,
        settings=settings("train.steps=2", "data.fold=0"),
        quiet=True,
        launcher=launcher,
    )
    with pytest.raises(ConfigError, match=r"taken with data\.fold 0") as refused:
        mh.resume(
            tmp_path / "run",
            settings=["train.steps=4", "data.fold=2"],
            quiet=True,
            launcher=launcher,
        )
    assert "they have seen what that fold holds out" in str(refused.value)
    again = mh.resume(
        tmp_path / "run", settings=["train.steps=4", "data.fold=0"], quiet=True, launcher=launcher
    )
    assert again.step == 4


FOLDED = """
import torch
from torch import nn

import manyhands as mh

task = mh.Task(
    model=lambda: nn.Linear(1, 2),
    loss=lambda m, b: nn.functional.cross_entropy(m(b["x"].float().reshape(-1, 1)), b["y"].long()),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    data={data!r},
)
"""


# ---- replay


def test_a_replay_keeps_what_the_weights_follow_from_and_nothing_else(
    launcher: Launcher, tmp_path: Path
) -> None:
    """One that was alone is computed again by two who check each other."""
    settings = [*BASE, "train.sync=alone", "train.clip_norm=0.1", "train.seed=3", "log.csv=true"]
    settings += ["checkpoint.every_steps=1"]
    run = tmp_path / "run"
    mh.train(make("cnn"), to=run, settings=settings, quiet=True, launcher=launcher)
    for first in (0, 1):
        found = replay(run, make("cnn"), step=first, to=2, workers=2, audit=True, launcher=launcher)
        assert found.same and found.compared_weights[-1] == 2
