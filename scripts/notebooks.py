"""Execute notebooks and save them with their outputs, except those that name this machine.

python scripts/notebooks.py notebooks/*.ipynb
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

_TIMEOUT_S = 300
_KEPT = re.compile(r"^(feed '|Cluster )")
_OF_MACHINE = re.compile(r"^(Dashboard: |\[\w+:\d+\] (Traceback|  |\w+Error))")


def main(paths: list[str]) -> None:
    """Execute and save each of `paths`."""
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(
                notebook,
                timeout=_TIMEOUT_S,
                kernel_name="python3",
                record_timing=False,
                coalesce_streams=True,
                resources={"metadata": {"path": folder}},
            )
            client.execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [kept for output in cell.outputs if (kept := _clean(output))]
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        nbformat.write(notebook, path)
        print(f"{path}: {Path(path).stat().st_size // 1000} kB")


def _clean(output: Any) -> Any:
    """Return an output without Spark's log, addresses of dashboards and tracebacks of nodes."""
    if output.output_type != "stream":
        return output
    lines = [line.rpartition("\r")[2] for line in output.text.splitlines(keepends=True)]
    if output.name == "stderr":
        output.text = "".join(line for line in lines if _KEPT.match(line))
    else:
        output.text = "".join(line for line in lines if not _OF_MACHINE.match(line))
    return output if output.text else None


if __name__ == "__main__":
    main(sys.argv[1:])
