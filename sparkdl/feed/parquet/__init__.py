"""Parquet data sets that nodes read themselves: discovery, shares, reading ahead.

Runs in: driver, agent
"""
