"""Training loops, shared by measured runs and predictions."""
