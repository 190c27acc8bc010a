"""Searches over many predictions: advice, the largest batch, sweeps, suites, scaling.

`related_plans` makes the programs of one plan over many sizes; the others use it or `predict`.
"""
