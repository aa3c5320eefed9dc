"""Experiments behind `docs/results`: each a script that a reader can run, with its raw results beside the tables."""
