"""Methods of `torch.Tensor` that depend on the device, for tensors of a virtual GPU.

A build of torch without CUDA rejects `"cuda"` before any Python hook runs. So methods and
constructors with a device argument are replaced here.
"""
