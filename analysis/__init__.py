"""Analyses of methods and of finished runs, each run as `python -m analysis.NAME` from the root."""
