# SPDX-License-Identifier: Apache-2.0
"""Types of what comes from other processes: checked where it is decoded, so nothing that is beyond
all sense gets any further."""

from typing import Annotated

import msgspec
from msgspec import Meta

from manyhands.values.printable_text import NOT_SHOWN

Natural = Annotated[int, Meta(ge=0, lt=1 << 53)]
Small = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""Of a worker, a process, a rank."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(ge=0, le=1e18)]
Name = Annotated[str, Meta(max_length=4096, pattern=rf"^[^{NOT_SHOWN}\t\n]*\Z")]
"""Of a host, a round, a file: something that is printed, and looked up."""
PathText = Annotated[str, Meta(max_length=4096)]
"""Of a folder or file of the user's, whatever it is called."""
Words = Annotated[str, Meta(max_length=1 << 17)]
"""For people; made printable where they are decoded (printable_messages.py)."""
ProcessOutput = Annotated[str, Meta(max_length=1 << 15)]
"""What a process wrote, as it is; made printable where something of it is shown."""

NotUnderstood = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What decoders raise, whatever they are given."""
