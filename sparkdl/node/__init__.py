"""One member of the cluster: its Spark task, its agent, its child, and the context user code gets.

Runs in: child
"""
