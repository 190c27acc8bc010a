"""The linear layers of bitsandbytes on the meta device: the same tensors, none of its kernels."""
