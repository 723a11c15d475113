"""An agent's store of its feeds: logs of segments within a byte budget.

Runs in: agent
"""
