"""Predictions: a training loop run on a virtual GPU, and replayed through the allocator."""
