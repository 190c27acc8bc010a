"""Trains, saves, throws everything away, loads (map_location cuda), goes on. Encoder-decoder nn.Transformer."""
import os
import tempfile

import torch
import torch.nn as nn


class MT(nn.Module):
    def __init__(self, v=24000, d=768):
        super().__init__()
        self.src, self.tgt = nn.Embedding(v, d, padding_idx=1), nn.Embedding(v, d, padding_idx=1, max_norm=5.0)
        self.pos = nn.Parameter(torch.zeros(512, d))
        self.tr = nn.Transformer(d, 12, 5, 5, 3072, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.gen = nn.Linear(d, v)

    def forward(self, s, t):
        m = self.tr.generate_square_subsequent_mask(t.size(1), device=t.device)
        h = self.tr(self.src(s) + self.pos[:s.size(1)], self.tgt(t) + self.pos[:t.size(1)], tgt_mask=m, tgt_is_causal=True,
                    src_key_padding_mask=s == 1, memory_key_padding_mask=s == 1)
        return self.gen(h)


def make(device):
    net = MT().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)
    return net, opt, torch.optim.lr_scheduler.ReduceLROnPlateau(opt)


def train(net, opt, n, device, crit=nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1)):
    net.train()
    for i in range(n):
        s, t = torch.randint(2, 24000, (20, 100 + 8 * i)), torch.randint(2, 24000, (20, 90 + 4 * i))
        s[:, -10:] = 1
        s, t = s.to(device), t.to(device)
        loss = crit(net(s, t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("train", i, loss.item(), torch.cuda.memory_allocated(device))
    return loss


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    net, opt, sch = make(device)
    sch.step(train(net, opt, 3, device))
    path = os.path.join(tempfile.mkdtemp(), "ckpt.pt")
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sch": sch.state_dict(), "rng": torch.cuda.get_rng_state()}, path)
    print("saved", os.path.getsize(path) // 2**20, "MiB")
    del net, opt, sch
    torch.cuda.empty_cache()
    ck = torch.load(path, map_location=device, weights_only=True)
    net, opt, sch = make(device)
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    sch.load_state_dict(ck["sch"])
    torch.cuda.set_rng_state(ck["rng"].cpu())
    train(net, opt, 3, device)
    os.remove(path)
    net.eval()
    with torch.no_grad():
        s = torch.randint(2, 24000, (8, 60), device=device)
        y = torch.zeros(8, 1, dtype=torch.long, device=device)
        for _ in range(12):
            y = torch.cat([y, net(s, y)[:, -1].topk(5).indices[:, :1]], 1)
    print(y.shape)


main()
