"""Training as Spark jobs: no long-running nodes, no ports; each iteration is a Spark job.

Runs in: driver
"""

from sparkdl.ml.jobs.fit import JobsResult, fit_in_jobs

__all__ = ["JobsResult", "fit_in_jobs"]
