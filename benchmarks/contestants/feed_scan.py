"""The limits of Parquet: one process for each node scans its share of the files.

It drops what it has decoded, or touches it in the batches that a node gets.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from feed_bare import cut
from feeding import Touch, be_node, cpu_s, options, side_by_side, write_epochs
from harness import NODES, claim_stdout

if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--touch", action="store_true")
    parser.add_argument("--node", type=int)
    parsed = parser.parse_args()
    if parsed.node is None:
        lines = claim_stdout()
        write_epochs(lines, parsed, *side_by_side(__file__, sys.argv[1:]))
    else:
        files = sorted(map(str, Path(parsed.path).glob("*.parquet")))[parsed.node :: NODES]
        touch = Touch()

        def epoch() -> dict[str, Any]:
            """Scan everything once."""
            scanned = ds.dataset(files).to_batches()
            if parsed.touch:
                for batch in cut(scanned):
                    touch(batch)
                return touch.record()
            rows = nbytes = 0
            for batch in scanned:
                rows += batch.num_rows
                nbytes += batch.nbytes
            return {"at": time.time(), "rows": rows, "nbytes": nbytes, "cpu_s": cpu_s()}

        be_node(epoch, parsed.epochs)
