"""An agent's store of its feeds: spools and logs of segments within a byte budget.

Runs in: agent
"""
