"""Hosts over MPI, with a real mpirun: every rank is a process that it starts."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import manyhands
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.status import status
from manyhands.testing.contracts import F32, CollectiveContract
from manyhands.training.collective import mpi
from manyhands.training.collective.mpi import Mpi
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.values.errors import Broken, RequestError
from manyhands.values.run_folder import write_whole
from manyhands.values.world import World

RANKS = 3
ROOT = Path(manyhands.__file__).parent.parent
OnRanks = Callable[..., list[Any]]


def open_mpi() -> str:
    """Its version; empty if there is none."""
    if shutil.which("mpirun") is None:
        return ""
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30)
    found = re.search(r"Open MPI\) (\S+)", said.stdout)
    return found[1] if found else ""


VERSION = open_mpi()
needs_mpi = pytest.mark.skipif(
    not VERSION or importlib.util.find_spec("mpi4py") is None,
    reason="needs Open MPI's mpirun (apt install openmpi-bin) and mpi4py (pip install mpi4py)",
)
as_in_4 = pytest.mark.skipif(
    not VERSION.startswith("4."), reason="what mpirun does about a death was found out for 4.1"
)


class Job:
    """An mpirun, and what its ranks leave in a folder."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.folder, self.process, self.turn = folder, process, 0

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def tell(self, content: bytes) -> None:
        self.turn += 1
        write_whole(self.folder / f"body-{self.turn}", content, durable=False)

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 40
        while not all((self.folder / name).exists() for name in names):
            if time.monotonic() > deadline:
                self.process.terminate()  # its ranks are stuck: no use for other tests either
            assert self.process.poll() is None, self.log
            time.sleep(0.005)

    def results(self, ranks: range | list[int]) -> list[Any]:
        names = [f"result-{self.turn}-{rank}" for rank in ranks]
        self.wait_for(*names)
        found = [cloudpickle.loads((self.folder / name).read_bytes()) for name in names]
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def run(self, ranks: int, body: Callable[[int, Mpi], object]) -> list[Any]:
        assert ranks == RANKS
        self.tell(cloudpickle.dumps(body))
        return self.results(range(ranks))


@contextmanager
def mpirun(folder: Path, *options: str, verb: str = "bodies", ranks: int = RANKS) -> Generator[Job]:
    """`options` are mpirun's."""
    session = folder / "session"
    session.mkdir()
    command = ["mpirun", "--oversubscribe", *options, "-n", str(ranks)]
    command += ["--mca", "orte_tmpdir_base", str(session)]
    command += ["--mca", "btl_vader_backing_directory", str(session)]  # else /dev/shm
    command += [sys.executable, "-m", "tests.support.mpi_ranks", verb, str(folder)]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **as_root},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Job(folder, process)
    finally:
        if process.poll() is None:
            process.terminate()  # it then ends its ranks
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module", params=["tcp", "memory"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One for all tests that leave everybody alive; over each way that MPI has on one host."""
    options = ["--mca", "btl", "tcp,self"] if request.param == "tcp" else []
    with mpirun(tmp_path_factory.mktemp("mpi"), *options) as job:
        job.wait_for(*(f"ready-{rank}" for rank in range(RANKS)))
        yield job
        job.tell(b"")
        assert job.process.wait(30) == 0, job.log


Raw = dict[torch.dtype, np.ndarray[Any, np.dtype[np.uint8]]]
"""The bytes of lanes. Any bits at all: they are carried, not understood."""


