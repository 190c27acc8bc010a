"""Train CLIP (ViT-B/16) from scratch on synthetic image/caption pairs, then zero-shot classify.

Every class has a colour pattern and a "word"; captions mention the word, so the two towers
have something to agree on.
"""
import math
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPConfig, CLIPModel

IMAGE_SIZE = 224
VOCAB = 49408
BOS, EOS = 49406, 49407
CTX = 77
N_CLASSES = 50
BATCH = 96
ACCUM = 2
EPOCHS = 1
N_PAIRS = 1152
N_TEST = 300
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, N_CLASSES, (n,), generator=g)
        self.caption_len = torch.randint(6, 40, (n,), generator=g)
        self.seed = seed
        pg = torch.Generator().manual_seed(0)
        self.patterns = torch.randint(0, 200, (N_CLASSES, 3, 8, 8), generator=pg, dtype=torch.uint8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        c = self.labels[i]
        k = IMAGE_SIZE // 8
        img = self.patterns[c].repeat_interleave(k, 1).repeat_interleave(k, 2)
        img = img + torch.randint(0, 55, img.shape, generator=g, dtype=torch.uint8)
        n = int(self.caption_len[i])
        words = torch.randint(1000, 40000, (n,), generator=g)
        words[n // 2] = 500 + c
        return img, tokenize(words), c


def tokenize(words):
    ids = torch.full((CTX,), EOS)  # CLIP pads with <|endoftext|>
    ids[0] = BOS
    ids[1 : 1 + len(words)] = words
    return ids


def attention_mask(ids):
    # everything up to and including the first EOS
    return ((ids == EOS).cumsum(1) <= 1).long()


class Normalize(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(CLIP_MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(CLIP_STD).view(1, 3, 1, 1))

    def forward(self, x):
        return (x.float().div_(255) - self.mean) / self.std


def build():
    config = CLIPConfig(
        text_config=dict(
            vocab_size=VOCAB, hidden_size=512, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=8, max_position_embeddings=CTX, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=1,
        ),
        vision_config=dict(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
            image_size=IMAGE_SIZE, patch_size=16,
        ),
        projection_dim=512,
        logit_scale_init_value=math.log(1 / 0.07),
    )
    return CLIPModel(config)


@torch.no_grad()
def zero_shot(model, normalize, loader):
    model.eval()
    templates = [[320, 1125, 539, 320], [320, 2390, 1125, 539], [518, 3086, 539, 550]]
    correct = total = 0
    weights = None
    for img, _, label in loader:
        img, label = normalize(img.cuda()), label.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if weights is None:  # prompt ensemble, computed once
                per_template = []
                for t in templates:
                    ids = torch.stack([tokenize(torch.tensor(t + [500 + c])) for c in range(N_CLASSES)]).cuda()
                    out = model(input_ids=ids, attention_mask=attention_mask(ids), pixel_values=img[:1])
                    per_template.append(out.text_embeds)
                weights = F.normalize(torch.stack(per_template).mean(0), dim=-1)
                dummy = ids[:1]
            emb = model(input_ids=dummy, attention_mask=attention_mask(dummy), pixel_values=img).image_embeds
            logits = 100.0 * emb @ weights.t()
        correct += (logits.argmax(-1) == label).sum().item()
        total += label.numel()
    return correct / total


def main():
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = build().cuda()
    normalize = Normalize().cuda()

    exclude = lambda n, p: p.ndim < 2 or "norm" in n or "bias" in n or "logit_scale" in n
    gain = [p for n, p in model.named_parameters() if exclude(n, p)]
    rest = [p for n, p in model.named_parameters() if not exclude(n, p)]
    optimizer = torch.optim.AdamW(
        [{"params": gain, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}],
        lr=5e-4, betas=(0.9, 0.98), eps=1e-6,
    )
    loader = DataLoader(Pairs(N_PAIRS, 1), BATCH, shuffle=True, drop_last=True, num_workers=4, pin_memory=True)
    test = DataLoader(Pairs(N_TEST, 2), 100, num_workers=2)

    for epoch in range(EPOCHS):
        model.train()
        start = time.time()
        for i, (img, ids, _) in enumerate(loader):
            img = normalize(img.cuda(non_blocking=True))
            ids = ids.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(input_ids=ids, attention_mask=attention_mask(ids), pixel_values=img, return_loss=True)
            (out.loss / ACCUM).backward()
            if (i + 1) % ACCUM == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.logit_scale.clamp_(0, math.log(100))
                print(f"[{epoch}:{i + 1}/{len(loader)}] loss {out.loss.item():.4f} scale {model.logit_scale.exp().item():.2f}")
        print(f"epoch {epoch} took {time.time() - start:.1f}s")

    print(f"zero-shot top-1: {100 * zero_shot(model, normalize, test):.2f}%")
    print("max_memory_allocated:", torch.cuda.max_memory_allocated())
    print("max_memory_reserved:", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
