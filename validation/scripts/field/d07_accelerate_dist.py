"""accelerate under torchrun: fp16, accumulation, gather_for_metrics, model summary encoder with contrastive loss."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from transformers import DistilBertConfig, DistilBertModel, get_scheduler


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.a = torch.randint(5, 30000, (n, 192), generator=g)
        self.b = self.a.clone()
        flip = torch.rand(self.b.shape, generator=g) < 0.2
        self.b[flip] = 103

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return {"a": self.a[i], "b": self.b[i]}


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = DistilBertModel(DistilBertConfig(n_layers=6, dim=768, n_heads=12, hidden_dim=3072))
        self.proj = torch.nn.Linear(768, 256)

    def forward(self, ids):
        h = self.bert(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return F.normalize(self.proj(h.mean(1)), dim=-1)


def main():
    set_seed(0)
    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_steps=2,
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=50, gradient_as_bucket_view=True)],
    )
    train = DataLoader(Pairs(512, 0), batch_size=32, shuffle=True)
    val = DataLoader(Pairs(100, 1), batch_size=32)
    model = Encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    sched = get_scheduler("linear", opt, num_warmup_steps=1, num_training_steps=16)
    model, opt, train, val, sched = accelerator.prepare(model, opt, train, val, sched)
    for i, batch in enumerate(train):
        with accelerator.accumulate(model):
            z = model(torch.cat([batch["a"], batch["b"]]))
            za, zb = z.chunk(2)
            logits = za @ zb.t() / 0.05
            target = torch.arange(len(za), device=accelerator.device)
            loss = (F.cross_entropy(logits.float(), target) + F.cross_entropy(logits.t().float(), target)) / 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
        accelerator.print(f"batch {i} loss {loss.item():.4f}")
    model.eval()
    sims = []
    with torch.no_grad():
        for batch in val:
            s = (model(batch["a"]) * model(batch["b"])).sum(-1)
            sims.append(accelerator.gather_for_metrics(s))
    accelerator.print("mean similarity", torch.cat(sims).mean().item(), len(torch.cat(sims)))
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    accelerator.print("tensors", len(state))
    print(f"rank {accelerator.process_index} max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
