"""Find the largest batch that fits (capped at 25% of the GPU), then train with it."""
import gc

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SEQ = 512
START_BATCH = 256
TRAIN_STEPS = 4

torch.manual_seed(123)
torch.cuda.manual_seed_all(123)
torch.cuda.set_per_process_memory_fraction(0.25)
device = torch.device("cuda")


def new_model():
    cfg = GPT2Config(vocab_size=50257, n_positions=SEQ, n_embd=768, n_layer=12, n_head=12, use_cache=False)
    model = GPT2LMHeadModel(cfg).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    return model, optimizer


def train_step(model, optimizer, batch_size):
    ids = torch.randint(0, 50257, (batch_size, SEQ), device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def report(tag):
    print(f"{tag}: alloc {torch.cuda.memory_allocated()} max_alloc {torch.cuda.max_memory_allocated()} "
          f"max_reserved {torch.cuda.max_memory_reserved()}", flush=True)


def find_batch_size(model, optimizer, start):
    batch_size = start
    while batch_size >= 1:
        oom = False
        try:
            for _ in range(2):      # second step also has the optimizer state in place
                train_step(model, optimizer, batch_size)
        except torch.cuda.OutOfMemoryError as e:
            print("OOM at batch", batch_size, "-", str(e).split(".")[0])
            oom = True
        # leave the except block first, so that the traceback does not hold the activations
        if not oom:
            report(f"batch {batch_size} fits")
            return batch_size
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        report(f"after cleanup of batch {batch_size}")
        batch_size //= 2
    raise RuntimeError("even batch size 1 does not fit")


model, optimizer = new_model()
report("model ready")
best = find_batch_size(model, optimizer, START_BATCH)
print("using batch size", best)

for step in range(TRAIN_STEPS):
    loss = train_step(model, optimizer, best)
    report(f"step {step} loss {loss:.4f}")

print("batch", best)
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
