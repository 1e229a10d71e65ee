"""Settings: every mistake is answered with what to do instead."""

import dataclasses
from typing import Any

import pytest

import manyhands as mh
from manyhands.planning.planner import plan
from manyhands.values.config import (
    EFFECTS,
    SECTIONS,
    RunConfig,
    changed,
    from_dict,
    from_toml,
    read_changes,
    to_toml,
)
from manyhands.values.errors import ConfigError
from manyhands.values.machine import Machine
from manyhands.values.option_fields import help_texts
from manyhands.values.setting_fields import effect_of

HERE = Machine("here", 4, 1 << 34)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.bacth=3", r"\[train\] has no setting 'bacth'; did you mean 'batch'"),
        ("trian.batch=3", r"no section \[trian\]; did you mean 'train'"),
        ("checkpoint.keep_lst=3", "did you mean 'keep_last'"),
        ("train.batch=abc", "train.batch: expected a whole number, got 'abc'"),
        ("train.batch=0", "train.batch must be at least 1"),
        ("train.micro_batch=48", "Set train.micro_batch to 32 or 64"),
        ("train.clip_norm=-1", "positive number"),
        ("train.precision=fp17", "one of fp32, bf16, fp16, got 'fp17'"),
        ("train.collective=nccl", 'needs train.device = "cuda"'),
        ("train.seed=-1", "train.seed"),
        ("something=3", "section.key=value"),
        ("train.batch", "section.key=value"),
        ("train.audit_every=0", "train.audit_every must be at least 1"),
        ("recovery.silent_s=0.1", "recovery.silent_s must be at least 0.5"),
        ("recovery.losses=-1", "recovery.losses must be at least 0"),
        ("recovery.sillent_s=3", "did you mean 'silent_s'"),
        ("data.transfer=pear", "one of auto, direct, peer"),
        ("data.placement=anywhere", "one of hash, block"),
        ("data.cache_limt=20GB", "did you mean 'cache_limit'"),
        ("data.cache_limit=20", "data.cache_limit: expected text, got 20"),
        ("checkpoint.every_steps=0", r"To save the last step only"),
    ],
)
def test_a_wrong_setting_is_answered(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig().with_settings([setting])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 64}, r"did you mean \[train\] batch = 64\?"),
        ({"batch_size": 64}, r'In Python: {"train": {"batch": 64}}'),
        ({"lr": 0.1}, "lr is no setting of a run"),
        ({"nonsense": 1}, r"there is no section \[nonsense\]"),
        ({"train": {"epochs": "five"}}, "train.epochs: expected a whole number, got 'five'"),
        ({"data": {"readers": 1.5}}, "data.readers: expected a whole number or text, got 1.5"),
    ],
)
def test_a_wrong_config_is_answered(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_dict(given)


def test_epochs_and_steps_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        from_dict({"train": {"epochs": 1, "steps": 1}})


def test_steps_on_the_command_line_replace_epochs_of_the_file() -> None:
    train = RunConfig().with_settings(["train.epochs=3"]).with_settings(["train.steps=5"]).train
    assert (train.epochs, train.steps) == (None, 5)


def test_toml_survives_a_round_trip() -> None:
    config = RunConfig().with_settings(
        ["train.clip_norm=0.1", "checkpoint.keep_best=accuracy", 'train.start_from="a \\"b\\""']
    )
    again, task = from_toml(to_toml(config, task="x.py"), where="there")
    assert (again, task) == (config, "x.py")
    assert config.checkpoint is not None and config.evaluate is None


def test_bad_toml_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"run.toml is not valid TOML"):
        from_toml("train = [", where="run.toml")
    with pytest.raises(ConfigError, match="train is a section"):
        from_dict({"train": 3})


@pytest.mark.parametrize(("batch", "size"), [(128, 16), (12, 3), (7, 7), (1, 1), (64, 8), (6, 3)])
def test_the_default_micro_batch_divides_the_batch(batch: int, size: int) -> None:
    assert mh.TrainConfig(batch=batch).micro_batch_size == size


def test_a_plan_says_why() -> None:
    made = plan(mh.TrainConfig(epochs=2), HERE, workers=None, records=1000)
    assert made.workers.value == 4 and "4 usable cores" in made.workers.because
    assert (made.steps.value, made.collective.value) == (16, "shared")


def test_more_workers_than_micro_batches_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Use --workers 8 at most, or set train.micro_batch to 8"
    ):
        plan(mh.TrainConfig(), HERE, workers=10, records=1000)
    with pytest.raises(ConfigError, match="at least 1"):
        plan(mh.TrainConfig(), HERE, workers=0, records=1000)


def test_every_setting_has_its_manual_underneath() -> None:
    for name, section in SECTIONS.items():
        for setting, text in help_texts(section).items():
            assert text, f"{name}.{setting} has no docstring"


def test_every_setting_says_what_of_the_result_follows_from_it() -> None:
    every = [f"{name}.{f.name}" for name, s in SECTIONS.items() for f in dataclasses.fields(s)]
    assert list(EFFECTS) == every

    @dataclasses.dataclass
    class Hasty:
        speed: int = 3

    with pytest.raises(TypeError, match=r"'speed' does not say what follows from it.*nothing"):
        effect_of(dataclasses.fields(Hasty)[0])


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.batch=3", "part of the result, so a run keeps it for life: start a new run"),
        ("data.fold=3", "part of the result"),
        ("train.overlap=false", "resume it with --set train.overlap="),
        ("train.clip_nrm=3", "did you mean 'train.clip_norm'"),
    ],
)
def test_what_a_running_run_cannot_change_is_answered(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_changes([setting])


def test_a_section_that_is_not_there_has_the_usual_settings() -> None:
    before = RunConfig()
    after = before.with_settings(["checkpoint.keep_last=3", "log.csv=true", "train.batch=128"])
    assert changed(before, after) == {"log.csv": (False, True)}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"readers": -1}, "data.readers must be at least 0"),
        ({"readers": 1000}, "64 at the most"),
        ({"readers": "many"}, "data.readers"),
        ({"readers": 1, "transfer": "peer"}, 'Use transfer = "direct", or readers = 0'),
    ],
)
def test_readers_that_cannot_be_are_refused(data: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        from_dict({"data": data})
    assert from_dict({}).data.readers == "auto"
