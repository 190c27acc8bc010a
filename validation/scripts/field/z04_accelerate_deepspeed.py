"""accelerate with a DeepSpeedPlugin: z04_accelerate_deepspeed.py STAGE"""
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

stage = int(sys.argv[1])
plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0)
accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
torch.manual_seed(1)
model = BertForSequenceClassification(BertConfig(num_hidden_layers=12))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
ids = torch.randint(0, 30000, (128, 256))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, torch.randint(0, 2, (128,))), batch_size=8, shuffle=True)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, 20)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
for x, y in data:
    with accelerator.accumulate(model):
        loss = model(input_ids=x, labels=y).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
losses = accelerator.gather(loss.detach())
accelerator.print(losses, torch.cuda.max_memory_allocated() >> 20)
