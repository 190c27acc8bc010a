"""A ViT under ZeRO-1 in fp16 with a client optimizer of torch, no_sync by hand, a moving average of the weights and evaluation."""
import copy

import deepspeed
import torch
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

config = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 3,
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 20_000_000, "allgather_bucket_size": 20_000_000},
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
}
torch.manual_seed(3)
model = ViTForImageClassification(ViTConfig(num_hidden_layers=12, num_labels=100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
average = copy.deepcopy(engine.module).eval()
for step in range(9):
    images = torch.randn(16, 3, 224, 224, device=engine.device, dtype=torch.half)
    labels = torch.randint(0, 100, (16,), device=engine.device)
    logits = engine(pixel_values=images).logits
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
    engine.backward(loss)
    engine.step()
    if engine.is_gradient_accumulation_boundary():
        with torch.no_grad():
            for kept, new in zip(average.parameters(), engine.module.parameters()):
                kept.lerp_(new, 0.1)
with torch.no_grad():
    for _ in range(2):
        right = average(pixel_values=torch.randn(32, 3, 224, 224, device=engine.device, dtype=torch.half)).logits.argmax(-1)
total = torch.tensor(float(right.numel()), device=engine.device)
torch.distributed.all_reduce(total)
print(int(total), torch.cuda.max_memory_allocated() >> 20)