class Plan:
    """What a seed decides: dtypes, sizes, stretches (some are empty) and numbers of slots."""

    dtypes = (F32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        chosen = random.permutation(len(self.dtypes))[: random.integers(1, 5)]
        self.seed = seed
        self.sizes = {self.dtypes[i]: int(10 ** random.uniform(0, 6)) for i in sorted(chosen)}
        self.counts = [int(n) for n in random.integers(0, 4, RANKS)]
        self.piece_bytes = int(random.choice([1 << 30, 100_001]))
        self.owned: list[Bounds] = [{} for _ in range(RANKS)]
        for dtype, size in self.sizes.items():
            inner = sorted(random.choice([0, size, int(random.integers(size + 1))], RANKS - 1))
            edges = [0, *(int(edge) for edge in inner), size]
            for rank in range(RANKS):
                self.owned[rank][dtype] = edges[rank], edges[rank + 1]

    def slot(self, rank: int, k: int) -> Raw:
        random = np.random.default_rng([self.seed, rank, k])
        return {
            dtype: random.integers(256, size=size * dtype.itemsize, dtype=np.uint8)
            for dtype, size in self.sizes.items()
        }

    def cut(self, slot: Raw, rank: int) -> Raw:
        """The stretch that `rank` owns."""
        bounds = self.owned[rank].items()
        return {d: slot[d][start * d.itemsize : stop * d.itemsize] for d, (start, stop) in bounds}


def as_lanes(raw: Raw) -> Lanes:
    return {dtype: torch.from_numpy(content).view(dtype) for dtype, content in raw.items()}


def as_raw(lanes: Lanes) -> Raw:
    return {dtype: lane.view(torch.uint8).numpy() for dtype, lane in lanes.items()}


def assert_same(ours: Raw, theirs: Raw) -> None:
    assert ours.keys() == theirs.keys()
    for dtype, content in ours.items():
        assert np.array_equal(content, theirs[dtype]), dtype


@needs_mpi
class TestMpi(CollectiveContract):
    @pytest.fixture
    def on_ranks(self, job: Job) -> OnRanks:
        return job.run

    def test_everyone_gets_what_each_owner_shares(self, on_ranks: OnRanks) -> None:
        def body(rank: int, hosts: Mpi) -> list[float]:
            lane = torch.full((8,), float(rank), requires_grad=True)
            hosts.share({F32: lane}, [{F32: (0, 3)}, {F32: (3, 3)}, {F32: (3, 8)}])
            return lane.tolist()

        assert on_ranks(RANKS, body) == [[0.0] * 3 + [2.0] * 5] * RANKS

    @pytest.mark.parametrize("seed", range(8))
    def test_any_stretches_of_any_dtypes_arrive_bit_for_bit(
        self, on_ranks: OnRanks, seed: int
    ) -> None:
        plan = Plan(seed)

        def body(rank: int, hosts: Mpi) -> tuple[list[list[Raw]], Raw]:
            mpi.PIECE_BYTES = plan.piece_bytes
            hosts.slots = [as_lanes(plan.slot(rank, k)) for k in range(plan.counts[rank])]
            hosts.exchange(plan.counts, plan.owned)  # and again, into the same memory
            parts = hosts.exchange(plan.counts, plan.owned)
            lanes = as_lanes(plan.slot(rank, 9))
            hosts.share(lanes, plan.owned)
            return [[as_raw(lanes) for lanes in slots] for slots in parts], as_raw(lanes)

        shared = plan.slot(0, 9)
        for rank in range(1, RANKS):
            for dtype, stretch in plan.cut(plan.slot(rank, 9), rank).items():
                start = plan.owned[rank][dtype][0] * dtype.itemsize
                shared[dtype][start : start + len(stretch)] = stretch
        for rank, (parts, lanes) in enumerate(on_ranks(RANKS, body)):
            for other, slots in enumerate(parts):
                assert len(slots) == plan.counts[other]
                for k, slot in enumerate(slots):
                    assert_same(slot, plan.cut(plan.slot(other, k), rank))
            assert_same(lanes, shared)

    def test_something_can_be_done_while_others_are_waited_for(self, on_ranks: OnRanks) -> None:
        def body(rank: int, hosts: Mpi) -> list[object]:
            done: list[object] = []

            def fail() -> None:
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                hosts.gather(np.zeros(4, dtype=np.uint8), meanwhile=fail)
            again = Mpi(hosts.world, [], patience=hosts.patience, generation=hosts.tag + 1)
            everyone = again.gather(np.full(2, rank, np.uint8), meanwhile=lambda: done.append(1))
            return [*done, *(m.tolist() for m in everyone)]

        assert on_ranks(RANKS, body) == [[1, [0, 0], [1, 1], [2, 2]]] * RANKS

    def test_whoever_is_missing_is_named(self, on_ranks: OnRanks) -> None:
        def body(rank: int, hosts: Mpi) -> list[str]:
            said: list[str] = []
            for world in (World(rank % 2, 2), World(rank % 2, 3)):
                with pytest.raises(Broken) as caught:
                    Mpi(world, [], patience=hosts.patience, generation=hosts.tag + 1)
                said.append(str(caught.value))
            return said

        for few, twice in on_ranks(RANKS, body):
            assert few.startswith("this view has 2 hosts and MPI has 3")
            assert twice.startswith("host 2 of this view is missing")

    def test_whoever_waits_for_one_that_is_stopped_can_give_up(self, on_ranks: OnRanks) -> None:
        """And when it is continued, a new view takes nothing of the old one's for its own."""

        def body(rank: int, hosts: Mpi) -> list[object]:
            mine = np.array([os.getpid()], dtype=np.int64).view(np.uint8)
            pids = [int(m.view(np.int64)[0]) for m in hosts.gather(mine)]
            patience: Any = hosts.patience
            everything = {F32: (0, 1_000_000)}
            owned = [{F32: (0, 0)}, everything, {F32: (0, 0)}]
            lane, said = torch.full((1_000_000,), -1.0), ""
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                patience.asked, patience.until = 0, time.monotonic() + 0.5
                with pytest.raises(Broken) as caught:
                    hosts.share({F32: lane}, owned)
                said = str(caught.value)
                assert patience.entered and patience.asked > 0.5 / 0.02
                patience.until = float("inf")
            if rank == 0:
                os.kill(pids[1], signal.SIGCONT)
            again = Mpi(hosts.world, [], patience=patience, generation=hosts.tag + 1)
            found = [int(m[0]) for m in again.gather(np.full(5, 50 + rank, dtype=np.uint8))]
            assert rank == 1 or bool((lane == -1).all()), "nothing was written into it"
            again.share({F32: lane.fill_(rank)}, owned)
            return [said, found, lane.unique().tolist()]

        stopped = "waiting for host 1 was broken off"
        after = [[50, 51, 52], [1.0]]
        assert on_ranks(RANKS, body) == [[stopped, *after], ["", *after], [stopped, *after]]

    def test_what_arrives_too_late_is_not_written_into_the_callers_memory(
        self, on_ranks: OnRanks
    ) -> None:
        """Rank 1 sends, and is looking elsewhere when it should send on; then it goes on."""

        def body(rank: int, hosts: Mpi) -> bool:
            size = 4_000_000
            owned = [{F32: (0, 0)}, {F32: (0, size)}, {F32: (0, 0)}]
            patience: Any = hosts.patience
            hosts.gather(np.zeros(1, dtype=np.uint8))
            lane, comm = torch.full((size,), float(rank)), hosts.comm
            if rank == 1:
                array = lane.view(torch.uint8).numpy()
                sent = [comm.Isend(array, dest, hosts.tag) for dest in range(3) if dest != 1]
                time.sleep(1)
                deadline = time.monotonic() + 1
                while time.monotonic() < deadline:
                    all(request.Test() for request in sent)
            else:
                patience.until = time.monotonic() + 0.5
                try:
                    hosts.share({F32: lane}, owned)
                    lane.fill_(rank)  # this way was quick enough to get everything at once
                except Broken:
                    pass
                patience.until = float("inf")
            again = Mpi(hosts.world, [], patience=patience, generation=hosts.tag + 1)
            for _ in range(3):
                again.gather(np.zeros(1, dtype=np.uint8))
            return bool((lane == rank).all())

        assert on_ranks(RANKS, body) == [True] * RANKS

    def test_it_remembers_nothing(self, on_ranks: OnRanks) -> None:
        def body(rank: int, hosts: Mpi) -> bool:
            with pytest.raises(NotImplementedError):
                hosts.left_by(0)
            return True

        assert all(on_ranks(RANKS, body))


def go_on_without_rank_1(rank: int, hosts: Mpi) -> list[object]:
    """Rank 1 kills itself; the others notice, and form a group of two."""
    hosts.gather(np.zeros(1, dtype=np.uint8))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    patience: Any = hosts.patience
    patience.until = time.monotonic() + 2
    said: list[object] = []
    owned = [{F32: (k * 1_000_000, (k + 1) * 1_000_000)} for k in range(RANKS)]
    for call in (
        lambda: hosts.share({F32: torch.zeros(3_000_000)}, owned),
        lambda: Mpi(World(rank // 2, 2), [], patience=patience, generation=hosts.tag + 1),
    ):
        with pytest.raises(Broken) as caught:
            call()
        said.append(str(caught.value))
    patience.until = time.monotonic() + 20
    everyone: Any = hosts.comm
    living = everyone.Create_group(everyone.group.Excl([1]))
    two = Mpi(World(rank // 2, 2), [], patience=patience, comm=living, generation=hosts.tag + 2)
    return [*said, [int(m[0]) for m in two.gather(np.full(1, 60 + rank, dtype=np.uint8))]]


WITHOUT_RANK_1 = [
    "waiting for host 1 was broken off",
    "this view has 2 hosts and MPI has 3: somebody is missing, or is not meant",
    [60, 62],
]


@needs_mpi
@as_in_4
@pytest.mark.slow
class TestDeath:
    def test_mpirun_ends_the_job_when_one_of_its_processes_is_killed(self, tmp_path: Path) -> None:
        with mpirun(tmp_path) as job:
            job.tell(cloudpickle.dumps(go_on_without_rank_1))
            assert job.process.wait(40) == 128 + signal.SIGKILL
            assert not list(tmp_path.glob("result-*")), "the others did not get to say anything"
            assert "exited on signal 9" in job.log

    def test_with_recovery_the_others_go_on(self, tmp_path: Path) -> None:
        with mpirun(tmp_path, "--enable-recovery") as job:
            job.tell(cloudpickle.dumps(go_on_without_rank_1))
            assert job.results([0, 2]) == [WITHOUT_RANK_1] * 2
            job.tell(b"")
            assert job.process.wait(30) == 0, "who was killed does not count"

    def test_a_worker_that_an_agent_has_forked_can_die_without_mpirun_noticing(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "body-1").write_bytes(cloudpickle.dumps(go_on_without_rank_1))
        with mpirun(tmp_path, verb="forked") as job:
            job.turn = 1
            assert job.results([0, 2]) == [WITHOUT_RANK_1] * 2
            while "ended with -9" not in job.log:
                assert job.process.poll() is None
                time.sleep(0.005)
            (tmp_path / "enough").touch()
            assert job.process.wait(30) == 1
            assert "exiting improperly" in job.log


def test_without_mpi4py_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RequestError, match=r"pip install 'manyhands\[mpi\]'.*openmpi-bin"):
        mpi.load_mpi()


@needs_mpi
@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("import mpi4py; mpi4py.rc.thread_level = 'single'; import mpi4py.MPI", "one thread only"),
        ("import os; os.environ['MPI4PY_LIBMPI'] = 'none.so'", "cannot load MPI library. It needs"),
    ],
)
def test_an_mpi_that_cannot_be_used_is_refused(before: str, says: str) -> None:
    code = f"{before}; from manyhands.training.collective.mpi import load_mpi; load_mpi()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "RequestError" in done.stderr and says in done.stderr


def test_importing_it_does_not_initialise_mpi() -> None:
    code = "import sys, manyhands.training.collective.mpi; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- as the docs say

TASK = """
import torch
from torch import nn

import manyhands as mh

task = mh.Task(
    model=lambda: nn.Linear(2, 1),
    loss=lambda m, b: m(b["x"]).square().mean(),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    data={"x": torch.linspace(0, 1, 128).view(64, 2)},
)
config = mh.RunConfig(train=mh.TrainConfig(batch=8, micro_batch=2, steps=4))
"""


def can_listen(port: int) -> bool:
    try:
        with socket.create_server((socket.gethostname(), port)):
            return True
    except OSError:
        return False


@needs_mpi
def test_the_command_of_the_docs_trains_over_mpi(launcher: Launcher, tmp_path: Path) -> None:
    """docs/mpi.md, word for word. What is different here is in the environment."""
    if not can_listen(7077):
        pytest.skip("this host's own name has no address, or port 7077 is in use")
    page = (ROOT / "docs" / "mpi.md").read_text()
    (command,) = re.findall(r"```\n(manyhands token .*?)```", page, re.DOTALL)
    (tmp_path / "task.py").write_text(TASK)
    tools, session = tmp_path / "bin", tmp_path / "session"
    tools.mkdir(), session.mkdir()
    (tools / "manyhands").write_text(f'#!/bin/sh\nexec {sys.executable} -m manyhands "$@"\n')
    (tools / "manyhands").chmod(0o755)
    settings = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_orte_tmpdir_base": str(session),
        "OMPI_MCA_btl_vader_backing_directory": str(session),
    }
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            ["sh", "-e", "-c", command],
            cwd=tmp_path,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        assert process.wait(100) == 0, (tmp_path / "log").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # mpirun then ends its ranks
            process.wait(20)
    now = status(tmp_path / "runs" / "mpi")
    assert now["state"] == "finished"
    assert [host["ranks"] for host in now["hosts"]] == [[0], [1]], "one of them did it all"
    assert "collective: mpi" in (tmp_path / "log").read_text()
    here = manyhands.train(
        tmp_path / "task.py", to=tmp_path / "here", workers=1, quiet=True, launcher=launcher
    )
    assert now["fingerprint"] == here.fingerprint
