"""CLIP from scratch with accelerate, grad cache-free in-batch negatives, gradient accumulation with an odd tail."""
import math
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPConfig, CLIPModel, get_cosine_schedule_with_warmup


class ImageText(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return {"pixel_values": torch.randn(3, 224, 224, generator=g), "input_ids": torch.randint(1, 49000, (48,), generator=g)}


def main():
    acc = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
    set_seed(1)
    cfg = CLIPConfig(text_config=dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048),
                     vision_config=dict(hidden_size=768, num_hidden_layers=10, num_attention_heads=12, intermediate_size=3072, patch_size=16))
    model = CLIPModel(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), weight_decay=0.2)
    dl = DataLoader(ImageText(32 * 8 + 12), batch_size=32, shuffle=True, drop_last=False)
    sched = get_cosine_schedule_with_warmup(opt, 2, math.ceil(len(dl) / 3))
    model, opt, dl, sched = acc.prepare(model, opt, dl, sched)
    acc.print(len(dl), "batches on", acc.device)
    for i, batch in enumerate(dl):
        with acc.accumulate(model):
            out = model(**batch, return_loss=True)
            acc.backward(out.loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
        acc.print(i, acc.gather(out.loss.detach()).mean().item(), acc.sync_gradients)
    acc.wait_for_everyone()
    state = acc.get_state_dict(model)
    acc.print(len(state))
    acc.end_training()


if __name__ == "__main__":
    main()
