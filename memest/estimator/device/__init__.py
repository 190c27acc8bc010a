"""What stands in for a GPU while the model's own code runs on the meta device.

`cuda_semantics` decides as torch does for CUDA tensors, above autograd; `dispatch` records every
storage below it; `values` keeps the small integers that models branch on.
"""
