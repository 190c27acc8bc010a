"""Every optimizer that a plan can name, made to run on meta parameters as it runs on CUDA."""
