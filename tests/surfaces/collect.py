"""What others may rely on, as lines of text: one function for each surface.

Some is read from the code, some from what a run and a preparation leave. Names of classes are
no surface; the names of their fields in files are.
"""

import dataclasses
import inspect
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import typer
from msgspec import inspect as kinds

import manyhands as mh
from manyhands.accounting.ledger_lines import AnyEntry
from manyhands.cli import exit_codes as program
from manyhands.data.encoding.fitted_encoders import Fitted
from manyhands.data.shards.manifest import Manifest
from manyhands.values import errors
from manyhands.values.config import EFFECTS, LIVE, SECTIONS
from manyhands.values.events import AnyEvent
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.server_load import ServerStatus
from manyhands.values.verdict import Verdict
from manyhands.values.worker_status import Link

Lines = Iterator[str]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Folders that were really made."""

    run: Path
    prepared: Path


TASK = """
import torch, manyhands as mh
from torch import nn

x = torch.arange(64.0).view(32, 2) / 64

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.norm(self.line(x)).sum(1) + self.passing

task = mh.Task(
    model=Model,
    data={"x": x, "y": x.sum(1)},
    held_out=0.25,
    loss=lambda m, b: (((m(b["x"]) - b["y"]) ** 2).mean(), len(b["y"]), {"largest": 1.0}),
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 4),
    predict=lambda m, b: (m(b["x"]), b["y"]),
    scores={"mae": lambda p, t: (p - t).abs().mean()},
)
"""
SETTINGS = [
    "train.batch=8",
    "train.micro_batch=4",
    "train.steps=6",
    "checkpoint.every_steps=3",
    "evaluate.every_steps=3",
    "log.every_steps=1",
    "log.csv=true",
    "log.tensorboard=true",
]
TABLE = "who,when,size,colour,said,right\n" + "".join(
    f"w{i},2024-05-{i % 28 + 1:02d},{i * 7 % 31},{'red' if i % 3 else 'blue'},one two,{i % 2}\n"
    for i in range(80)
)


def make(folder: Path, launcher: Any = None) -> Evidence:
    """A run with everything in it, in which a worker is killed; and a prepared folder."""
    (folder / "small.py").write_text(TASK)
    mh.train(
        folder / "small.py",
        to=folder / "run",
        workers=2,
        settings=SETTINGS,
        quiet=True,
        launcher=launcher,
        faults=FaultPlan().kill(rank=1, at_step=4),
    )
    (folder / "table.csv").write_text(TABLE)
    mh.prepare(
        [str(folder / "table.csv")], folder / "prepared", label="right", id="who", quiet=True
    )
    return Evidence(folder / "run", folder / "prepared")


# ---- Python


def public_names(_: Evidence) -> Lines:
    yield from mh.__all__


def signatures(_: Evidence) -> Lines:
    """Of what can be called: parameters and defaults; of classes also what their objects have."""
    configs = {mh.RunConfig, *SECTIONS.values()}  # a surface of their own
    for name in mh.__all__:
        thing = getattr(mh, name)
        if not callable(thing) or thing in configs:
            continue
        yield name
        parameters = _parameters(thing)
        yield from (f"  {line}" for line in _told(parameters))
        if isinstance(thing, type):
            known = {a for kind in thing.__mro__[:-1] for a in vars(kind)} - set(dir(Exception))
            others = sorted(known - {parameter.name for parameter in parameters})
            yield from (f"  .{name}" for name in others if not name.startswith("_"))


def _parameters(thing: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(thing).parameters.values())
    except ValueError:  # an exception that takes what exceptions take
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


def _told(parameters: list[inspect.Parameter]) -> Lines:
    kind = None
    for parameter in parameters:
        if parameter.kind == parameter.KEYWORD_ONLY and kind != parameter.kind:
            yield "*"
        kind = parameter.kind
        yield str(parameter.replace(annotation=inspect.Parameter.empty)).replace("=", " = ")


def config_fields(_: Evidence) -> Lines:
    """Sections, settings, what they may be and what they are when left out."""
    whole = mh.RunConfig()
    for name, section in SECTIONS.items():
        yield f"[{name}]" if getattr(whole, name) else f"[{name}] when it is there"
        for field in dataclasses.fields(section):
            kind = field.type if not isinstance(field.type, type) else field.type.__name__
            yield f"  {field.name}: {kind} = {field.default!r}".replace("typing.", "")
    yield "what of the result follows from them"
    yield from (f"  {name}: {effect}" for name, effect in EFFECTS.items())
    yield "while a run goes on"
    yield from (f"  {name}" for name in LIVE)


# ---- the command line


def commands(_: Evidence) -> Lines:
    """Every command: arguments and options, what they take, what they are when left out."""
    app: Any = typer.main.get_command(program.app)
    yield "manyhands"
    yield from (f"  {_option(option)}" for option in app.params)
    for name, command in sorted(app.commands.items()):
        yield f"manyhands {name}"
        yield from (f"  {_option(option)}" for option in command.params)


def _option(option: Any) -> str:
    argument = option.param_type_name == "argument"
    names = [option.metavar or option.name.upper()] if argument else option.opts
    told = [f"{'/'.join([*names, *option.secondary_opts])}:"]
    if getattr(option, "is_flag", False):
        told.append("flag")
    else:
        kind = option.type_descriptor.annotation
        told.append(next(iter(get_args(kind)), kind).__name__)
    told += ["(any number)"] if option.multiple or option.nargs == -1 else []
    told += [f"<{option.metavar}>"] if option.metavar and not argument else []
    told += ["required"] if option.required else [f"= {_plain(option.default)!r}"]
    told += ["(hidden)"] if option.hidden else []
    return " ".join(told)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def exit_codes(made: Evidence) -> Lines:
    """Of the program, by how a command ended."""
    needed: dict[type[Exception], tuple[Any, ...]] = {
        errors.LossNotFinite: (0, 1, 2, 0.5, []),
        errors.GradientNotFinite: (0, 1),
        errors.UnevenBuffer: ("name", 1),
        errors.AuditMismatch: (1, 2),
        errors.EmbeddingsDiffer: (1, 2),
        errors.Interrupted: ("run", 1, "resume it"),
        errors.TableFull: ("user", 1, 1, 1, 1, "rows"),
    }
    ours = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    yield f"it is done: {_code(None)}"
    yield f"no such command: {_code('nonsense')}"
    yield f"no such option: {_code('status', '--nonsense')}"
    yield f"a run that is not there: {_code('status', 'nowhere')}"
    yield f"no command: {_code()}"
    broken = made.run.with_name("broken")
    shutil.copytree(made.run, broken, dirs_exist_ok=True)
    lines = (made.run / "ledger.jsonl").read_text().splitlines(keepends=True)
    first = next(k for k, line in enumerate(lines) if '"Committed"' in line)
    (broken / "ledger.jsonl").write_text("".join([*lines[:first], *lines[first + 1 :]]))
    yield f"a ledger that proves nothing, with --check: {_code('ledger', str(broken), '--check')}"
    for kind in ours:
        yield f"{kind.__name__}: {_code(kind(*needed.get(kind, ('why',))))}"
    for kind in (KeyboardInterrupt, OSError):
        yield f"{kind.__name__}: {_code(kind())}"


def _code(*how: Any) -> int:
    """Of a command line, or of a command that raises this (None: nothing)."""

    def app(standalone_mode: bool, obj: object) -> None:
        if how[0] is not None:
            raise how[0]

    given = not how or isinstance(how[0], str)
    with (
        mock.patch("sys.argv", ["manyhands", *how] if given else ["manyhands"]),
        mock.patch.object(program, "app", program.app if given else app),
    ):
        try:
            program.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


# ---- files of a run


def run_folder(made: Evidence) -> Lines:
    """What a run leaves, with numbers as N."""
    names = {
        re.sub(r"\d+", "N", str(path.relative_to(made.run)))
        for path in made.run.rglob("*")
        if path.is_file()
    }
    yield from sorted(re.sub(r"(tfevents)\..*", r"\1.*", name) for name in names)


def run_files(made: Evidence) -> Lines:
    """The fields of its JSON files, the columns of its table, the bytes of its losses."""
    for name in ("plan", "task/task", "status"):
        yield f"{name}.json"
        yield from (f"  {line}" for line in _shape(_json(made.run / f"{name}.json")))
    yield from (f"  links[].{line}" for line in _fields(kinds.type_info(Link)))
    yield from (f"  servers[].{line}" for line in _fields(kinds.type_info(ServerStatus)))
    for name, kind in (("report", mh.Report), ("verdict", Verdict)):
        yield f"{name}.json"
        there = _json(made.run / f"{name}.json").keys()
        for field in _fields(kinds.type_info(kind)):
            written = field.partition(":")[0] in there
            yield f"  {field}" + ", is not written" * (not written)
    yield "metrics.csv"
    rows = [line.split(",") for line in (made.run / "metrics.csv").read_text().splitlines()]
    yield f"  {','.join(rows[0])}"
    yield from (f"  {name}" for name in sorted({row[1] for row in rows[1:]}))
    yield "losses.bin"
    first, loss = struct.unpack("<qd", (made.run / "losses.bin").read_bytes()[:16])
    lines = (made.run / "events.jsonl").read_text().splitlines()
    logged = next(e for e in map(json.loads, lines) if e["event"] == "Stepped")
    same = (first, loss) == (logged["step"], logged["loss"])
    yield f"  16 bytes a step, int64 step and float64 loss: {same}"


def events(_: Evidence) -> Lines:
    """Lines of events.jsonl."""
    yield from _tagged(AnyEvent)


def ledger(_: Evidence) -> Lines:
    """Lines of ledger.jsonl."""
    yield from _tagged(AnyEntry)


def checkpoint(made: Evidence) -> Lines:
    """The manifest of a saved step, and the names, types and shapes in its files."""
    folder = made.run / "checkpoints" / "step-00000006"
    yield "manifest.json"
    yield from (f"  {line}" for line in sorted(_shape(_json(folder / "manifest.json"))))
    found: dict[str, set[str]] = {}
    for path in folder.glob("*.safetensors"):
        lines = found.setdefault(re.sub(r"\d+", "N", path.name), set())
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        for name, text in header.pop("__metadata__", {}).items():
            try:
                lines |= {f"metadata {name}: {line}" for line in _shape(json.loads(text))}
            except ValueError:
                lines.add(f"metadata {name}: {text}")
        for name, tensor in header.items():
            whole = "@" not in name  # of what is shared out, where it is cut is nobody's business
            shape = f" {tensor['shape']}" if whole else ""
            lines.add(f"{re.sub('@.*', '@N', name)}: {tensor['dtype']}{shape}")
    for name in sorted(found):
        yield name
        yield from (f"  {line}" for line in sorted(found[name]))


# ---- prepared data


def data_manifest(made: Evidence) -> Lines:
    """Its fields, those of every encoder, and what a preparation says of where it comes from."""
    yield from _fields(kinds.type_info(Manifest))
    yield "encoders"
    yield from (f"  {line}" for line in _tagged(Fitted))
    whole = _json(made.prepared / "manifest.json")
    for name in ("lineage", "leakage"):
        yield name
        yield from (f"  {line}" for line in _shape(whole[name]))
    yield "statistics"
    for column, facts in whole["statistics"].items():
        told = {re.sub(r"(common values)\..*", r"\1", line) for line in _shape(facts)}
        yield f"  {column}: {', '.join(sorted(told))}"


def data_folder(made: Evidence) -> Lines:
    yield from sorted(
        {re.sub(r"\d+", "N", str(p.relative_to(made.prepared))) for p in made.prepared.rglob("*")}
    )


# ---- how types and values are told


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _shape(value: Any, at: str = "") -> list[str]:
    """The fields of a JSON value and what they hold, with numbers of files as N."""
    match value:
        case dict() if value:
            inner = (_shape(v, f"{at}.{k}" if at else k) for k, v in value.items())
            return _once(line for lines in inner for line in lines)
        case list() if value:
            return _once(line for item in value for line in _shape(item, f"{at}[]"))
        case dict() | list():
            kind = "empty"
        case bool():
            kind = "true or false"
        case int() | float():
            kind = "number"
        case None:
            kind = "null"
        case _:
            kind = "text"
    name = re.sub(r"@\d+", "@N", re.sub(r"-\d+\.", "-N.", at))
    return [f"{name or 'it'}: {kind}"]


def _once(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def _tagged(union: Any) -> Lines:
    info = kinds.type_info(union)
    assert isinstance(info, kinds.UnionType)
    for one in sorted(info.types, key=lambda t: str(getattr(t, "tag", ""))):
        assert isinstance(one, kinds.StructType)
        yield f"{one.tag_field} = {one.tag}"
        yield from (f"  {line}" for line in _fields(one))


def _fields(info: kinds.Type) -> Lines:
    assert isinstance(info, kinds.StructType | kinds.DataclassType)
    for field in info.fields:
        left_out = "" if field.required else " (may be left out)"
        yield f"{field.encode_name}: {_type(field.type)}{left_out}"


def _type(info: Any) -> str:
    match info:
        case kinds.StructType() | kinds.DataclassType():
            return f"{{{', '.join(_fields(info))}}}"
        case kinds.UnionType():
            return " or ".join(_type(one) for one in info.types)
        case kinds.DictType():
            return f"{_type(info.key_type)} to {_type(info.value_type)}"
        case kinds.ListType() | kinds.VarTupleType():
            return f"[{_type(info.item_type)}]"
        case kinds.TupleType():
            return f"({', '.join(_type(one) for one in info.item_types)})"
        case kinds.LiteralType():
            return " or ".join(repr(value) for value in info.values)
        case _:
            return type(info).__name__.removesuffix("Type").lower()


SURFACES: dict[str, Callable[[Evidence], Lines]] = {
    "public_names": public_names,
    "signatures": signatures,
    "config": config_fields,
    "commands": commands,
    "exit_codes": exit_codes,
    "run_folder": run_folder,
    "run_files": run_files,
    "events": events,
    "ledger": ledger,
    "checkpoint": checkpoint,
    "data_manifest": data_manifest,
    "data_folder": data_folder,
}


def kept(name: str) -> Path:
    return Path(__file__).parent / f"{name}.txt"


def text_of(name: str, made: Evidence) -> str:
    return "".join(f"{line}\n" for line in SURFACES[name](made))
