"""The limit of a first epoch: Spark hands all rows to Python tasks, which drop them.

It has one task slot on each executor, as many as the nodes of sparkdl leave to feeding.
"""

from __future__ import annotations

import time

from feeding import cpu_s, drain, feed_session, options, write_epochs
from harness import claim_stdout, write

if __name__ == "__main__":
    parsed = options(__doc__).parse_args()
    lines = claim_stdout()
    with feed_session(slots=1, partitions=parsed.files) as spark:
        data = spark.read.parquet(parsed.path)
        drain(data)
        start = {"at": time.time(), "cpu_s": cpu_s()}
        parts = drain(data)
        end = {"at": time.time(), "cpu_s": cpu_s(), "nbytes": parsed.nbytes}
        end |= {"rows": sum(part.rows for part in parts)}
        end |= {"first_at": min(part.first_at for part in parts)}
        write_epochs(lines, parsed, start, [[end]])
        most = max(part.most for part in parts)
        write(lines, {"event": "batches", "partitions": len(parts), "rows": most})
