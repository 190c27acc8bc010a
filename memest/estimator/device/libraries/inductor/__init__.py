"""`torch.compile` on the virtual GPU: torch's own compiler, without the kernels that it writes.

The memory of a compiled function is that of the code which Inductor writes for it: a Python program
that allocates buffers, reuses them, calls matrix products and attention of torch, and starts fused
kernels. Here the compiler runs as it is, AOTAutograd's partition of forward and backward included,
and so does its program, on the virtual GPU; only the fused kernels do nothing.

1. AOTAutograd traces the function on meta tensors, where the decisions of CUDA are taken as ever
   (`cuda_semantics.py`). A CPU build of torch has no autograd for tensors that say `cuda`.
2. The graphs that it gives are told to lie on `cuda` before Inductor lowers them.
3. Inductor's program is loaded with allocations that the mode sees.

One graph is made of the whole function, for each set of shapes, broken where a logger is called
(`breaks.py`). A real run may have more: Dynamo breaks graphs at whatever it cannot follow, and
makes a dynamic one for the second set of shapes. What cannot be traced whole here (a value that is
read, a tensor that comes from elsewhere, a parallel strategy) runs as it is written, and the report
says why.
"""

from __future__ import annotations

from memest.estimator.device.libraries.inductor.compiled import Compiled, compiled_function

__all__ = ["Compiled", "compiled_function"]
