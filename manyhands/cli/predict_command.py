# SPDX-License-Identifier: Apache-2.0
"""The command that says what a trained model makes of records."""

import sys
from pathlib import Path

import typer

from manyhands.cli.options_from_requests import options_of
from manyhands.cli.printing import show_pairs, to_json, warnings_shown
from manyhands.cli.shared_arguments import JsonFlag
from manyhands.values.errors import DataTaskFailed, ManyhandsError, RequestError, RunFailed
from manyhands.values.predict_options import PredictRequest
from manyhands.values.printable_text import escaped
from manyhands.values.run_folder import open_run
from manyhands.values.user_frames import user_traceback


@options_of(PredictRequest)
def predict(request: PredictRequest, json: JsonFlag = False) -> None:
    """Write down what the model of RUN says of records: raw files in, predictions by name out."""
    open_run(Path(request.run))
    if request.to is None:
        raise RequestError("say where predictions go: --to out.parquet (or .csv, .jsonl, .arrow).")
    from manyhands.stories.predict import predict_request

    with warnings_shown():
        try:
            found = predict_request(request)
        except DataTaskFailed as error:
            raise RunFailed(f"manyhands: {error}") from error
        except (ManyhandsError, OSError):
            raise
        except Exception as error:
            raise RunFailed(f"predicting failed.\n{user_traceback(error)}") from error
    scores = dict(found.scores or {})
    if json:
        print(
            to_json(
                {
                    "to": str(found.path),
                    "records": found.records,
                    "bad": found.bad,
                    "examples": found.examples,
                    "scores": scores,
                }
            )
        )
    else:
        if not request.quiet:
            print(f"{found.path}: {found.records:,} records")
        if scores:
            show_pairs(scores)
    if found.bad:
        more = f"\n  ... and {found.bad - len(found.examples):,} more"
        listed = "\n".join(f"  {escaped(text)}" for text in found.examples)
        what = "record has" if found.bad == 1 else "records have"
        print(
            f"{found.bad:,} of {found.records:,} {what} no prediction (see the column `error`):\n"
            f"{listed}{more if found.bad > len(found.examples) else ''}",
            file=sys.stderr,
        )
        if request.on_error == "list":
            raise typer.Exit(1)
