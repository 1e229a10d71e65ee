# SPDX-License-Identifier: Apache-2.0
"""The application: all commands, in the order in which --help lists them.

Heavy modules are imported inside of commands: `--help` and `status` answer at once.
"""

from typing import Annotated

import typer

from manyhands.cli import (
    data_commands,
    host_commands,
    kept_runs,
    live_commands,
    predict_command,
    run_commands,
    train_commands,
)
from manyhands.values.version import VERSION

app = typer.Typer(
    name="manyhands",
    help="Many hands, one result: distributed training whose weights do not depend on who did it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"manyhands {VERSION}")
        raise typer.Exit


for name, command in (
    ("prepare", data_commands.prepare),
    ("data", data_commands.data),
    ("token", host_commands.token),
    ("worker", host_commands.worker),
    ("hosts", host_commands.hosts),
    ("doctor", host_commands.doctor),
    ("scale", live_commands.scale),
    ("set", live_commands.change),
    ("pause", live_commands.pause),
    ("continue", live_commands.go_on),
    ("stop", live_commands.stop),
    ("ledger", run_commands.ledger),
    ("replay", run_commands.replay),
    ("audit", live_commands.audit),
    ("train", train_commands.train),
    ("resume", train_commands.resume),
    ("demo", train_commands.demo),
    ("evaluate", run_commands.evaluate),
    ("predict", predict_command.predict),
    ("fingerprint", run_commands.fingerprint),
    ("status", run_commands.status),
    ("runs", kept_runs.runs),
    ("rm", kept_runs.rm),
):
    app.command(name)(command)
