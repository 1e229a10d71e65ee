"""Requests: options once, with their help, for the command line and for Python."""

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

import manyhands as mh
from manyhands.values.option_fields import command_option, help_texts
from manyhands.values.prepare_options import PrepareRequest
from manyhands.values.run_options import (
    DoctorRequest,
    EvaluateRequest,
    ResumeRequest,
    RunRequest,
)

REQUESTS = [RunRequest, ResumeRequest, EvaluateRequest, PrepareRequest, DoctorRequest]


@pytest.mark.parametrize("request_type", REQUESTS)
def test_every_option_says_what_it_is_for(request_type: type) -> None:
    texts = help_texts(request_type)
    silent = [f.name for f in fields(request_type) if command_option(f) and not texts[f.name]]  # type: ignore[arg-type]
    assert not silent


def test_a_changed_request_was_asked_for_when_the_first_one_was() -> None:
    request = RunRequest("task.py", workers="2:8")
    again = request.but(quiet=True)
    assert (again.asked, again.workers, again.quiet) == (request.asked, "2:8", True)


def test_python_takes_what_the_request_has() -> None:
    taken = inspect.signature(mh.train).parameters
    assert all(f.name in taken for f in fields(RunRequest) if f.init)
    assert next(iter(taken)) == "task" and taken["workers"].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError, match=r"train\(\): got an unexpected keyword argument 'worker'"):
        mh.train("task.py", worker=2)  # type: ignore[call-arg]


def test_a_command_imports_the_driver_while_the_agent_imports_torch() -> None:
    code = (
        "import sys; from manyhands.stories import early_start\n"
        "assert 'torch' not in sys.modules, 'before the agent is started'\n"
        "early_start._import_driver()\n"
        "assert 'manyhands.driver.drive' in sys.modules and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
