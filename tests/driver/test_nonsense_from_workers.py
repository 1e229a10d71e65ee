"""A worker that is hostile or broken: whatever it says, the supervisor goes on and blames nobody
else for it."""

import copy
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.accounting.ledger import new_book
from manyhands.accounting.ledger_lines import Opened
from manyhands.driver.bookkeeping import Bookkeeping
from manyhands.driver.live.command_socket import CommandSocket
from manyhands.driver.live.live_requests import LiveRequests
from manyhands.driver.resolved_run import ResolvedRun
from manyhands.driver.run_file_server import FileServer
from manyhands.driver.supervise.death_causes import cause_of_loss
from manyhands.driver.supervise.decisions import BreakView, Fence, GiveUp
from manyhands.driver.supervise.membership import decide
from manyhands.driver.supervise.plausible import is_address
from manyhands.driver.supervise.worker_states import Situation
from manyhands.driver.supervisor import Supervisor
from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.launch.engines.launcher import LauncherEvent, LauncherTraits, ThisHost, WorkerPlace
from manyhands.launch.engines.work_mark import WorkMark
from manyhands.launch.wire.control_channel import SupervisorChannel
from manyhands.planning.planner import plan
from manyhands.values.bounded_types import NotUnderstood
from manyhands.values.config import RunConfig, TrainConfig
from manyhands.values.loaded_task import Loaded
from manyhands.values.machine import Machine
from manyhands.values.messages import (
    Beat,
    Begun,
    FromWorker,
    Hello,
    Leaving,
    Left,
    Notice,
    Passed,
    ReadFile,
    Ready,
    RoundPart,
    StoreFile,
    Trouble,
    Written,
    decode_from_worker,
    encode,
)
from manyhands.values.run_folder import RunDir
from manyhands.values.server_load import ServerLoad
from manyhands.values.work_in_hand import WorkInHand
from tests.support.situations import view, w
from tests.support.tasks import make

SPEAKER, STEPS = 1, 8


class Idle:
    """A launcher whose workers are not started: they are played by the test."""

    def __init__(self) -> None:
        self.traits, self.hosts, self.fds = LauncherTraits(), ThisHost(), (-1, -1)
        self.event, self.killed = os.eventfd(0), list[int]()

    def start(self, worker: int, orders: Any, log: Path) -> WorkerPlace:
        return WorkerPlace(at="", fds=self.fds)

    def poll(self) -> list[LauncherEvent]:
        return []

    def fileno(self) -> int:
        return self.event

    def kill(self, worker: int) -> None:
        self.killed.append(worker)

    def stop(self) -> None: ...
    def close(self) -> None: ...


class Playing:
    """A supervisor of three workers, as in the middle of a run."""

    def __init__(self, folder: Path) -> None:
        train = TrainConfig(batch=8, steps=STEPS)
        config = RunConfig(train=train)
        run = RunDir(folder / "run").create()
        loaded = Loaded(make("cnn"), None, None, None)
        job = ResolvedRun(run=run, loaded=loaded, config=config, workers=3, quiet=True)
        made = plan(train, Machine("here", 4, 1 << 30), workers=3, records=64)
        book = new_book(run.ledger, Opened(64, 8, train.micro_batch_size, 0), {})
        self.run, self.launcher = run, Idle()
        self.books = Bookkeeping(job, made, 0, book)
        self.channel, self.commands = SupervisorChannel(), CommandSocket(run.control)
        self.now = Situation(wanted=3, micro_batches=made.micro_batches.value, most=3)
        requests = LiveRequests(
            self.now,
            self.books.event,
            self.commands,
            objection=self.books.live.objection,
            room=None,
            want=lambda workers: None,
            withdraw=lambda name: "",
            revoke=self.channel.workers.revoke,
        )
        self.supervisor = Supervisor(
            self.launcher,
            self.channel,
            self.books,
            FileServer(run, None),
            self.now,
            requests=requests,
            start=lambda worker: WorkerPlace(at="", fds=(-1, -1)),
            records_of=lambda work: [],
        )
        self.begin("in")

    def begin(self, phase: Any) -> None:
        now = self.now
        now.workers = {n: w(phase)(n) for n in (0, 1, 2)}
        now.view, now.begun, now.running = view(0, 1, 2, hosts=[3]), True, phase == "in"
        now.troubles, now.broken, now.halted, now.audit = [], None, None, None
        now.unsteady, now.losses, now.stop, now.changes = None, 0, False, {}
        self.supervisor.actuator.views = {1: (0, 1, 2)}
        self.supervisor.rounds.clear()
        for number in now.workers:
            self.supervisor.liveness.start(number)

    def says(self, data: bytes) -> None:
        """As `Supervisor.run` hears it."""
        try:
            message = decode_from_worker(data)
        except NotUnderstood as error:
            self.supervisor._blame(SPEAKER, str(error))  # pyright: ignore[reportPrivateUsage]
            return
        if message.worker == SPEAKER:
            self.supervisor._hear(message)  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        self.channel.close()
        self.commands.close()
        self.books.close()
        os.close(self.launcher.event)


