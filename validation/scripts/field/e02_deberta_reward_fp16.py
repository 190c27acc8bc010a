"""
Pairwise reward model on a DeBERTa-v3-base shaped encoder, fp16 autocast + GradScaler.
Phase 1: only head + top 4 layers.  Phase 2: everything unfrozen, optimiser rebuilt.
"""
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification


def seed_all(s):
    np.random.seed(s)
    torch.manual_seed(s)


class Preferences(Dataset):
    def __init__(self, n, vocab):
        self.n, self.vocab = n, vocab

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = np.random.RandomState(i)
        prompt = rng.randint(10, self.vocab, size=rng.randint(20, 150))
        a = rng.randint(10, self.vocab, size=rng.randint(20, 300))
        b = rng.randint(10, self.vocab, size=rng.randint(20, 300))
        return np.concatenate([prompt, a])[:384], np.concatenate([prompt, b])[:384]


def collate(rows):
    flat = [r[0] for r in rows] + [r[1] for r in rows]
    width = max(map(len, flat))
    ids = np.zeros((len(flat), width), dtype=np.int64)
    for k, r in enumerate(flat):
        ids[k, : len(r)] = r
    ids = torch.from_numpy(ids)
    return ids, (ids != 0).long()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def run_phase(name, model, opt, scaler, loader, steps, device):
    model.train()
    it = iter(loader)
    for k in range(steps):
        ids, mask = (t.to(device) for t in next(it))
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            r = model(input_ids=ids, attention_mask=mask).logits.squeeze(-1)
        good, bad = r.float().chunk(2)
        loss = -F.logsigmoid(good - bad).mean() + 0.001 * (r.float() ** 2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(trainable(model), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        print(name, k, tuple(ids.shape), f"{loss.item():.4f}", f"scale={scaler.get_scale():.0f}",
              torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def main():
    seed_all(77)
    device = torch.device("cuda")
    cfg = DebertaV2Config(
        vocab_size=128100, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        max_position_embeddings=512, relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False, num_labels=1,
        pooler_hidden_size=768,
    )
    model = DebertaV2ForSequenceClassification(cfg).to(device)
    loader = DataLoader(Preferences(400, cfg.vocab_size), batch_size=10, shuffle=True, collate_fn=collate)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 14)

    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    model.pooler.requires_grad_(True)
    for layer in model.deberta.encoder.layer[-4:]:
        layer.requires_grad_(True)
    opt = torch.optim.AdamW(trainable(model), lr=3e-5)
    run_phase("head+top4", model, opt, scaler, loader, 3, device)

    del opt
    torch.cuda.reset_peak_memory_stats()
    model.requires_grad_(True)
    opt = torch.optim.AdamW(trainable(model), lr=1e-5, weight_decay=0.01)
    run_phase("full", model, opt, scaler, loader, 3, device)

    model.eval()
    scores = []
    with torch.inference_mode():
        for j, (ids, mask) in enumerate(loader):
            if j == 3:
                break
            with torch.autocast("cuda", dtype=torch.float16):
                scores.append(model(ids.to(device), mask.to(device)).logits)
    s = torch.cat(scores).float()
    print("eval mean", s.mean().item(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
