"""A child of ours, one machine instruction after the other."""

import ctypes
import os
import signal
from collections.abc import Callable, Generator

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_TRACE_ME, _CONTINUE, _SINGLE_STEP = 0, 7, 9


def single_steps(act: Callable[[], object]) -> Generator[None]:
    """Does `act` in a child that is stopped whenever this yields: after each of its instructions,
    from the first time that it raises SIGSTOP until it ends."""
    if (child := os.fork()) == 0:
        _LIBC.ptrace(_TRACE_ME, 0, None, None)
        act()
        os._exit(0)
    try:
        while True:
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                assert status == 0, f"the child ended with {status}"
                return
            assert os.WSTOPSIG(status) in (signal.SIGSTOP, signal.SIGTRAP), os.WSTOPSIG(status)
            yield
            if _LIBC.ptrace(_SINGLE_STEP, child, None, None) != 0:
                raise OSError(ctypes.get_errno(), "ptrace")
    except GeneratorExit:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
