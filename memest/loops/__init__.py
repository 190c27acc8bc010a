"""The training loops of a plan, for both sides: on a GPU, where they are measured, and on one that
is not there, where they are predicted.
"""
