"""What a process said last is understood, whatever Python wrote it."""

import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.driver.supervise.crash_words import explain_crash

OLD = """step 3
Fatal Python error: Segmentation fault

Thread 0x00007f1d (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f1e (most recent call first):
  File "/opt/lib/site-packages/torch/nn/functional.py", line 2500 in linear
  File "/home/me/model.py", line 12 in forward
  File "/home/me/task.py", line 5 in loss
  File "/there/manyhands/training/loop.py", line 41 in train

Extension modules: numpy.core (total: 1)
"""
NEW = """Fatal Python error: Bus error

Current thread 0x00007f1e [worker] (most recent call first):
  File "/home/me/task.py", line 5 in loss

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3", at _Py_DumpStack+0x48 [0x5f]
"""
THROWN = """terminate called after throwing an instance of 'std::runtime_error'
  what():  the tokenizer has no vocabulary
Fatal Python error: Aborted

Current thread 0x00007f1e (most recent call first):
  <no Python frame>
"""


@pytest.mark.parametrize(
    ("tail", "what", "where"),
    [
        ("", "", ""),
        ("nothing of the kind\nFile in use", "", ""),
        (
            OLD,
            "Segmentation fault",
            "  /home/me/model.py:12 in forward\n  /home/me/task.py:5 in loss",
        ),
        ("Fatal Python error: Aborted\n" + OLD, "Segmentation fault", "  /home/me/model.py:12 in"),
        (NEW, "Bus error", "  /home/me/task.py:5 in loss"),
        (THROWN, "the tokenizer has no vocabulary", ""),
        (OLD[OLD.index("Current") :], "", ""),
        (OLD[: OLD.index("  File")], "Segmentation fault", ""),
    ],
)
def test_a_tail_of_a_log(tail: str, what: str, where: str) -> None:
    found = explain_crash(tail)
    assert found[0] == what
    assert found[1].startswith(where) and bool(found[1]) == bool(where)


def test_what_this_python_writes(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(
        "import ctypes, faulthandler\n"
        "faulthandler.enable(file=2)\n"
        "def loss():\n"
        "    ctypes.string_at(0)\n"
        "loss()\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    what, where = explain_crash(ran.stderr)
    assert (what, where.partition("\n")[0]) == ("Segmentation fault", f"  {script}:4 in loss")


def test_what_a_process_wrote_cannot_command_a_terminal() -> None:
    said = THROWN.replace("the tokenizer", "\x1b[2Jthe \u202etokenizer")
    assert explain_crash(said)[0] == r"\x1b[2Jthe \u202etokenizer has no vocabulary"
    assert explain_crash(OLD.replace("model.py", "\x1b[2J.py"))[1].startswith(
        r"  /home/me/\x1b[2J.py:12"
    )
    assert len(explain_crash(THROWN.replace("the tokenizer", "x" * 9999))[0]) < 2100
