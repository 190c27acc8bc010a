"""A language model of four layers."""

import torch

VOCABULARY = 8000


class Model(torch.nn.Sequential):
    """Embedding, layers of a transformer, logits."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Embedding(VOCABULARY, 256),
            *[torch.nn.TransformerEncoderLayer(256, 8, batch_first=True) for _ in range(4)],
            torch.nn.Linear(256, VOCABULARY),
        )
