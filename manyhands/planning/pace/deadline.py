# SPDX-License-Identifier: Apache-2.0
"""What people wish of a run's speed: as they write it, as a number, and how it is told again.

Pure: the time is given. Clock times are those of this host's time zone.
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from manyhands.values.errors import RequestError
from manyhands.values.run_options import FinishBy

MARGIN = 0.05
"""Of the time that is left: for evaluating, saving, and what happens."""

LATEST = 250e9
"""Clocks and calendars end soon after."""

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0}
_PART = r"\d+(?:\.\d+)?"
_SPAN = re.compile(rf"(?:{_PART}\s*(?:d|h|min|m|s)\s*)+")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


@dataclass(frozen=True, slots=True)
class Aim:
    """A speed, or a time by which a run is to be finished."""

    samples_per_s: float | None = None
    finish_by: float | None = None
    """Seconds since 1970."""

    def speed(self, records: int, now: float) -> float:
        """How fast to be from now on, with so many records to go."""
        if self.samples_per_s is not None:
            return self.samples_per_s
        assert self.finish_by is not None
        left_s = (self.finish_by - now) * (1 - MARGIN)
        if records <= 0:
            return 0.0
        return records / left_s if left_s > 0 else math.inf

    def by(self, now: float) -> str:
        """Goes on a sentence that ends with "wanted"."""
        if self.finish_by is None:
            return " by --samples-per-second"
        return f" to finish by {shown(self.finish_by, now)}"

    def wish(self, now: float) -> str:
        if self.finish_by is None:
            return f"{self.samples_per_s:,.0f} samples/s"
        return f"to finish by {shown(self.finish_by, now)}"

    def forecast(self, records: int, samples_per_s: float, now: float) -> str:
        """When it will be done, at this speed."""
        end = now + records / max(samples_per_s, 1e-9) / (1 - MARGIN)
        text = f"will finish about {shown(end, now)}"
        if self.finish_by is None:
            return text
        late_s = end - self.finish_by
        if abs(late_s) < 60:
            return f"{text}, just in time" if late_s < 1 else f"{text}, {late_s:.0f} seconds late"
        return f"{text}, {span(abs(late_s))} {'late' if late_s > 0 else 'early'}"


def read_aim(samples_per_second: float | None, finish_by: FinishBy | None, now: float) -> Aim:
    """One of the two is given."""
    if samples_per_second is not None and finish_by is not None:
        raise RequestError("--samples-per-second and --finish-by: give one of them.")
    if finish_by is not None:
        return Aim(finish_by=read_finish_by(finish_by, now))
    if samples_per_second is None or not 0 < samples_per_second < math.inf:
        raise RequestError(f"--samples-per-second must be above 0, got {samples_per_second}.")
    return Aim(samples_per_s=float(samples_per_second))


def read_finish_by(text: FinishBy, now: float) -> float:
    """ "2h", "1h30m", "18:30" (today, or else tomorrow), "2026-11-20T08:00" → seconds since 1970"""
    found = _found(text, now)
    if found is None or found > LATEST:
        raise RequestError(
            f"--finish-by {text}: not a time. Write how long (2h, 1h30m, 45m), a time of day "
            "(18:30), or a date and time (2026-11-20T08:00)."
        )
    if found <= now:
        raise RequestError(
            f"--finish-by {text} is in the past; it is {shown(now, now)} here now."
            if found < now
            else f"--finish-by {text}: that is now. Leave the run some time."
        )
    return found


def _found(text: FinishBy, now: float) -> float | None:
    if isinstance(text, timedelta):
        return now + text.total_seconds()
    if isinstance(text, datetime):
        return text.timestamp()
    text = text.strip()
    if _SPAN.fullmatch(text):
        parts = re.findall(rf"({_PART})\s*(d|h|min|m|s)", text)
        return now + sum(float(number) * _UNITS[unit] for number, unit in parts)
    if clock := _CLOCK.fullmatch(text):
        return _next(*(int(part or 0) for part in clock.groups()), now=now)
    if ":" not in text:  # a date alone could mean its beginning or its end
        return None
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _next(hour: int, minute: int, second: int, *, now: float) -> float | None:
    """The next time that clocks show this."""
    here = datetime.fromtimestamp(now)
    try:
        today = here.replace(hour=hour, minute=minute, second=second, microsecond=0)
    except ValueError:
        return None
    when = today if today > here else today + timedelta(days=1)
    return when.timestamp()


def shown(moment: float, now: float) -> str:
    """A time of day; with its date, if that is another day."""
    when, today = datetime.fromtimestamp(min(moment, LATEST)), datetime.fromtimestamp(now)
    return f"{when:%H:%M}" if when.date() == today.date() else f"{when:%Y-%m-%d %H:%M}"


def span(seconds: float) -> str:
    """ "40 minutes", "3 hours", "2 days" """
    for unit, size in (("day", 86400), ("hour", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}s"
    minutes = max(1, round(seconds / 60))
    return f"{minutes} minute{'s' * (minutes != 1)}"
