"""What many predictions are made for: advice, the largest batch, sweeps, suites, scaling.

`trace_series` makes the programs of one plan over many sizes; the others ask it or `predict`.
"""
