"""What an agent holds of its feeds: logs of segments within a byte budget.

Runs in: agent
"""
