"""One training step as a program of event streams, and what is read off it.

`step` traces it in Lightning's order, `replay` runs it through the allocator, `recording` and
`snapshot` write down what the allocator did.
"""
