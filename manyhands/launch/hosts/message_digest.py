# SPDX-License-Identifier: Apache-2.0
"""A digest of what processes of a run can say to each other.

Two checkouts of one version may have other messages; then hosts would not understand each other, or
would misunderstand. The digest is over all messages between driver, host daemons, supervisor and
workers, and whatever they are made of: names, tags, fields and types, with their bounds.
"""

import dataclasses
import functools
import hashlib
from typing import Any, cast, get_args, get_type_hints

import msgspec

from manyhands.launch.hosts.join_protocol import FromHost, ToHost
from manyhands.values.messages import Built, FromSupervisor, FromWorker
from manyhands.values.worker_orders import Orders

WIRE = (FromHost, ToHost, FromWorker, FromSupervisor, Built, Orders)


@functools.cache
def message_digest() -> str:
    text = "\n".join(sorted(described(cls) for cls in message_classes(*WIRE)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def message_classes(*roots: Any) -> set[type]:
    """All structs and dataclasses of which these types are made."""
    found: set[type] = set()
    ahead = list(roots)
    while ahead:
        here = ahead.pop()
        ahead += get_args(here)
        if isinstance(here, type) and here not in found and _has_fields(here):
            found.add(here)
            ahead += get_type_hints(here, include_extras=True).values()
    return found


def described(cls: type) -> str:
    """On one line."""
    hints = get_type_hints(cls, include_extras=True)
    fields = "; ".join(f"{name}: {hint!r}" for name, hint in hints.items())
    config = cast("msgspec.structs.StructConfig | None", getattr(cls, "__struct_config__", None))
    return f"{cls.__name__} {config and config.tag} {fields}"


def _has_fields(cls: type) -> bool:
    return issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls)
