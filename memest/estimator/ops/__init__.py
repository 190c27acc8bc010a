"""CUDA rules of each operator: results, memory, error messages, random offsets."""
