"""The texts of the pages, except those that nodes and programs report."""

LOGIN = "Open the whole URL, with its token, that the launch or sparkdl dashboard printed."
NO_CLUSTER = "No cluster has been launched yet."
OVERVIEW, NODES, CLUSTER = "Overview", "Nodes", "Cluster"
ATTEMPTS, FAILURES = "Attempts", "Failures"
HEADLINE = "cluster {} · {} · {}"
STATES, PHASES = {"stopped": "stopped early"}, {"in map_fun": "working"}
ATTEMPT, RESTARTED, CONTINUED = "attempt {}", "attempt {}, because {}", "continued as attempt {}"
ATTEMPT_COLUMNS = ("", "Began after", "Lasted", "How it ended")
BEGUN, FAILED = "attempt {}: {}", "after {}, in attempt {}: {}"
MARKS, CHECKPOINT = ("failure", "checkpoint"), "checkpoint of step {:,}"
LANE, LONG_LANE, STEPS = "{} {}", "{} {} for {}", ", steps {:,} to {:,}"
TILES = ("Nodes", "Attempt", "Step", "Steps / s", "Rows / s")
MOST_NODES = "{:,} of {:,} {}"
OVERVIEW_CHARTS = (  # titles, labels of columns of a history's series, units
    ("Rows per second, all nodes", {"rows used": "used by training", "rows in": "received"}, ""),
    ("Waits for rows", {"without rows": "share of the last minute, mean of the nodes"}, " %"),
    ("Step", {"step": "highest of the nodes"}, ""),
)
METRIC, TIP = "mean of the nodes", "after"
NODE_CHARTS = (
    ("Memory per node", {"memory_nbytes": "mean"}, " GiB"),
    ("Busy cores per node", {"cores": "mean"}, ""),
    ("GPU utilization per node", {"gpu": "mean"}, " %"),
    ("GPU memory per node", {"gpu_nbytes": "mean"}, " GiB"),
)
NODE_COLUMNS = (
    {"rank": "Rank", "name": "Node", "state": "State", "step": "Step", "step_ms": "Step, ms"}
    | {"used": "Rows used", "waits_rows": "Waits: rows", "waits_others": "Waits: nodes"}
    | {"epochs": "Epochs", "buffer": "Buffer", "cores": "Cores", "memory": "Memory, GiB"}
    | {"gpu": "GPU", "gpu_memory": "GPU, GiB", "host": "Host", "pid": "Process"}
    | {"metrics": "Metrics"}
)
NOTE = (
    "Step, ms: mean of the last minute. Rows used: total of all epochs of this attempt. "
    "Waits: share of the last minute in which the node waited for rows, or for other nodes in "
    "collectives; the latter is measured only on CPUs under Linux."
)
