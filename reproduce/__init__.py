"""The papers' tables and figures as commands, and the tables of what was measured.

python -m reproduce PAPER TABLE            run a published table or figure
python -m reproduce.compare runs/*         tables and pictures of runs
"""