@pytest.fixture(scope="module")
def playing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playing]:
    play = Playing(tmp_path_factory.mktemp("played"))
    yield play
    play.close()


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 7, 8, 9, -1, 1 << 31, 1 << 42, 1 << 53, (1 << 64) - 1]),
    st.integers(-(1 << 63), (1 << 64) - 1),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "\0", "..", "../../x", "/etc/passwd", "\x1b[2J", "a\nb", "\u202e", "x" * 9999, ".a"]
    ),
    st.text(max_size=20),
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.floats(), TEXTS, st.binary(max_size=40), st.just([])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
OF: dict[type, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    float: st.floats(),
    str: TEXTS,
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
}
GOOD: dict[str, FromWorker] = {
    "Hello": Hello(worker=1, pid=5, host="h", built=b""),
    "Begun": Begun(worker=1, step=3, groups=[{"lr": 0.1}]),
    "Ready": Ready(worker=1, step=3, broken=False),
    "Leaving": Leaving(worker=1),
    "Beat": Beat(worker=1, step=3, samples_per_s=1.0),
    "RoundPart": RoundPart(worker=1, round="r", payload=b"x"),
    "Written": Written(worker=1, step=3, attempt=1, files=[], blocked_s=0.0),
    "StoreFile": StoreFile(
        worker=1, number=1, step=3, attempt=1, name="f", offset=0, data=b"x", last=False
    ),
    "ReadFile": ReadFile(worker=1, number=1, path="checkpoints/x", offset=0, size=10),
    "Trouble": Trouble(worker=1, step=3, kind="E", text="t", trace="", request=False),
    "Notice": Notice(worker=1, text="t"),
    "Passed": Passed(worker=1, step=3, why="w"),
    "Left": Left(worker=1, step=3, because="done", peak_memory_bytes=1, loss=0.1),
}


def beat(work: WorkInHand) -> Beat:
    return Beat(worker=SPEAKER, step=3, samples_per_s=1.0, work=work, generation=1)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """One of every kind: right in most fields, and anything in the others."""
    kind = draw(st.sampled_from(get_args(FromWorker)))
    fields: dict[str, Any] = {"type": kind.__name__, "worker": SPEAKER, "generation": 1}
    good = GOOD.get(kind.__name__)
    for field in msgspec.structs.fields(kind):
        if good is not None:
            fields[field.name] = getattr(good, field.name)
        elif field.required and field.name != "worker":
            fields[field.name] = draw(ANYTHING)
    fields["generation"] = draw(st.sampled_from([0, 1, 1, 1, 2, 1 << 60]))
    hints: dict[str, Any] = {f.name: f.type for f in msgspec.structs.fields(kind)}
    for name in draw(st.lists(st.sampled_from(sorted(hints)), max_size=3)):
        base = next((t for t in OF if t in (hints[name], *get_args(hints[name]))), None)
        plain = OF.get(base) if base is not None else None
        fields[name] = draw(st.one_of(plain, ANYTHING) if plain is not None else ANYTHING)
    return msgspec.msgpack.encode(fields)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["in", "ready", "waiting", "starting"]), st.lists(messages(), max_size=4))
