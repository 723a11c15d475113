"""`horovod.run` on this machine: its hosts, its results, and the command line of a program."""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import sparkdl.horovod
from sparkdl.core.errors import ConfigError, NodeFailedError, ReservationTimeoutError
from sparkdl.horovod.runner import check_hosts, program_of
from sparkdl.horovod.spark.common.backend import SparkBackend


@pytest.mark.parametrize(
    "hosts",
    ["localhost:2", "127.0.0.1:1,localhost:1", f"{socket.gethostname()}:4", "[::1]:1, localhost:1"],
)
def test_names_of_this_machine_are_taken(hosts: str) -> None:
    check_hosts(hosts)


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("localhost:2,192.0.2.1:2", "192.0.2.1 is not a name of this machine"),
        ("host.invalid:2", r"sparkdl\.horovod\.spark\.run"),
        ("localhost", "write it like localhost:2"),
        ("localhost:2;a:2", "is not a name of this machine"),
    ],
)
def test_hosts_that_cannot_work_are_refused(hosts: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_hosts(hosts)


def test_command_lines_of_python_programs_are_read(tmp_path: Path) -> None:
    script, no_suffix = str(tmp_path / "train.py"), str(tmp_path / "train")
    options = ("--lr", "0.1", "-np", "3")
    for path in (script, no_suffix):
        Path(path).touch()
    for words in (["python", script], [script], ["/usr/bin/python3.11", "-u", no_suffix]):
        program, rest = program_of([*words, *options])
        assert (program.path, rest) == (words[-1], options)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        *(
            (words, "does not start a Python program")
            for words in ([], ["python"], ["bash", "run.sh"], ["python", "-c", "1"], ["/bin/ls"])
        ),
        (["python", "-m", "train"], "write `python train.py …`"),
        (["python", "none.py"], r"the program none\.py cannot be read"),
    ],
)
def test_command_lines_of_other_programs_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        program_of(words)


def large_or_none(is_large: bool) -> Any:
    if not is_large:
        raise SystemExit(0)
    import sparkdl.horovod.torch as hvd

    hvd.init()
    place = hvd.rank(), hvd.size(), hvd.broadcast_object("it")
    return place, lambda: b"s" * 20_000_000


def prints(is_bad: bool) -> dict[str, str]:
    print("running")
    print("error line", file=sys.stderr)
    logging.warning("%d%%\rcareful\n", 50)
    if is_bad:
        raise LookupError("nothing there")
    return {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}


def test_processes_know_their_place_before_init_and_print_to_two_streams() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    env = {"HOROVOD_RANK": "7"}
    found = sparkdl.horovod.run(prints, (False,), num_proc=2, stdout=stdout, stderr=stderr, env=env)
    same = {"LOCAL_SIZE": "2", "SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    wanted = [{"RANK": rank, "LOCAL_RANK": rank} | same for rank in ("0", "1")]
    assert found == [{f"HOROVOD_{name}": each[name] for name in each} for each in wanted]
    lines = (sorted(stream.getvalue().splitlines()) for stream in (stdout, stderr))
    assert [*lines] == [
        ["[0]<stdout>:running", "[1]<stdout>:running"],
        sorted(f"[{rank}]<stderr>:{text}" for rank in (0, 1) for text in ("careful", "error line")),
    ]


def test_failed_process_is_an_error_with_its_exception() -> None:
    stderr = io.StringIO()
    text = "worker:0 .* raised LookupError: nothing there"
    with pytest.raises(NodeFailedError, match=text) as info:
        sparkdl.horovod.run(prints, (True,), stderr=stderr, prefix_output_with_timestamp=True)
    assert info.value.root_cause.exception_type == "builtins.LookupError"
    assert "\u2063" not in str(info.value)
    assert re.match(
        r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stderr>:error", stderr.getvalue()
    )


def test_processes_that_do_not_start_in_time_are_an_error() -> None:
    text = r"0 of 1 nodes came up within 0\.01 s"
    with pytest.raises(ReservationTimeoutError, match=text):
        sparkdl.horovod.run(os.getpid, start_timeout=0.01, verbose=0)


def test_backend_that_cannot_run_is_refused_before_an_estimator_writes_rows() -> None:
    for options in ({"nics": {"lo"}}, {"use_mpi": True}, {"executable": "python3"}):
        with pytest.raises(ConfigError, match=rf"^{next(iter(options))}="):
            SparkBackend(2, **options)


def test_results_of_this_machine_may_be_of_any_size() -> None:
    ((place, large),) = sparkdl.horovod.run(
        large_or_none, (True,), hosts="localhost:1", verbose=None
    )
    assert place == (0, 1, "it")
    assert len(large()) == 20_000_000


def test_function_that_ends_its_process_has_no_result() -> None:
    assert sparkdl.horovod.run(large_or_none, (False,), ssh_port=22, disable_cache=True) == [None]


def test_what_needs_other_machines_is_refused() -> None:
    names = ("host_discovery_script", "use_mpi", "output_filename", "executable", "hostfile")
    for refused in names:
        with pytest.raises(ConfigError, match=refused):
            sparkdl.horovod.run(large_or_none, (False,), **{refused: "there"})
