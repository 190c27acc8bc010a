"""One module per tool that a user would pick instead of memest; `scripts/compare_rivals.py` runs
them.

Each has `VERSION_OF` (the distribution whose version counts, or a fixed text), `SOURCE` (where its
rule is written), `PREDICTS` and `estimate(case) -> Estimate`, which raises `Refused` for what the
tool cannot express. A module imports only the standard library and its own tool, so that a tool can
live in a virtual environment of its own.
"""
