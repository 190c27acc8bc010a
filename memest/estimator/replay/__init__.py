"""Programs of plans, and their replays.

A program is a plan's training as event streams. `virtual_run` makes it by running the plan's own
loop on a virtual GPU. `replay` plays it through the allocator; `recording` writes torch's formats.
"""
