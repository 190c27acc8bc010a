"""Parts of torch that a virtual GPU replaces: tensors, `torch.cuda`, files, process groups."""
