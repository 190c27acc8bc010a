"""What CUDA's kernels allocate: a function of shapes, dtypes and the GPU for each of them.

`tables` says by operator what a kernel takes for itself; `staged` and `attention` say in which
order, outputs among it.
"""
