"""Real fine-tunes on a GPU, and their comparison with predictions."""
