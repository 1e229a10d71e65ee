# SPDX-License-Identifier: Apache-2.0
"""Values that hold secrets do not show them: not in logs, not in tracebacks, not in debuggers."""

import dataclasses
import re
from typing import Any

import msgspec

SECRET = re.compile(r"(^|_)(secret|password)$|^orders$")
"""How fields are called that hold one. Orders of a worker have its keys in them."""


def discreet(self: Any) -> str:
    """For `__repr__`: everything but secrets."""
    names = (
        self.__struct_fields__
        if isinstance(self, msgspec.Struct)
        else [field.name for field in dataclasses.fields(self)]
    )
    shown = [
        f"{name}={'…' if SECRET.search(name) else repr(getattr(self, name))}" for name in names
    ]
    return f"{type(self).__name__}({', '.join(shown)})"
