"""Horovod's `runner.common.util.env`: the place of a process by its environment variables.

Runs in: anywhere

https://github.com/horovod/horovod/blob/v0.28.1/horovod/runner/common/util/env.py
"""

from __future__ import annotations

import os
import re

KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"
LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
_RSH_AGENT = "OMPI_MCA_plm_rsh_agent"
_LAUNCHERS = ("HOROVOD_{}", "OMPI_COMM_WORLD_{}", "PMI_{}")
_NOT_PASSED_ON = re.compile(r"BASH_FUNC_|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")


def is_exportable(v: str) -> bool:
    """Whether Horovod passes on an environment variable of this name."""
    return not _NOT_PASSED_ON.match(v)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank and the size that a launcher has set; 0 and 1 without one.

    Raises:
        RuntimeError: if one of the two is missing.
    """
    for form in _LAUNCHERS:
        names = form.format("RANK"), form.format("SIZE")
        found = [int(os.environ[name]) for name in names if name in os.environ]
        if len(found) == 2:
            return found[0], found[1]
        if found:
            raise RuntimeError(f"only one of {names[0]} and {names[1]} is set: set both or none")
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Whether Kubeflow's MPI operator has started this process."""
    return os.environ.get(_RSH_AGENT) == KUBEFLOW_MPI_EXEC
