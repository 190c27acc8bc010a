import argparse, shutil, random
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, TrainerCallback, set_seed

p = argparse.ArgumentParser()
p.add_argument("--optim", default="adamw_torch")
p.add_argument("--accum", type=int, default=3)
p.add_argument("--resume", action="store_true")
a = p.parse_args()
set_seed(0)
rnd = random.Random(0)
rows = [{"input_ids": [rnd.randrange(5, 31999) for _ in range(rnd.randint(64, 700))]} for _ in range(80)]


def collator(batch):
    n = max(len(b["input_ids"]) for b in batch)
    ids = torch.zeros(len(batch), n, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, b in enumerate(batch):
        ids[i, :len(b["input_ids"])] = torch.tensor(b["input_ids"])
        mask[i, :len(b["input_ids"])] = 1
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


class MemoryCallback(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("step", state.global_step, torch.cuda.max_memory_allocated() // 2**20, torch.cuda.memory_reserved() // 2**20)


def build():
    return LlamaForCausalLM(LlamaConfig(hidden_size=1280, intermediate_size=3456, num_hidden_layers=12, num_attention_heads=20,
                                        num_key_value_heads=10, vocab_size=32000, pad_token_id=0))


out = "/tmp/memest_out/llama"
shutil.rmtree(out, ignore_errors=True)
kw = dict(output_dir=out, per_device_train_batch_size=4, gradient_accumulation_steps=a.accum, bf16=True, tf32=True, gradient_checkpointing=True,
          optim=a.optim, logging_steps=2, save_steps=3, save_total_limit=1, report_to="none", warmup_steps=2, weight_decay=0.1,
          train_sampling_strategy="group_by_length", max_grad_norm=0.5, lr_scheduler_type="cosine", remove_unused_columns=False)
try:
    args = TrainingArguments(max_steps=3 if a.resume else 6, **kw)
except TypeError:
    kw.pop("train_sampling_strategy")
    args = TrainingArguments(max_steps=3 if a.resume else 6, **kw)
trainer = Trainer(model=build(), args=args, train_dataset=rows, data_collator=collator, callbacks=[MemoryCallback()])
trainer.train()
if a.resume:
    del trainer
    torch.cuda.empty_cache()
    trainer = Trainer(model=build(), args=TrainingArguments(max_steps=6, **kw), train_dataset=rows, data_collator=collator, callbacks=[MemoryCallback()])
    trainer.train(resume_from_checkpoint=True)
shutil.rmtree(out, ignore_errors=True)
