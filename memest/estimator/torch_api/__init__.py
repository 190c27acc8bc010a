"""torch with a GPU: tensor methods, `torch.cuda`, files, process groups."""
