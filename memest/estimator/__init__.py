"""How much it needs: the step traced on the meta device, and replayed through the allocator."""
