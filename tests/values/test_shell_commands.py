"""What people are told to type is quoted for a shell."""

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.values.errors import Interrupted, RunDirError
from manyhands.values.run_folder import RunDir
from manyhands.values.shell_commands import command_line
from manyhands.values.verdict import Cause, Verdict

ODD = 'a run\'s "folder" $HOME; echo `no` &'


@given(st.lists(st.text(min_size=1).filter(lambda t: "\0" not in t), max_size=4))
def test_a_shell_reads_what_was_meant(words: list[str]) -> None:
    assert shlex.split(command_line(*words)) == ["manyhands", *words]


def test_a_path_that_looks_like_an_option_stays_a_path() -> None:
    assert command_line("resume", Path("-x y"), "--quiet") == "manyhands resume './-x y' --quiet"


def test_what_is_printed_is_quoted(tmp_path: Path) -> None:
    run = str(tmp_path / ODD)
    cause = Cause(rank=0, pid=1, host="here", step=1, what="it died", worker=0)
    page = Verdict.of(cause, run=run, log="x", saved=3).page()
    told = [page]
    folder = RunDir(Path(run)).create()
    told.append(str(Interrupted(run, 3, folder.how_to_resume())))
    folder.config.touch()
    with pytest.raises(RunDirError) as refused:
        folder.create()
    told.append(str(refused.value).partition(" - or")[0])
    for text in told:
        command = re.search(r"manyhands resume .*", text)
        assert command and shlex.split(command[0]) == ["manyhands", "resume", run], text
