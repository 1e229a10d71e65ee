# SPDX-License-Identifier: Apache-2.0
"""`manyhands ledger`: was every record consumed exactly once an epoch, and who did it?"""

from collections.abc import Sequence

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

from manyhands.accounting.deal_micro_batches import ENDLESS
from manyhands.accounting.ledger import read
from manyhands.accounting.ledger_lines import Committed, surviving
from manyhands.accounting.proof import Proof, check
from manyhands.values.run_folder import RunDir

MOST_ROWS = 24
"""Of a table, or of a list of problems; what is more is counted, not shown."""


def print_proof(run: RunDir, *, json: bool) -> bool:
    """Print what the ledger proves, or why it does not. True if it does."""
    entries = read(run.ledger)
    proof = check(entries)
    if json:
        answer = {"ok": proof.ok, **msgspec.structs.asdict(proof)}
        print(msgspec.json.encode(answer).decode())
        return proof.ok
    console = Console(markup=False, highlight=False)
    console.width = min(console.width, 100) if console.is_terminal else 100
    for part in show(proof, surviving(entries) if proof.ok else []):
        console.print(part)
    return proof.ok


def show(proof: Proof, line: Sequence[Committed]) -> list[RenderableType]:
    """For people. They count epochs from 1; problems use the numbers of the file."""
    if not proof.ok:
        return _refusal(proof)
    parts: list[RenderableType] = [_verdict(proof)]
    if proof.steps:
        parts += ["", _worker_table(proof), "", _view_table(line)]
    return parts


def _verdict(proof: Proof) -> str:
    whole = [epoch for epoch in proof.epochs if epoch.consumed == epoch.of]
    begun = [epoch for epoch in proof.epochs if epoch.consumed < epoch.of]
    said: list[str] = []
    if whole:
        said.append(f"every position of {_count(len(whole), 'epoch')} was consumed exactly once")
    for e in begun:
        if e.of == ENDLESS:
            said.append(f"the first {e.consumed} records of the stream were consumed exactly once")
        else:
            said.append(f"epoch {e.epoch + 1}: {e.consumed} of {e.of} so far")
    text = "; ".join(said) or "no step was committed yet"
    if (sampled := proof.sampled) is not None:
        text += f"\npositions are {sampled.how} (of {_count(sampled.records, 'record')})"
        if sampled.journalled:
            text += ", as was journalled for every epoch"
    extra = [_count(proof.steps, "step"), _count(len(proof.by_worker), "worker")]
    if proof.rewinds:
        back = ", ".join(str(step) for step in proof.rewinds[-MOST_ROWS:])
        extra.append(f"{_count(len(proof.rewinds), 'rewind')} (to {back})")
    if proof.skipped:
        these = ", ".join(str(step) for step in proof.skipped[-MOST_ROWS:])
        extra.append(f"{_count(len(proof.skipped), 'skipped step')} ({these})")
    if proof.changes:
        extra.append(f"{_count(len(proof.changes), 'change')} of settings")
    return f"{text}\n{', '.join(extra)}"


def _refusal(proof: Proof) -> list[RenderableType]:
    count = _count(len(proof.problems), "problem")
    head = f"the ledger does NOT prove that every record was consumed exactly once: {count}"
    end = "The file was edited or damaged, or manyhands has a bug: please report it with the file."
    left = len(proof.problems) - MOST_ROWS
    more = [f"… and {left} more"] if left > 0 else []
    return [head, *(f"  {text}" for text in proof.problems[:MOST_ROWS]), *more, end]


def _worker_table(proof: Proof) -> Table:
    table = _table("worker", "steps", "micro-batches", "records", "share")
    total = sum(share.records for share in proof.by_worker.values())
    for worker, did in proof.by_worker.items():
        part = f"{100 * did.records / total:.1f} %"
        numbers = (did.steps, did.micro_batches, did.records)
        table.add_row(str(worker), *(str(n) for n in numbers), part)
    return table


def _view_table(line: Sequence[Committed]) -> Table:
    """One row for each stretch of steps that the same workers did in one view."""
    table = _table("steps", "view", "workers")
    table.columns[2].justify = "left"
    rows: list[tuple[int, int, Committed]] = []
    for entry in line:
        who = entry.generation, entry.workers
        if rows and (rows[-1][2].generation, rows[-1][2].workers) == who:
            rows[-1] = (rows[-1][0], entry.stop, entry)
        else:
            rows.append((entry.first, entry.stop, entry))
    hidden = max(0, len(rows) - MOST_ROWS)
    if hidden:
        table.add_row("…", "", f"{hidden} earlier stretches; --json has what they add up to")
    for first, stop, entry in rows[hidden:]:
        workers = ", ".join(str(worker) for worker in entry.workers)
        table.add_row(f"{first} – {stop - 1}", str(entry.generation), workers)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + "s" * (n != 1)
