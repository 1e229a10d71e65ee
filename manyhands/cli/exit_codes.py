# SPDX-License-Identifier: Apache-2.0
"""The command, and how it ends.

Exit codes: 0 done, 1 the run failed (verdict printed), 2 the request was wrong, 130 interrupted
(resumable).
"""

import os
import sys

from manyhands.cli.app import app
from manyhands.cli.init_process import init_stays_behind
from manyhands.cli.shared_arguments import Afterwards
from manyhands.cli.standard_files import whole_standard_files
from manyhands.values.blame import blame
from manyhands.values.errors import Interrupted, ManyhandsError, RequestError, RunFailed
from manyhands.values.printable_text import escaped


def main() -> None:
    if os.getpid() == 1:
        init_stays_behind()
    whole_standard_files()
    after: list[Afterwards] = []
    try:
        _carry_out(after)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        for then in after:  # when everything is said
            then(code)
        raise


def _carry_out(after: list[Afterwards]) -> None:
    try:
        app(standalone_mode=True, obj=after)
    except RequestError as error:
        _say(f"manyhands: {error}")
        sys.exit(2)
    except Interrupted as error:
        _say(f"manyhands: {error}")
        sys.exit(130)
    except RunFailed as error:
        _say(error.verdict)
        sys.exit(1)
    except ManyhandsError as error:
        _say(f"manyhands: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        _say("manyhands: interrupted")
        sys.exit(130)
    except Exception as error:
        _say(f"manyhands: {blame(error).text()}")
        sys.exit(1)


def _say(text: str) -> None:
    print(escaped(text), file=sys.stderr)
