"""The report as text, HTML and JSON."""

from __future__ import annotations

import json

from sparkdl.core.errors import ConfigError
from sparkdl.diagnosis.report import Check, Report

GOOD = Check("clocks", "ok", "they agree")
BAD = Check("slots", "problem", "4 nodes <need> 4", "ask for " + "fewer " * 30)


def test_text_is_aligned_and_wrapped() -> None:
    lines = str(Report((GOOD, BAD), 1.25)).splitlines()
    assert lines[0] == "ok       clocks  they agree"
    assert lines[1] == "problem  slots   4 nodes <need> 4"
    assert lines[2].startswith(" " * 17 + "-> ask for fewer")
    assert lines[3].startswith(" " * 20 + "fewer")
    assert lines[-1] == "1 problem, 1 ok, in 1.2 s"
    assert max(map(len, lines)) <= 100


def test_json_holds_everything() -> None:
    found = json.loads(Report((GOOD, BAD), 1.25).to_json())
    assert found["ok"] is False
    assert found["checks"][1]["name"] == "slots"
    assert found["checks"][1]["verdict"] == "problem"
    assert found["checks"][1]["advice"] == BAD.advice


def test_html_is_escaped() -> None:
    assert "4 nodes &lt;need&gt; 4" in Report((BAD,))._repr_html_()


def test_warnings_are_no_problems() -> None:
    assert Report((GOOD, Check("a", "warning", ""), Check("b", "skipped", ""))).ok
    assert not Report((GOOD, BAD)).ok


def test_error_of_a_launch_is_parted_into_finding_and_advice() -> None:
    check = Check.of_error("slots", ConfigError("4 nodes, 2 slots. Ask for fewer. Or wait"))
    assert (check.finding, check.advice) == ("4 nodes, 2 slots", "Ask for fewer. Or wait")
