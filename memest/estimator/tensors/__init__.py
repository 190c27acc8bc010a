"""Place, storage and values of simulated tensors."""
