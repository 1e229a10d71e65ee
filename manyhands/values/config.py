# SPDX-License-Identifier: Apache-2.0
"""RunConfig: frozen data with its manual underneath each field.

One way in: a TOML file (or the dataclass itself), then `--set section.key=value`, then nothing.
A section left out means the feature is off. Errors name the key and, when it is misspelt, the
nearest right one. No default depends on the number of workers: it must not change the result.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from manyhands.values.errors import ConfigError
from manyhands.values.other_words import of_the_optimizer, setting_called, where_it_lives
from manyhands.values.server_config import NO_CHOICE, ServerConfig
from manyhands.values.setting_fields import Effect, effect_of, is_live, setting
from manyhands.values.toml_values import in_plain_words, nearest, read_value, written_value
from manyhands.values.train_config import TrainConfig, at_least

BY_DEFAULT_S = 300.0
"""Nobody loses a day for want of a setting."""

MOST_READERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int | None = setting(None, "nothing", live=True)
    """Save after this many optimizer steps. The last step is always saved. Left out: by time."""

    every_s: float | None = setting(None, "nothing", live=True)
    """Save after about this many seconds, at whatever step that is; less often where saving would
    take more than a hundredth of the time. 0: never. Left out: 300, or never with `every_steps`."""

    keep_last: int = setting(3, "nothing", live=True)
    """How many committed steps stay on disk; older ones are deleted after a commit."""

    keep_best: str | None = setting(None, "nothing")
    """Also keep the step with the best held-out score: its name, as in "accuracy" (largest is
    best), "loss" (smallest is best), or "error:min" to say so."""

    def __post_init__(self) -> None:
        never = "To save the last step only, set checkpoint.every_s=0."
        at_least("checkpoint", "every_steps", self.every_steps, 1, never)
        at_least("checkpoint", "every_s", self.every_s, 0)
        at_least("checkpoint", "keep_last", self.keep_last, 1)

    @property
    def by_clock_s(self) -> float:
        """Save about this often by the clock; 0: not by the clock."""
        if self.every_s is None:
            return BY_DEFAULT_S if self.every_steps is None else 0.0
        return self.every_s


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    every_steps: int | None = setting(None, "end", live=True)
    """Score the held-out records after this many steps; left out, once per epoch."""

    stop_early: int | None = setting(None, "end")
    """Stop after this many evaluations in a row without a better score."""

    by: str = setting("loss", "end")
    """The score that decides about stopping: "loss", "accuracy", "error:min", ..."""

    batch: int | None = setting(None, "scores")
    """Records per forward pass; left out, train.micro_batch. Part of the (last bits of the) scores,
    the number of workers is not."""

    weights: Literal["trained", "ema", "swa"] = setting("trained", "end")
    """Which are scored: those that are trained, or their average ("ema" needs train.ema, "swa"
    needs train.swa), with the buffers of the model."""

    def __post_init__(self) -> None:
        at_least("evaluate", "every_steps", self.every_steps, 1)
        at_least("evaluate", "stop_early", self.stop_early, 1)
        at_least("evaluate", "batch", self.batch, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    every_steps: int = setting(10, "nothing", live=True)
    """Write the loss and the numbers returned beside it after this many steps."""

    csv: bool = setting(False, "nothing")
    """Also to metrics.csv in the run folder."""

    tensorboard: bool = setting(False, "nothing")
    """Also for TensorBoard, in the run folder's tensorboard/ (pip install tensorboard)."""

    def __post_init__(self) -> None:
        at_least("log", "every_steps", self.every_steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    silent_s: float = setting(3.0, "nothing")
    """A worker that sends no heartbeat for so long is killed and replaced."""

    host_s: float = setting(2.0, "nothing")
    """A host that does not answer for so long is given up, and stops its workers by itself."""

    stuck_s: float = setting(30.0, "nothing")
    """A worker that lives but gets nothing done for so long (and for 10 times the usual time of a
    micro-batch) is killed and replaced."""

    evaluate_s: float = setting(300.0, "nothing")
    """The same for a batch of held-out records, and for a score over all of them."""

    starting_s: float = setting(600.0, "nothing")
    """The same for what a worker does for the first time: building the task, a micro-batch of some
    size, an evaluation. These may have to compile, or to load what they need."""

    losses: int = setting(5, "nothing")
    """So many losses one after the other, without a new step between them, are survived; one more
    ends the run."""

    rebalance: bool = setting(True, "nothing")
    """Deal fewer micro-batches to slower workers."""

    def __post_init__(self) -> None:
        at_least("recovery", "silent_s", self.silent_s, 0.5)
        at_least("recovery", "host_s", self.host_s, 1.0)
        at_least("recovery", "stuck_s", self.stuck_s, 0.5)
        at_least("recovery", "evaluate_s", self.evaluate_s, 0.5)
        at_least("recovery", "starting_s", self.starting_s, 0.5)
        at_least("recovery", "losses", self.losses, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    fold: int | None = setting(None, "weights")
    """Of data that was prepared with folds: which one is held out, from 0."""

    transfer: Literal["auto", "direct", "peer", "replicate"] = setting("auto", "nothing")
    """How the shards of data behind a URL get here: "direct" fetches each when it is needed (as
    "auto" does), "peer" does so from the host that keeps it, and only that one from the URL,
    "replicate" fetches all of them before the first step."""

    placement: Literal["hash", "block", "random", "balanced"] = setting("hash", "nothing")
    """With transfer = "peer", which host keeps which shards: "hash" moves few when hosts come and
    go, "block" gives each consecutive ones, "random" as many to each, "balanced" as many bytes."""

    readers: int | Literal["auto"] = setting("auto", "nothing")
    """Processes of each worker that fetch and collate micro-batches ahead of it, for data whose
    records take long to fetch or decode; 0: each worker fetches its own. "auto": none, until
    fetching was measured to hold steps up and there is something to gain; the run says so then. Of
    a stream: "auto" is one for all workers of a host, 0 none."""

    pass_records: int | None = setting(None, "weights")
    """Of a stream: how many records are one pass over it, an epoch. Left out: it is counted, by
    reading it once, when a run is given epochs; with `train.steps` it has no end."""

    shuffle_window: int | None = setting(None, "weights")
    """Of a stream: so many records are shuffled at a time; a worker holds two windows at the most.
    Left out: records are used in the order in which they come."""

    cache: str | None = setting(None, "nothing")
    """The folder that keeps fetched shards, for all workers of a host. Left out: manyhands below
    the user's cache directory ($XDG_CACHE_HOME or ~/.cache). If it is not there it is made, for its
    owner alone."""

    cache_limit: str | None = setting(None, "nothing")
    """How much that folder may hold, as in "20GB"; what was used least recently goes. Left out: no
    limit, and nothing goes."""

    def __post_init__(self) -> None:
        at_least("data", "fold", self.fold, 0)
        at_least("data", "pass_records", self.pass_records, 1)
        at_least("data", "shuffle_window", self.shuffle_window, 1)
        if self.readers != "auto":
            at_least("data", "readers", self.readers, 0)
            if self.readers > MOST_READERS:
                raise ConfigError(f"data.readers = {self.readers}: {MOST_READERS} at the most.")
            if self.readers and self.transfer == "peer":
                raise ConfigError(
                    'data.readers with data.transfer = "peer": which host keeps which shard is '
                    'told to workers alone. Use transfer = "direct", or readers = 0.'
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    train: TrainConfig = field(default_factory=TrainConfig)
    server: ServerConfig | None = None
    """Left out: no servers, or (train.sync = "server") one."""
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Left out: every five minutes or so, and the last step."""
    evaluate: EvaluateConfig | None = None
    """Left out: held-out records, if there are any, are scored once at the end."""
    log: LogConfig = field(default_factory=LogConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)

    def __post_init__(self) -> None:
        if self.server is not None and self.train.sync != "server":
            raise ConfigError(
                f'[server] has settings, but train.sync = "{self.train.sync}": set it to "server" '
                "(or --sync server), or leave out [server]."
            )
        if self.server is not None and self.server.merges:
            _refuse_with_merging(self.server.mode, self.train)
        if self.scored_weights != "trained" and getattr(self.train, self.scored_weights) is None:
            example = {"ema": "0.999", "swa": "1"}[self.scored_weights]
            raise ConfigError(
                f'evaluate.weights = "{self.scored_weights}" scores an average that this run does '
                f"not keep: set train.{self.scored_weights} (as in {example}), or leave it out."
            )

    @property
    def servers(self) -> ServerConfig | None:
        """How they are to be; None: the workers update the weights themselves."""
        return (self.server or ServerConfig()) if self.train.sync == "server" else None

    @property
    def scored_weights(self) -> str:
        """Those that the optimizer trains, or which average of them."""
        return self.evaluate.weights if self.evaluate else "trained"

    @property
    def evaluation_batch(self) -> int:
        """Held-out records per forward pass."""
        wanted = self.evaluate.batch if self.evaluate else None
        return wanted or self.train.micro_batch_size

    def with_settings(self, settings: Iterable[str]) -> "RunConfig":
        """This config changed by `section.key=value` strings, as `--set` gives them."""
        tree = to_dict(self)
        for given in settings:
            path, sign, text = given.partition("=")
            section, dot, key = path.strip().partition(".")
            if not (sign and dot and key):
                raise ConfigError(f"--set {given}: {_how_to_set(section, text)}")
            if path.strip() in _INSTEAD:  # a length given here replaces the other kind of length
                tree.get("train", {}).pop(_INSTEAD[path.strip()], None)
            tree.setdefault(section, {})[key] = read_value(text.strip())
            if section == "server":
                tree["train"]["sync"] = "server"
            elif path.strip() == "train.sync" and read_value(text.strip()) != "server":
                tree.pop("server", None)
        return from_dict(tree)


def _how_to_set(name: str, value: str) -> str:
    """About a setting that was given without its section."""
    if (own := of_the_optimizer(name)) is not None:
        return where_it_lives(own, value.strip() or "...")
    if (setting := setting_called(name, EFFECTS)) is not None:
        return f"did you mean --set {setting}={value.strip() or '...'}?"
    return (
        "write it as section.key=value, as in --set train.batch=512. (Parameters of the task are "
        "given by --param name=value.)"
    )


def _refuse_with_merging(mode: str, train: TrainConfig) -> None:
    """What needs all workers to be at the same step."""
    asked = {
        "train.ema": train.ema is not None,
        "train.swa": train.swa is not None,
        "train.audit_every": train.audit_every is not None,
        'train.not_finite = "skip"': train.not_finite == "skip",
        'train.precision = "fp16"': train.precision == "fp16",
        'train.device = "cuda"': train.device == "cuda",
    }
    for setting_, given in asked.items():
        if given:
            raise ConfigError(
                f'{setting_} is not there with server.mode = "{mode}", where workers are at '
                'different steps. Leave it out, or use server.mode = "sync".'
            )


_INSTEAD = {"train.steps": "epochs", "train.epochs": "steps"}


SECTIONS: dict[str, type] = {
    "train": TrainConfig,
    "server": ServerConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "evaluate": EvaluateConfig,
    "log": LogConfig,
    "recovery": RecoveryConfig,
}

EFFECTS: dict[str, Effect] = {
    f"{name}.{each.name}": effect_of(each)
    for name, section in SECTIONS.items()
    for each in fields(section)
}
"""Setting → what of the result follows from it."""

LIVE = tuple(
    f"{n}.{f.name}" for n, section in SECTIONS.items() for f in fields(section) if is_live(f)
)
"""Settings that may change while a run goes on; beside them, the optimizer's hyper-parameters."""


HEARD_SCORE = "heard_score"
"""In the journal beside what `manyhands set` changed: the score after which a schedule that waits
for one (ReduceLROnPlateau) was stepped."""


def read_changes(settings: Iterable[str]) -> dict[str, Any]:
    """`manyhands set`'s arguments: lr=3e-4 weight_decay=0.1 train.clip_norm=1 log.every_steps=5."""
    changes: dict[str, Any] = {}
    for given in settings:
        name, sign, text = (part.strip() for part in given.partition("="))
        if not sign or not name or not text:
            raise ConfigError(f"{given}: write it as name=value, as in lr=3e-4.")
        if name == "clip_norm":
            name = "train.clip_norm"
        if "." in name and name not in LIVE:
            raise ConfigError(_why_not_now(name))
        changes[name] = read_value(text)
    return changes


def _why_not_now(name: str) -> str:
    """A setting that no running run can change: when it can be, or what was meant."""
    match EFFECTS.get(name):
        case None:
            return (
                f"{name} cannot change while a run goes on{nearest(name, LIVE)} "
                "The optimizer's own (lr, weight_decay, ...) have no section."
            )
        case "weights" | "saved":
            return f"{name} is part of the result, so a run keeps it for life: start a new run."
        case _:
            return (
                f"{name} cannot change while a run goes on. Stop it, and resume it with "
                f"--set {name}=..."
            )


def changed(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: what each was, and what it is. A section that is not there has the
    settings that it would have if it were left empty."""
    found: dict[str, tuple[Any, Any]] = {}
    for path in EFFECTS:
        name, _, key = path.partition(".")
        was, now = (
            getattr(getattr(config, name) or SECTIONS[name](), key) for config in (before, after)
        )
        if was != now:
            found[path] = (was, now)
    return found


def of_the_result(config: RunConfig) -> RunConfig:
    """What the weights (and their averages) follow from, where its data is and how patient it is;
    nothing else of it."""
    train = {f.name: getattr(config.train, f.name) for f in fields(config.train)}
    kept = {n: v for n, v in train.items() if EFFECTS[f"train.{n}"] in ("weights", "saved")}
    return RunConfig(train=TrainConfig(**kept), data=config.data, recovery=config.recovery)


def live_settings(changes: Mapping[str, Any]) -> list[str]:
    """Those of the changes that are config, as `with_settings` takes them."""
    return [f"{name}={written_value(value)}" for name, value in changes.items() if "." in name]


def from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """A config from nested mappings, as TOML gives them. Unknown keys and wrong types are named."""
    sections: dict[str, Any] = {}
    for name, values in tree.items():
        if name not in SECTIONS:
            if not isinstance(values, Mapping):
                raise ConfigError(_without_section(name, values))
            raise ConfigError(f"there is no section [{name}]{nearest(name, SECTIONS)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name} is a section: write [{name}] and its settings below it.")
        sections[name] = _section(name, dict(values))
    if "server" in tree and "sync" not in tree.get("train", {}):  # who names it wants it
        sections["train"] = _section("train", {**tree.get("train", {}), "sync": "server"})
    return RunConfig(**sections)


def _without_section(name: str, value: Any) -> str:
    """About a setting that stands where sections do."""
    if (own := of_the_optimizer(name)) is not None:
        return where_it_lives(own, written_value(value))
    if (setting := setting_called(name, EFFECTS)) is None:
        return f"there is no section [{name}]{nearest(name, SECTIONS)}"
    section, _, key = setting.partition(".")
    return (
        f"'{name}' is in no section; did you mean [{section}] {key} = {written_value(value)}? "
        f'(In Python: {{"{section}": {{"{key}": {value!r}}}}}.)'
    )


def from_toml(text: str, *, where: str) -> tuple[RunConfig, str | None]:
    """Config, and the `task = "..."` at the top of the file if there is one."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    task = tree.pop("task", None)
    tree.pop("params", None)  # the task's own: see task_params.py
    if task is not None and not isinstance(task, str):
        raise ConfigError(f'{where}: write the task as task = "file.py", at the top of the file.')
    try:
        return from_dict(tree), task
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_toml(path: Path) -> tuple[RunConfig, str | None]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return from_toml(text, where=str(path))


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Without the settings that are absent (TOML has no null)."""
    return {
        name: {key: value for key, value in section.items() if value is not None}
        for name, section in asdict(config).items()
        if section is not None
    }


def to_toml(
    config: RunConfig, *, task: str | None = None, params: Mapping[str, Any] | None = None
) -> str:
    lines = [f"task = {written_value(task)}", ""] if task else []
    for name, section in {**({"params": params} if params else {}), **to_dict(config)}.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {written_value(value)}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


def _section(name: str, values: dict[str, Any]) -> Any:
    section = SECTIONS[name]
    known = [f.name for f in fields(section)]
    for key in values:
        if key not in known:
            if name == "server" and key in NO_CHOICE:
                raise ConfigError(NO_CHOICE[key])
            if (own := of_the_optimizer(key)) is not None:
                raise ConfigError(where_it_lives(own, written_value(values[key])))
            if (setting := setting_called(key, EFFECTS)) is not None:
                raise ConfigError(f"[{name}] has no setting '{key}'; did you mean {setting}?")
            raise ConfigError(f"[{name}] has no setting '{key}'{nearest(key, known)}")
    try:
        return msgspec.convert(values, section)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        text, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`")
        expected = in_plain_words(text.partition(", got")[0])
        if choices := get_args(get_type_hints(section).get(key)) if "enum" in text else ():
            expected = f"must be one of {', '.join(map(str, choices))}"
        raise ConfigError(f"{name}.{key}: {expected}, got {values.get(key)!r}.") from None
