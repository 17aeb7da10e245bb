"""A kernel is a folder: `reference.py` is its meaning, `cases.py` its sizes, the rest implementations."""
