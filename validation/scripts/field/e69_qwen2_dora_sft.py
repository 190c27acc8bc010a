# Instruction tuning of a Qwen2-1.5B sized model with DoRA adapters. Plain PyTorch loop.
import random
import time

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen2Config, get_cosine_schedule_with_warmup

seed = 7
torch.manual_seed(seed)
random.seed(seed)

device = "cuda"
vocab_size = 151936
pad_id = 151643
im_start, im_end = 151644, 151645
micro_batch_size = 4
grad_accum = 2
num_steps = 12
sample_every = 6
lr = 2e-4

cfg = Qwen2Config(
    vocab_size=vocab_size,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    pad_token_id=pad_id,
    bos_token_id=im_start,
    eos_token_id=im_end,
)
t0 = time.time()
with torch.device(device):
    model = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16)
print(f"model built in {time.time() - t0:.1f}s, weights {torch.cuda.memory_allocated() / 1e9:.2f} GB")

peft_config = LoraConfig(
    task_type=TaskType.CAUSAL_LM,
    r=16,
    lora_alpha=32,
    lora_dropout=0.0,
    use_dora=True,
    target_modules="all-linear",
)
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()
model.config.use_cache = False


def make_example():
    """prompt + answer, only the answer contributes to the loss"""
    n_prompt = random.randint(40, 200)
    n_answer = random.randint(60, 240)
    prompt = [im_start] + [random.randrange(1000, 120000) for _ in range(n_prompt)] + [im_end]
    answer = [im_start] + [random.randrange(1000, 120000) for _ in range(n_answer)] + [im_end]
    ids = prompt + answer
    labels = [-100] * len(prompt) + answer
    return torch.tensor(ids), torch.tensor(labels)


def collate(batch):
    ids, labels = zip(*batch)
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    mask = torch.zeros_like(input_ids)
    for i, x in enumerate(ids):
        mask[i, : len(x)] = 1
    return dict(input_ids=input_ids, attention_mask=mask, labels=labels)


train_data = [make_example() for _ in range(num_steps * grad_accum * micro_batch_size)]
loader = DataLoader(train_data, batch_size=micro_batch_size, shuffle=True, collate_fn=collate, pin_memory=True)
prompts = torch.randint(1000, 120000, (2, 48), device=device)

trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.0)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=num_steps)


@torch.no_grad()
def sample(step):
    model.eval()
    out = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=16,
        max_new_tokens=16,
        do_sample=True,
        top_p=0.9,
        temperature=0.8,
        use_cache=True,
        pad_token_id=pad_id,
    )
    print(f"[step {step}] sample: {out[0, prompts.shape[1]:].tolist()[:8]} ...")
    model.train()


model.train()
batches = iter(loader)
running = 0.0
for step in range(1, num_steps + 1):
    for _ in range(grad_accum):
        batch = {k: v.to(device, non_blocking=True) for k, v in next(batches).items()}
        out = model(**batch)
        loss = out.loss / grad_accum
        loss.backward()
        running += loss.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)

    if step % 2 == 0:
        print(
            f"step {step:3d} loss {running / 2:.4f} gnorm {grad_norm.item():.3f} "
            f"lr {scheduler.get_last_lr()[0]:.2e} mem {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        )
        running = 0.0
    if step % sample_every == 0:
        sample(step)

print(f"done in {time.time() - t0:.1f}s")
print("torch.cuda.max_memory_allocated():", torch.cuda.max_memory_allocated())
print("torch.cuda.max_memory_reserved(): ", torch.cuda.max_memory_reserved())