def test_whatever_one_worker_says_others_are_not_touched_nor_blamed(
    playing: Playing, phase: Any, said: list[bytes]
) -> None:
    playing.begin(phase)
    now, before = playing.now, copy.deepcopy(playing.now.workers)
    for data in said:
        playing.says(data)
    assert {n: s for n, s in now.workers.items() if n != SPEAKER} == {
        n: s for n, s in before.items() if n != SPEAKER
    }
    assert now.view is not None and [m.worker for m in now.view.members] == [0, 1, 2]
    assert 0 <= now.step <= STEPS
    decision = decide(now)
    if isinstance(decision, Fence):
        assert decision.worker == SPEAKER
    if isinstance(decision, GiveUp | BreakView) and decision.cause is not None:
        assert decision.cause.worker == SPEAKER


@given(st.binary(max_size=200))
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
def test_bytes_without_sense_cost_who_sent_them_its_place(playing: Playing, data: bytes) -> None:
    playing.begin("in")
    playing.says(data)
    assert decide(playing.now) == Fence(SPEAKER, playing.now.workers[SPEAKER].wrong or "")


def test_deep_nesting_and_endless_lists_are_nonsense_too(playing: Playing) -> None:
    begun = {"type": "Begun", "worker": 1, "step": 1, "schedule": []}
    start = msgspec.msgpack.encode(begun)[1:]
    for groups in (b"\x91" * 100_000 + b"\x01", b"\xdd\xff\xff\xff\xff\x01"):
        playing.begin("in")
        playing.says(b"\x85" + start + b"\xa6groups\x91\x81\xa1a" + groups)
        assert playing.now.workers[SPEAKER].wrong is not None


@pytest.mark.parametrize(
    "message",
    [
        Hello(worker=1, pid=1, host="x", built=b"junk"),
        Hello(worker=1, pid=1, host="x", built=b"", peer_address="nowhere:99999999999"),
    ],
)
def test_a_hello_with_junk_is_blamed_on_who_sent_it(playing: Playing, message: Hello) -> None:
    """Others would fail over it in the next view, and be blamed."""
    playing.begin("in")
    playing.now.workers[1] = w("starting")(1)
    playing.says(encode(message))
    decision = decide(playing.now)
    assert isinstance(decision, Fence) and decision.worker == 1
    assert "no worker says" in decision.because


def test_what_workers_write_cannot_command_a_terminal(
    playing: Playing, capsys: pytest.CaptureFixture[str]
) -> None:
    playing.begin("in")
    text = "\x1b[2J\x1b]0;x\x07all is well\r\nmanyhands: error\n\u202eevil\x9b31m"
    playing.says(encode(Notice(worker=1, text=text)))
    trouble = Trouble(worker=1, step=1, kind="E", text=text, trace=text, request=False)
    playing.says(encode(trouble))
    shown = capsys.readouterr().err
    for told in (shown, playing.now.troubles[0].text, playing.now.troubles[0].trace):
        assert "all is well" in told and "\\x1b[2J" in told
        assert not {"\x1b", "\x07", "\r", "\u202e", "\x9b"} & set(told)
        assert not any(line.startswith("manyhands: error") for line in told.splitlines())


@pytest.mark.parametrize(
    ("message", "because"),
    [
        (Passed(worker=1, step=3, why="w", generation=1), "the leader of its view, and is not"),
        (Passed(worker=1, step=9, why="w", generation=1), "step 9 of 8"),
        (beat(WorkInHand("compute", 3, 1 << 40)), "micro-batch 1099511627776 of"),
        (beat(WorkInHand("compute", 3, -1)), "micro-batch -1 of"),
        (beat(WorkInHand("evaluate", 9, 0)), "step 9 of 8"),
        (
            msgspec.structs.replace(beat(WorkInHand()), load=ServerLoad(applied=3)),
            "as a server, and this run has none",
        ),
    ],
)
def test_work_that_there_is_not(playing: Playing, message: FromWorker, because: str) -> None:
    playing.begin("in")
    playing.says(encode(message))
    decision = decide(playing.now)
    assert isinstance(decision, Fence) and decision.worker == SPEAKER
    assert because in decision.because


