"""Strategies over several GPUs, and offload: what they add to the step of one rank."""
