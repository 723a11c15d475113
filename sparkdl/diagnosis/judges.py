"""Judges: pure functions from facts to checks.

Runs in: driver
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial

from sparkdl.core.listing import count, listed
from sparkdl.diagnosis.facts import Facts, grouped, places, so_many
from sparkdl.diagnosis.probe import PACKAGES
from sparkdl.diagnosis.report import Check, Verdict
from sparkdl.driver.slots.advice import Advice
from sparkdl.driver.slots.placement import Topology
from sparkdl.node.task import cannot_reach_driver

_FRAMEWORKS = ("tensorflow", "keras", "torch", "jax")
_SAME = ("Python", "sparkdl", "pyspark")
"""Packages that must match: a launch with other versions is refused, or fails later."""
_DYNAMIC = "spark.dynamicAllocation"
_FINE, _ABSENT, _MISSING = "", "absent", "missing"
"""Kinds of imports: `missing` is a requested framework that is not installed."""


def judge_versions(
    driver: Facts, executors: Sequence[Facts], is_client: bool = False
) -> Iterator[Check]:
    """Compare packages of the driver and the executors.

    Args:
        is_client: of a Spark Connect server, whose pyspark may be another.
    """
    names = ["Python", "sparkdl", *PACKAGES]
    if is_client:
        names.remove("pyspark")
    seen = [check for name in names for check in _versions_of(name, driver, executors)]
    yield from seen
    differing = {check.name.removeprefix("version of ") for check in seen}
    same = [
        f"{name} {version}"
        for name in names
        if name not in differing and (version := _common(name, driver, executors))
    ]
    if same:
        where = f"driver and {count(len(executors), 'executor')}" if executors else "driver"
        yield Check("versions", "ok", f"{where}: {', '.join(same)}")


def _versions_of(name: str, driver: Facts, executors: Sequence[Facts]) -> Iterator[Check]:
    them = grouped(executors, lambda facts: facts.versions.get(name, "none"))
    here = driver.versions.get(name, "none")
    title, advice = f"version of {name}", f"Install the same {name} on all executors"
    there = "; ".join(f"{version} on {places(found)}" for version, found in them.items())
    if name in _FRAMEWORKS:  # which the driver need not have
        if len(them) > 1:
            yield Check(title, "problem", f"executors differ: {there}", advice)
        return
    if not them or list(them) == [here]:
        return
    finding = f"{here} on the driver; {there}"
    if name == "Python":
        # pyspark and pickled code work across patch releases, and not across minor ones.
        minors = {_first(version, 2) for version in (here, *them)}
        advice = "Set PYSPARK_PYTHON (or spark.pyspark.python) to the same version on all machines"
        yield Check(title, "problem" if len(minors) > 1 else "warning", finding, advice)
    elif name in _SAME:
        advice = (
            f"Install {name} {here} in the executors' Python, or ship an environment with "
            "spark.archives and point PYSPARK_PYTHON into it"
        )
        yield Check(title, "problem", finding, advice)
    else:
        majors = {_first(version, 1) for version in (here, *them)}
        # numpy 1 cannot read arrays that numpy 2 has pickled.
        is_bad = "none" in them or (name == "numpy" and len(majors) > 1)
        advice = f"Install {name} {here} in the executors' Python" if here != "none" else advice
        yield Check(title, "problem" if is_bad else "warning", finding, advice)


def judge_packages(facts: Sequence[Facts]) -> Iterator[Check]:
    """Say where another package named sparkdl hides this one, or lies among its files."""
    again = (
        "pip uninstall sparkdl, then install sparkdl-cluster again, with pip's options "
        "--force-reinstall --no-deps"
    )
    for folder, them in grouped(facts, lambda one: one.package).items():
        hidden = [one for one in them if folder and not one.has_sparkdl]
        if hidden:
            text = f"{places(hidden)}: import sparkdl finds another package, at {folder}"
            yield Check("package", "problem", text, f"In the Python environment there: {again}")
        for mixed, some in grouped(them, lambda one: listed(one.foreign)).items():
            ours = [one for one in some if one.has_sparkdl]
            if mixed and ours:
                also = f"{folder} also holds another package that is imported as sparkdl: {mixed}"
                yield Check("package", "warning", f"{places(ours)}: {also}", again)


def judge_executors(
    facts: Sequence[Facts], silent: Sequence[Facts], came: int, expected: int, waited_s: float
) -> Iterator[Check]:
    """Say which executors have answered."""
    if silent:
        yield Check(
            "executors",
            "problem",
            f"{places(silent)} started a task and reported nothing within {waited_s:g} s",
            "Look at that host: its process may be stopped, or its disk, its memory or the network "
            "in trouble",
        )
    if came < expected:
        yield Check(
            "executors",
            "warning" if came else "problem",
            f"{came} of {count(expected, 'task slot')} have answered; the others are busy, or "
            "their executors are not there",
            "End other jobs of the application, and look at Spark's UI for executors that do not "
            "come. A launch waits for slots for Startup(timeout_s=…)",
        )
    elif facts:
        hosts = len({each.host for each in facts})
        yield Check(
            "executors",
            "ok",
            f"{count(len(facts), 'executor')} on {count(hosts, 'host')} answered, "
            f"{count(expected, 'task slot')}",
        )
    elif not silent:
        yield Check(
            "executors",
            "problem",
            f"{count(came, 'task')} ended without a report",
            "Run the doctor again, and look at the tasks' output in Spark's UI",
        )


def judge_addresses(facts: Sequence[Facts], url: str) -> Iterator[Check]:
    """Say whether executors reach the driver and each other, at addresses that can work."""
    for problem, them in grouped(facts, lambda one: one.unreachable).items():
        if problem:
            yield Check.of_error(
                "way to the driver", cannot_reach_driver(places(them), url, problem)
            )
    reached = [one for one in facts if url and not one.unreachable]
    if reached:
        yield Check("way to the driver", "ok", f"{url} is reached from {so_many(reached, facts)}")
    for one in facts:
        if one.address_error and not one.unreachable:
            yield Check(
                "addresses",
                "problem",
                f"{one.place}: nodes cannot listen at their address: {one.address_error}",
                "Set SPARKDL_NODE_HOST on that executor to an address of its own that the others "
                "reach, or unset it",
            )
    yield from _judge_ways_between(reached)


def _judge_ways_between(facts: Sequence[Facts]) -> Iterator[Check]:
    hosts = {one.host for one in facts}
    looping = [one for one in facts if one.address.startswith("127.") or one.address == "::1"]
    # On one machine loopback reaches everything.
    if looping and len(hosts) > 1:
        yield Check(
            "addresses",
            "problem",
            f"{places(looping)} would announce a loopback address, which no other host reaches",
            "The driver's name resolves to loopback there: set SPARKDL_DRIVER_HOST, or "
            "spark.driver.host, to an address of the driver that all hosts reach",
        )
    cut = [(one, way) for one in facts for way in one.cut]
    if cut:
        ways = listed([f"{one.place} to {way.address}: {way.error}" for one, way in cut], "; ")
        yield Check(
            "ways between executors",
            "problem",
            f"{count(len(cut), 'way')} between executors cut: {ways}",
            "Let the hosts of the cluster reach each other's ports (firewall, NetworkPolicy), or "
            "set SPARKDL_NODE_HOST on executors with several networks",
        )
    elif tried := sum(one.peers for one in facts):
        text = f"{tried} of {count(tried, 'connection')} succeeded"
        yield Check("ways between executors", "ok", text)
    elif facts:
        why = "there is one executor" if len(facts) == 1 else "they reported no addresses"
        yield Check("ways between executors", "skipped", why)


def judge_imports(facts: Sequence[Facts], wanted: Collection[str]) -> Iterator[Check]:
    """Say whether frameworks can be imported wherever they have to be."""
    looked = [one for one in facts if one.has_sparkdl]
    names = dict.fromkeys([*wanted, *(name for one in looked for name in one.imports)])
    for name in names:
        title = f"import {name}"
        verdict: Verdict = "problem" if name in wanted else "warning"
        for kind, them in grouped(looked, partial(_kind_of_import, name)).items():
            if kind == _FINE:
                slowest_s = max(one.imports[name].seconds for one in them)
                text = f"on {so_many(them, looked)}, in {slowest_s:.1f} s at most"
                yield Check(title, "ok", text)
            else:
                yield _failed_import(name, kind, them, title, verdict)
    if looked and not names:
        yield Check("frameworks", "skipped", "none is installed, and none was named")


def _failed_import(
    name: str, kind: str, them: Sequence[Facts], title: str, verdict: Verdict
) -> Check:
    """Return a check for executors where it fails alike; the launch's words where it has some."""
    if kind == _ABSENT:
        advice = f"Install {name} in the Python environment of those executors"
        return Check(title, verdict, f"missing on {places(them)}, and others have it", advice)
    words = them[0].imports[name].error if kind == _MISSING else kind
    check = Check.of_error(title, words)
    if "longer than" in words:
        advice = (
            "Import it there by hand: a file system that does not answer, or an executor without "
            "memory or cores, makes imports hang"
        )
    else:
        advice = check.advice or f"Repair {name} in the Python environment of those executors"
    text = f"{places(them)}: {check.finding}"
    return Check(title, verdict, text, advice)


