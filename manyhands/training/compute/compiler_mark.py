# SPDX-License-Identifier: Apache-2.0
"""Which C++ compiler makes the code of `train.compile` here, and for which instructions.

What it makes rounds as the compiler sees fit, for the instructions that inductor finds (it tries
them, once on a host), with functions of the C library where vectors have a rest. All of that is
said in words, and hosts that say other words are taken for hosts that compute other bits. So is
another version that happens to give the same ones: only who compiles the whole model could tell.
"""

import hashlib
import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from manyhands.training.compute.compiled_forward import set_up_compiler
from manyhands.values.environment import environment_with, keep_compiled_code
from manyhands.values.printable_text import one_line

_LETTERS = 12
_ELSEWHERE = ("cpp.cxx",)
"""Of inductor's settings: where the compiler is, not which."""


def compiler_here() -> str:
    """In words. From now on, in this process, what it makes is kept apart from what others made:
    inductor's cache knows a compiler by its path alone, and would go on with what another version
    has left there."""
    set_up_compiler()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    isa, system = pick_vec_isa(), " ".join(platform.libc_ver())
    instructions = str(isa) if isa else "no vectors"
    found = f"{_version(get_cpp_compiler())} for {instructions}, {system}, settings {_settings()}"
    keep_compiled_code(Path(cache_dir()), f"manyhands-{digest_of(found)}")
    return found


def digest_of(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:_LETTERS]


def _version(compiler: str) -> str:
    """Its first line. GCC begins it with the name by which it was called, which says nothing."""
    said = subprocess.run(
        [compiler, "--version"],
        env=environment_with({"LC_ALL": "C"}),
        capture_output=True,
        check=True,
    )
    first, *_ = said.stdout.decode(errors="replace").strip().splitlines() or [compiler]
    return re.sub(r"^\S+ (?=\()", "GCC ", one_line(first))


def _settings() -> str:
    """Those of inductor that may change what it makes, as its own cache sees it."""
    import torch._inductor.config as inductor

    settings: dict[str, Any] = inductor.save_config_portable()
    plain = {name: value for name, value in settings.items() if name not in _ELSEWHERE}
    return digest_of(json.dumps(plain, sort_keys=True, default=_name))


def _name(value: Any) -> str:
    """Of a function or a class; an object's own words may have its address in them."""
    return getattr(value, "__qualname__", type(value).__qualname__)
