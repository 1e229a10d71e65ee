# SPDX-License-Identifier: Apache-2.0
"""`manyhands worker`: lending this host to a run elsewhere, until it is over."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

from manyhands.launch.hosts.host_daemon import Offer, serve
from manyhands.values.errors import RequestError
from manyhands.values.join_token import parse_token, read_token
from manyhands.values.machine import machine


def join(
    where: str,
    token_file: Path,
    *,
    slots: int | None,
    name: str | None,
    address: str | None,
    patience_s: float,
    tied: bool,
    say: Callable[[str], None],
) -> int:
    """Join the run that listens at HOST:PORT. The token comes from its file, or with "-" from
    standard input; `tied`: go when that ends. Returns the exit code."""
    host, port = _host_and_port(where)
    if str(token_file) == "-":
        token = parse_token(sys.stdin.readline(), "standard input")
    else:
        token = read_token(token_file)
    if name and token.name and name != token.name:
        raise RequestError(f"this token was made for host {token.name}, not for --name {name}.")
    if slots is not None and slots < 1:
        raise RequestError(f"--slots must be at least 1, got {slots}.")
    if address:
        _refuse_foreign(address)
    mine = machine()
    offer = Offer(
        host=host,
        port=port,
        token=token,
        slots=mine.cores if slots is None else slots,
        name=name or token.name or mine.host,
        address=address or "",
        patience_s=patience_s,
        tied=tied,
    )
    return serve(offer, say)


def _refuse_foreign(address: str) -> None:
    """Workers here are going to listen there."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        socket.create_server(place, family=family).close()
    except OSError as error:
        raise RequestError(
            f"--address {address} is none of this host's: {error}. Name one by which others reach "
            "it, or leave it out."
        ) from error


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError(f"--join {text}: write it as HOST:PORT, as the run printed it.")
    return host.strip("[]"), int(port)
