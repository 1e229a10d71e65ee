# SPDX-License-Identifier: Apache-2.0
"""Commands for runs on several hosts, and the options by which they are asked for."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from manyhands.values.errors import RequestError

Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="A,B:4,here",
        help="Train on these hosts, reached by ssh; :N workers each (else its cores).",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS[:PORT]", help="Let hosts join here with: manyhands worker --join."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="The secret by which hosts join; made if it is not there."),
]
Ssh = Annotated[
    str | None,
    typer.Option(metavar="COMMAND", help='How --hosts are reached, as in "ssh -p 2222".'),
]

Spread = Annotated[
    bool, typer.Option("--spread", help="Ray: on as many nodes as possible, not as few.")
]
WorkerResources = Annotated[
    str | None,
    typer.Option(
        metavar="CPU=1,GPU=1,memory=2GB,NAME=1",
        help="Ray: what each worker (or task) needs; else CPU=train.threads.",
    ),
]
RayTokenFile = Annotated[
    Path | None, typer.Option(help="The secret of the Ray cluster; only its owner may read it.")
]
Ship = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="A file or folder that workers on other hosts need, found there under the same "
        "relative name. Repeatable.",
    ),
]


def worker(
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the run listens.")],
    token_file: Annotated[
        Path, typer.Option(help="The run's secret: RUN/join.token. - is standard input.")
    ],
    slots: Annotated[
        int | None, typer.Option(help="How many workers this host takes; else its cores.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What this host is called.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Where other hosts reach this one; else found out.")
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds to look for a run that is not there (any more).")
    ] = 60.0,
    tied: Annotated[
        bool, typer.Option("--tied", hidden=True, help="Go when standard input ends.")
    ] = False,
) -> None:
    """Lend this host's hands to a run elsewhere, until it is over."""
    from manyhands.launch.hosts.host_daemon import Offer, serve
    from manyhands.values.credentials import parse_token, read_token
    from manyhands.values.world import machine

    host, port = _host_and_port(join)
    if str(token_file) == "-":
        secret = parse_token(sys.stdin.readline(), "standard input")
    else:
        secret = read_token(token_file)
    mine = machine()
    if slots is not None and slots < 1:
        raise RequestError(f"--slots must be at least 1, got {slots}.")
    offer = Offer(
        host=host,
        port=port,
        secret=secret,
        slots=mine.cores if slots is None else slots,
        name=name or mine.host,
        address=address or "",
        patience_s=patience,
        tied=tied,
    )
    raise typer.Exit(serve(offer, lambda text: print(text, file=sys.stderr, flush=True)))


def doctor(
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B,here", help="Look at these too, reached by ssh.")
    ] = None,
    listen: Listen = None,
    token_file: TokenFile = None,
    ssh: Ssh = None,
    folder: Annotated[
        Path, typer.Option(help="Where runs would be: do all hosts see the same?")
    ] = Path(),
    expect: Annotated[int, typer.Option(help="With --listen: how many hosts join.")] = 1,
    patience: Annotated[float, typer.Option(help="Seconds to wait for hosts to join.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Check what would stop or slow a run: on this host, on others, and between them."""
    if listen is not None and hosts is None and token_file is None:
        raise RequestError("--listen needs --token-file, or nobody could join.")
    from manyhands.launch.hosts.requested_hosts import SSH, Wish
    from manyhands.stories.doctor.examine import examine

    found = examine(
        Wish(hosts, listen, token_file, ssh or SSH),
        folder,
        expect=expect,
        patience_s=patience,
        say=lambda what: print(what, file=sys.stderr if json else sys.stdout, flush=True),
    )
    if json:
        answer = {"works": found.works, "checks": found.checks, "links": found.links}
        print(msgspec.json.encode(answer).decode())
    else:
        print(found.summary())
    raise typer.Exit(0 if found.works else 1)


def links_table(links: Sequence[Mapping[str, Any]]) -> Table:
    """The network between hosts, as they measured it."""
    table = Table("host", "host", "round trip ms", "MB/s", box=None, pad_edge=False)
    for link in links:
        numbers = f"{1e3 * link['round_trip_s']:.2f}", f"{link['bytes_per_s'] / 1e6:.1f}"
        table.add_row(link["host"], link["other"], *numbers)
    return table


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError(f"--join {text}: write it as HOST:PORT, as the run printed it.")
    return host.strip("[]"), int(port)


def register(app: typer.Typer) -> None:
    app.command()(worker)
    app.command()(doctor)
