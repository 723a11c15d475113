"""`python -m sparkdl`: the command line, where its script is not on the path.

Runs in: driver
"""

from __future__ import annotations

from sparkdl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
