"""The dispatch mode and its parts.

`mode.CudaSimMode` runs every operator below autograd. It owns `memory` (storages, allocator,
deferred frees), `timeline` (streams), `kernel_calls` (requests of kernels), `host` (host tensors),
`attribution` (module, phase and line) and `guesses` (values that are not known).
"""
