# SPDX-License-Identifier: Apache-2.0
"""Commands for runs on several hosts."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from manyhands.cli.options_from_requests import options_of
from manyhands.cli.printing import to_json
from manyhands.cli.shared_arguments import JsonFlag, RunFolder, WaitOption
from manyhands.values.errors import RequestError
from manyhands.values.run_options import DoctorRequest


def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    name: Annotated[
        str | None,
        typer.Option("--for", metavar="NAME", help="For this host alone, in FILE.NAME."),
    ] = None,
) -> None:
    """Make a token by which hosts can join runs that are started with --token-file FILE.

    FILE is for hosts; FILE.key, the driver's key, stays where runs are started.
    """
    from manyhands.values.join_token import make_token

    print(make_token(file, name))


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
    from manyhands.stories.join import join as join_run

    code = join_run(
        join,
        token_file,
        slots=slots,
        name=name,
        address=address,
        patience_s=patience,
        tied=tied,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    raise typer.Exit(code)


def hosts(
    folder: RunFolder,
    drop: Annotated[
        str | None, typer.Option(metavar="NAME", help="Drop this host now, and for good.")
    ] = None,
    wait: WaitOption = 60.0,
    json: JsonFlag = False,
) -> None:
    """List the hosts of RUN; or drop one, which then cannot come back."""
    if drop is not None:
        from manyhands.stories.live import drop_host

        print(drop_host(folder, drop, wait))
        return
    from manyhands.stories.status import hosts as hosts_of

    found = hosts_of(folder)
    if json:
        print(to_json(found))
        return
    if not found:
        print(f"no host works for {folder} now")
        return
    columns = ("host", "address", "slots", "ranks", "since", "token", "state")
    table = Table(*columns, box=None, pad_edge=False)
    for host in found:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(host["since"]))
        ranks = ", ".join(map(str, host["ranks"]))
        parts = (host["name"], host["address"], str(host["slots"]), ranks, since)
        table.add_row(*parts, host["token"], host["state"])
    Console().print(table)


@options_of(DoctorRequest)
def doctor(request: DoctorRequest, json: JsonFlag = False) -> None:
    """Check what would stop or slow a run: on this host, on others, and between them."""
    if request.listen is not None and request.hosts is None and request.token_file is None:
        raise RequestError("--listen needs --token-file, or nobody could join.")
    from manyhands.stories.doctor.examine import examine

    found = examine(
        request,
        say=lambda what: print(what, file=sys.stderr if json else sys.stdout, flush=True),
    )
    if json:
        print(to_json({"works": found.works, "checks": found.checks, "links": found.links}))
    else:
        print(found.summary())
    raise typer.Exit(0 if found.works else 1)
