"""GPT-2 on batches whose shapes change from step to step. lengths.py STEPS f32|amp"""

import random
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

generator = random.Random(0)
num_steps = int(sys.argv[1])
is_amp = sys.argv[2] == "amp"
model = GPT2LMHeadModel(GPT2Config()).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(num_steps):
    ids = torch.randint(0, 50257, (generator.randint(2, 8), generator.randint(64, 700))).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_amp):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
