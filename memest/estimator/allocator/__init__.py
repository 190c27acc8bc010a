"""The caching allocator of CUDA, simulated, and the addresses that the driver hands out."""
