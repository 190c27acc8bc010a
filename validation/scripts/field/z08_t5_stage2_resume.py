"""T5 under ZeRO-2 in bf16: a checkpoint is written and read again, then training goes on with cosine warm-up."""
import sys

import deepspeed
import torch
from transformers import T5Config, T5ForConditionalGeneration

stage = int(sys.argv[1]) if len(sys.argv) > 1 else 2
config = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.98]}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": stage, "contiguous_gradients": True, "round_robin_gradients": stage == 2},
    "activation_checkpointing": {"partition_activations": False},
    "gradient_clipping": 1.0,
}


def make():
    torch.manual_seed(5)
    return T5ForConditionalGeneration(T5Config(
        d_model=768, d_ff=2048, d_kv=64, num_heads=12, num_layers=8, vocab_size=24000, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    ))


def train(engine, steps):
    for _ in range(steps):
        ids = torch.randint(0, 24000, (4, 256), device=engine.device)
        labels = torch.randint(0, 24000, (4, 96), device=engine.device)
        loss = engine(input_ids=ids, labels=labels).loss
        engine.backward(loss)
        engine.step()
    return loss


engine, *_ = deepspeed.initialize(model=make(), config=config)
train(engine, 4)
engine.save_checkpoint("t5-ds", tag="one")
torch.distributed.barrier()
engine.load_checkpoint("t5-ds", tag="one")
loss = train(engine, 4)
print(loss.item(), torch.cuda.max_memory_allocated() >> 20)
