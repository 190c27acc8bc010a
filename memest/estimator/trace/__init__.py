"""A plan's training as a program of event streams, and what is read off it.

`virtual_run` makes the program by running the plan's own loop on a virtual GPU, `replay` plays it
through the allocator, `recording` and `snapshot` write down what the allocator did.
"""
