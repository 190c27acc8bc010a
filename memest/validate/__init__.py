"""WAS IT RIGHT: the real fine-tune on a GPU, and its comparison with the prediction."""
