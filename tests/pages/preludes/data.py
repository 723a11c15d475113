"""Files for the stream, and a thread that stops the query when it has had rows."""

import threading
from pathlib import Path

df.selectExpr("image as features", "cast(label as float) as label").write.parquet("/data/incoming")


def stop_after_rows():
    pause = threading.Event()
    while not any(
        each.numInputRows for query in spark.streams.active for each in query.recentProgress
    ):
        pause.wait(0.2)
    for query in spark.streams.active:
        query.stop()


threading.Thread(target=stop_after_rows, daemon=True).start()

# block: Train on a stream
assert Path("/models/online.keras").exists()
