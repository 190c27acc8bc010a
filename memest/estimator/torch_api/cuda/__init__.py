"""`torch.cuda`, and the queries of torch to CUDA and NVML, for the virtual GPU."""
