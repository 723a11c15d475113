"""The doctor's report: checks with verdicts, as text, HTML and JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

import msgspec

from sparkdl.core.errors import in_words

Verdict = Literal["ok", "warning", "problem", "skipped"]
_COLUMNS = 100
_COLOURS = {"ok": "green", "warning": "darkorange", "problem": "red", "skipped": "gray"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        verdict: `problem`: a launch fails, or hangs. `warning`: it may, or is slow. `skipped`: it
            could not be looked at, or was not wanted.
        finding: the observation, as a phrase.
        advice: what to change; empty if nothing.
    """

    name: str
    verdict: Verdict
    finding: str
    advice: str = ""

    @classmethod
    def of_error(cls, name: str, error: BaseException | str) -> Check:
        """Return the problem that a launch would raise; its last sentences are the advice."""
        text = error if isinstance(error, str) else in_words(error)
        # Errors of this library say what is wrong first, and then what to do.
        finding, _, advice = text.partition(". ")
        return cls(name, "problem", finding, advice)


@dataclass(frozen=True)
class Report:
    """All checks, in the order in which they were made.

    Attributes:
        seconds: how long they took.
    """

    checks: tuple[Check, ...]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no check found a problem; there may be warnings."""
        return all(check.verdict != "problem" for check in self.checks)

    def summary(self) -> str:
        """Return how many checks had which verdict, the worst first."""
        counts = Counter(check.verdict for check in self.checks)
        words = [
            f"{many} {verdict}{'s' if verdict in ('problem', 'warning') and many > 1 else ''}"
            for verdict in ("problem", "warning", "ok", "skipped")
            if (many := counts[verdict])
        ]
        return f"{', '.join(words) or 'nothing was checked'}, in {self.seconds:.1f} s"

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        margin = " " * (len("problem  ") + width + 2)
        lines = []
        for check in self.checks:
            head = f"{check.verdict:<7}  {check.name:<{width}}  "
            lines += _wrapped(check.finding, head, margin)
            lines += _wrapped(check.advice, f"{margin}-> ", f"{margin}   ") if check.advice else []
        return "\n".join([*lines, self.summary()])

    def _repr_html_(self) -> str:
        rows = [
            f'<tr><td style="color:{_COLOURS[check.verdict]}">{check.verdict}</td>'
            f'<td>{escape(check.name)}</td><td style="text-align:left">{escape(check.finding)}'
            f"{f'<br><b>{escape(check.advice)}</b>' if check.advice else ''}</td></tr>"
            for check in self.checks
        ]
        return f"<table>{''.join(rows)}</table><p>{escape(self.summary())}</p>"

    def to_json(self) -> str:
        """Return an object of `ok`, `seconds` and `checks`: objects as `Check` is."""
        found: dict[str, Any] = {"ok": self.ok, **asdict(self)}
        return msgspec.json.format(msgspec.json.encode(found)).decode()


def _wrapped(text: str, head: str, margin: str) -> list[str]:
    # Line by line, because `textwrap` would join them.
    found = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(
            line, _COLUMNS - len(margin), break_long_words=False, break_on_hyphens=False
        )
    ]
    return [(margin if at else head) + part for at, part in enumerate(found or [""])]
