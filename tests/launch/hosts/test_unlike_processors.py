"""A host whose kernels are really others: its daemon has ATEN_CPU_CAPABILITY=default."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.ledger_lines import Computing
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.hosts.many_hosts import ManyHosts
from manyhands.stories.replay import replay
from manyhands.values.run_folder import RunDir
from tests.support.tasks import make
from tests.support.unlike_host import beside_another

SETTINGS = ["train.batch=24", "train.micro_batch=4", "train.steps=6", "log.every_steps=1"]


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyHosts]:
    with beside_another(tmp_path_factory.mktemp("unlike"), ATEN_CPU_CAPABILITY="default") as hosts:
        yield hosts


def train(launcher: Launcher, to: Path, workers: int, *settings: str) -> mh.Report:
    return mh.train(
        make("lstm"),
        to=to,
        workers=workers,
        settings=[*SETTINGS, *settings],
        quiet=True,
        launcher=launcher,
    )


def told(run: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def test_unlike_hosts_are_made_alike_or_told_of_or_turned_away(
    two_hosts: ManyHosts, launcher: Launcher, tmp_path: Path
) -> None:
    calm = train(launcher, tmp_path / "calm", 1)
    portable = train(launcher, tmp_path / "portable", 1, "train.portable=true")
    alike = train(two_hosts, tmp_path / "alike", 2, "train.portable=true")
    assert alike.fingerprint == portable.fingerprint != calm.fingerprint
    assert alike.workers == 2 and not told(tmp_path / "alike", "Warned")

    mixed = train(two_hosts, tmp_path / "mixed", 2, "train.unlike=warn")
    (warned,) = told(tmp_path / "mixed", "Warned")
    assert mixed.workers == 2 and mixed.fingerprint != calm.fingerprint
    assert "other computes otherwise than" in warned["text"] and "DEFAULT" in warned["text"]
    entries = read(RunDir(tmp_path / "mixed").ledger)
    (computing,) = [e for e in entries if isinstance(e, Computing)]
    assert len(computing.kernels) == 2, "the ledger says that they were unlike"
    again = replay(tmp_path / "mixed", make("lstm"), step=0, to=6, launcher=launcher)
    assert not again.same and "computes otherwise" in (again.otherwise or "")

    refused = train(two_hosts, tmp_path / "refused", 2)
    assert refused.workers == 1 and refused.fingerprint == calm.fingerprint
    (warned,) = told(tmp_path / "refused", "Warned")
    assert "other is turned away" in warned["text"]
    gone = [e["what"] for e in told(tmp_path / "refused", "Hosted") if e["host"] == "other"]
    assert any("it computes otherwise than" in what for what in gone)


def test_a_run_that_goes_on_with_other_kernels_says_so(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(launcher, tmp_path / "run", 1)
    ledger = RunDir(tmp_path / "run").ledger
    (computing,) = [e for e in read(ledger) if isinstance(e, Computing)]
    mark = computing.kernels[0].marks["sums"]
    ledger.write_text(ledger.read_text().replace(mark, "0" * len(mark)))
    again = replay(tmp_path / "run", make("lstm"), step=2, launcher=launcher)
    assert again.same and "other bits in sums" in (again.otherwise or "")
    capsys.readouterr()
    mh.resume(
        tmp_path / "run",
        make("lstm"),
        settings=["train.steps=8"],
        quiet=True,
        launcher=launcher,
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "this computes otherwise than what trained the run" in said
    assert "bits may differ from here on" in said