def test_held_out_batches_are_not_counted_as_micro_batches(playing: Playing) -> None:
    playing.begin("in")
    playing.says(encode(beat(WorkInHand("evaluate", 8, 900))))
    trouble = Trouble(worker=1, step=3, kind="E", text="t", trace="", request=False)
    trouble = msgspec.structs.replace(trouble, micro_batch=900, held_out=True)
    playing.says(encode(trouble))
    assert playing.now.workers[1].wrong is None and playing.now.troubles == [trouble]


def test_who_wrote_over_what_it_was_at_is_judged_by_its_last_beat(playing: Playing) -> None:
    playing.begin("in")
    said = WorkInHand("compute", 3, 0)
    playing.says(encode(beat(said)))
    torn = WorkerExit(1, 101, -11, work=WorkInHand("compute", 1 << 50, 0))
    playing.supervisor._see(torn)  # pyright: ignore[reportPrivateUsage]
    assert playing.now.workers[1].exit is torn and playing.now.workers[1].work == said


def test_a_mark_that_was_written_over_is_none() -> None:
    mark = WorkMark()
    mark.note("compute", 3, 1)
    assert mark.read() == WorkInHand("compute", 3, 1)
    for kind, step, index in ((99, 3, 1), (-1, 3, 1), (2, -3, 1), (2, 3, -7), (2, 1 << 60, 1)):
        struct.pack_into("<qqq", mark._memory, 0, kind, step, index)  # pyright: ignore[reportPrivateUsage]
        assert mark.read() is None
    mark.close()


def test_where_a_worker_says_that_it_is_cannot_command_a_terminal(playing: Playing) -> None:
    playing.begin("in")
    where = "  task.py:3 in loss\n\x1b[2JThe run is done\r"
    playing.says(encode(msgspec.structs.replace(beat(WorkInHand("update", 3)), where=where)))
    told = "  task.py:3 in loss\n  \\x1b[2JThe run is done\\r"
    assert playing.now.workers[1].where == told


def test_files_of_a_step_have_no_holes_and_no_odd_names(playing: Playing) -> None:
    server, folder = FileServer(playing.run, None), playing.run.checkpoints
    good: dict[str, Any] = {"worker": 1, "number": 1, "step": 3, "attempt": 1, "last": False}

    def store(**facts: Any) -> str:
        named: dict[str, Any] = {**good, "name": "f", "data": b"1234", **facts}
        return server.serve(StoreFile(**named)).error

    assert store(offset=0) == "" and store(offset=4) == ""
    assert "none follow" in store(offset=1 << 42)
    assert "no name" in store(offset=0, name="../x") and store(offset=0, name="a\0") != ""
    assert max(p.stat().st_size for p in folder.rglob("*") if p.is_file()) == 8
    for path, offset in (("\0", 0), ("checkpoints/x", 0), ("../..", 0), ("config.toml", 1 << 63)):
        answer = server.serve(ReadFile(worker=1, number=1, path=path, offset=offset, size=9))
        assert answer.error and not answer.data


def test_addresses() -> None:
    assert all(map(is_address, ("", "10.0.0.1:7077", "[::1]:1", "[fe80::1%eth0]:80")))
    assert not any(map(is_address, ("x", "a:1", "10.0.0.1:0", "10.0.0.1:70777", "1.1.1.1:-1")))


def test_a_signal_that_there_is_not(playing: Playing) -> None:
    playing.begin("in")
    playing.now.workers[1] = w("gone", exit=WorkerExit(1, 1, -250), ended_s=9.0)(1)
    assert cause_of_loss(playing.now, playing.now.workers[1]).what.endswith("signal 250")
