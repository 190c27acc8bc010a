"""`torch.compile` on the virtual GPU: torch's own Dynamo, AOTAutograd and Inductor.

Graph breaks, guards, recompilations, dynamic shapes and checkpointing are torch's. The program that
Inductor writes allocates buffers and calls operators, which the dispatch mode records; only the
fused kernels do nothing. `dynamo.py` lets Dynamo trace code under the patches of memest.
`compiler.py` makes fake tensors and configures Inductor as if a GPU were present.
"""

from memest.estimator.integrations.inductor.dynamo import install

__all__ = ["install"]
