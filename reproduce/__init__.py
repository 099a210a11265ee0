"""The papers' tables and figures as commands, and the tables of what was measured."""
