"""The sections of tests/chaos.py."""
