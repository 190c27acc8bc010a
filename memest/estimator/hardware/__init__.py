"""GPUs: their figures, how long an operator takes, what libraries hold beside the allocator."""
