"""GPUs: their figures, operator times, and memory that libraries hold besides the allocator's."""
