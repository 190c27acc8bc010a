"""torch.nn's own sequence layers, trained and evaluated in turn.

layers.py lstm|lstm1|gru|rnn|enc|encn [DTYPE]
"""

import sys

import torch
from torch import nn

name = sys.argv[1]
dtype = getattr(torch, sys.argv[2]) if len(sys.argv) > 2 else torch.float32
is_encoder = "enc" in name


def encoder(num_layers, width, **kwargs):
    """A TransformerEncoder of 512 features and 8 heads."""
    layer = nn.TransformerEncoderLayer(512, 8, width, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, num_layers)


LAYERS = {
    "lstm": lambda: nn.LSTM(512, 768, 2, batch_first=True, dropout=0.2, bidirectional=True),
    "gru": lambda: nn.GRU(512, 768, 2, batch_first=True),
    "rnn": lambda: nn.RNN(512, 768, 2, batch_first=True),
    "lstm1": lambda: nn.LSTM(512, 640, 1),
    "enc": lambda: encoder(4, 2048),
    "encn": lambda: encoder(3, 1024, norm_first=True, activation="gelu", dropout=0.0),
}
OUTPUTS = {"lstm": 1536, "gru": 768, "rnn": 768, "lstm1": 640}


class Tagger(nn.Module):
    """An embedding, the layers in question, a linear head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20000, 512)
        self.layers = LAYERS[name]()
        self.head = nn.Linear(OUTPUTS.get(name, 512), 64)

    def forward(self, ids, padding=None):
        """Logits of 64 tags per token."""
        hidden = self.embedding(ids)
        if is_encoder:
            hidden = self.layers(hidden, src_key_padding_mask=padding)
        else:
            hidden = self.layers(hidden)[0]
        return self.head(hidden)


model = Tagger().cuda().to(dtype)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_of = nn.CrossEntropyLoss()
for step in range(5):
    model.train()
    ids = torch.randint(0, 20000, (16, 128)).cuda()
    tags = torch.randint(0, 64, (16, 128)).cuda()
    padding = None
    if name == "enc":
        padding = torch.zeros(16, 128, dtype=torch.bool)
        padding[:, 100:] = step % 2 == 1
        padding = padding.cuda()
    loss = loss_of(model(ids, padding).flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step % 2 == 0:
        model.eval()
        with torch.no_grad():
            evaluated = loss_of(model(ids, padding).flatten(0, 1), tags.flatten())
        print(step, loss.item(), evaluated.item())
