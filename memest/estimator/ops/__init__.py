"""Rules for each operator on CUDA: results, memory, refusals, random offsets."""