def _kind_of_import(name: str, facts: Facts) -> str:
    imported = facts.imports.get(name)
    if imported is None:
        return _ABSENT
    return _MISSING if imported.is_missing else imported.error


def judge_settings(found: Sequence[Advice], topology: Topology | None) -> Iterator[Check]:
    """Say which of Spark's settings cost speed, and whether executors come and go."""
    dynamic = [advice for advice in found if advice.setting.startswith(_DYNAMIC)]
    for advice in dynamic:
        yield Check("dynamic allocation", "warning", f"it is on: {advice.why}", _to_set(advice))
    if not dynamic and topology is not None:
        yield Check("dynamic allocation", "ok", "it is off")
    others = [advice for advice in found if advice not in dynamic]
    for advice in sorted(others, key=lambda each: -each.level):
        name = "settings" if advice.level < logging.WARNING else "settings that cost"
        yield Check(name.partition(" ")[0], "warning", advice.why, _to_set(advice))
    if not others:
        yield Check("settings", "ok", "none that costs speed")


def judge_spark(driver: Facts, version: str, master: str) -> Check:
    """Compare Spark with the driver's pyspark; a client of Spark Connect may be of another version.

    Args:
        master: empty for a Spark Connect server.
    """
    own = driver.versions.get("pyspark", "")
    if not master:
        return Check("Spark", "ok", f"{version} behind a Spark Connect server")
    if own and _first(own, 2) != _first(version, 2):
        return Check(
            "Spark",
            "problem",
            f"the cluster at {master} runs Spark {version}, and the driver's pyspark is {own}",
            f"Install pyspark {version} at the driver",
        )
    return Check("Spark", "ok", f"{version} at {master}")


def _to_set(advice: Advice) -> str:
    return f"Set {advice.setting}"


def _common(name: str, driver: Facts, executors: Sequence[Facts]) -> str:
    """Return the version that all have; the driver's alone does not count for a framework."""
    if not executors or name not in _FRAMEWORKS:
        return driver.versions.get(name, "")
    return executors[0].versions.get(name, "")


def _first(version: str, parts: int) -> tuple[str, ...]:
    return tuple(version.split(".")[:parts])
