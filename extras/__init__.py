"""Data sets and networks that not every run needs; common.extra() loads them when asked for."""
