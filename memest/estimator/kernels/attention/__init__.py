"""Which attention backend runs, and what each of them allocates."""
