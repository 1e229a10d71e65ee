"""Text that other processes send: none of it can command a terminal, pose as ours, or be endless.

The whole class is found by walking the messages: who adds a field of text finds it here.
"""

import re
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from manyhands.launch.engines import fork_agent
from manyhands.launch.hosts import join_protocol
from manyhands.launch.hosts.message_digest import WIRE, message_classes
from manyhands.stories.doctor import questions
from manyhands.values import messages
from manyhands.values.bounded_types import PathText, ProcessOutput
from manyhands.values.printable_text import MOST_SHOWN, NOT_SHOWN

EVIL = "well\x1b[2J\r\nworker 7 is lost\t\u202egnp" + "x" * (1 << 16)
ODD = re.compile(f"[{NOT_SHOWN}\t]|\n\\S")

AS_IT_IS = {
    ("ReadFile", "path"): "looked up by the file server, which shows the path that it found",
    ("Load", "run"): "a folder of the driver's, which hosts look for",
    ("Settled", "run"): "a folder of the host's, told to its own workers and nobody else",
    ("WorkerExit", "log_tail"): "looked through by crash_words, which shows a part, made printable",
}
TRUSTED = message_classes(messages.FromSupervisor, fork_agent.ToAgent, *WIRE[-1:]) | {
    messages.Built
}
"""From the driver, which sends workers their code: to be shown is nothing that it could not do to
them anyway. (What was built, workers only compare with their own.)"""

DECODERS: dict[str, tuple[Any, Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "worker": (messages.FromWorker, messages.decode_from_worker, messages.encode),
    "host": (join_protocol.FromHost, join_protocol.decode_from_host, join_protocol.encode),
    "agent": (fork_agent.FromAgent, fork_agent.decode_from_agent, fork_agent.encode),
    "driver": (
        join_protocol.HostDropped | join_protocol.TurnedAway | join_protocol.Bye,
        join_protocol.decode_to_host,
        join_protocol.encode,
    ),
}
SPOKEN = [(who, cls) for who, (union, *_) in DECODERS.items() for cls in get_args(union)]


def sample(hint: Any) -> Any:
    """A value of that type, with the worst text that the type allows."""
    metas = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
    if metas:
        (base, *_), meta = get_args(hint), metas[0]
        if base is str:
            if meta.pattern is not None:
                return "0" * 64 if "64" in meta.pattern else "name"
            return EVIL[: meta.max_length]
        if base in (int, float):
            return base(meta.ge if meta.ge is not None else 1)
        if get_origin(base) is list:
            return [sample(get_args(base)[0])] * (meta.min_length or 1)
        return sample(base)
    if get_origin(hint) in (Union, types.UnionType):
        return sample(next(arm for arm in get_args(hint) if arm is not type(None)))
    match get_origin(hint) or hint:
        case kind if kind is list:
            return [sample(get_args(hint)[0])]
        case kind if kind is tuple:
            return tuple(sample(arm) for arm in get_args(hint))
        case kind if kind is dict:
            key, value = get_args(hint)
            return {sample(key): sample(value)}
        case kind if kind is Literal:
            return get_args(hint)[0]
        case kind if kind is str:
            return EVIL
        case kind if kind is Any:
            return {EVIL: [EVIL, 1]}
        case kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            hints = get_type_hints(kind, include_extras=True)
            return kind(**{f: sample(hints[f]) for f in kind.__struct_fields__})
        case kind:
            return {int: 1, float: 1.0, bool: True, bytes: b"x"}[kind]


def texts(value: Any, field: tuple[str, str] = ("", "")) -> Iterator[tuple[tuple[str, str], str]]:
    """All text in it, with where it was."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from texts(getattr(value, name), (type(value).__name__, name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts(key, field)
            yield from texts(inner, field)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner, field)


@pytest.mark.parametrize(("who", "cls"), SPOKEN, ids=lambda x: getattr(x, "__name__", x))
def test_what_was_decoded_can_be_shown(who: str, cls: type[msgspec.Struct]) -> None:
    _, decode, encode = DECODERS[who]
    decoded = decode(encode(sample(cls)))
    assert type(decoded) is cls
    for field, text in texts(decoded):
        if field not in AS_IT_IS:
            assert not ODD.search(text), f"{field} holds {text[:80]!r}"
            assert len(text) <= MOST_SHOWN + 5000, f"{field} is endless"


def test_the_probes_of_other_hosts_too() -> None:
    for cls in get_args(questions.ProbeFinding):
        said = questions.encode(questions.Answered(1, sample(cls)))
        for field, text in texts(questions.decode_answered(said)):
            assert not ODD.search(text), field


def test_every_text_that_is_sent_is_known_here() -> None:
    """As it is, or from the driver, or tried above: nothing is left over."""
    tried = {cls for _, cls in SPOKEN}
    for cls in message_classes(*WIRE) - TRUSTED:
        hints = get_type_hints(cls, include_extras=True)
        for field, hint in hints.items():
            if hint in (PathText, ProcessOutput):
                assert (cls.__name__, field) in AS_IT_IS, f"{cls.__name__}.{field}"
        inside = any(cls in message_classes(outer) for outer in tried)
        silent = not any(True for _ in texts(sample(cls)))
        only_names = all(not ODD.search(text) for _, text in texts(sample(cls)))
        assert inside or silent or only_names or cls is join_protocol.Load, cls


def test_what_can_be_shown_is_left_alone() -> None:
    begun = messages.Begun(worker=1, step=2, groups=[{"lr": 0.1, "betas": [0.9, 0.99]}])
    assert messages.decode_from_worker(messages.encode(begun)) == begun
    scored = messages.Scored(worker=1, step=2, round="r", scores={"accuracy": 0.5, "größe": 1.0})
    assert messages.decode_from_worker(messages.encode(scored)) == scored
