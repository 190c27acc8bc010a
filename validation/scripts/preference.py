"""Preference training: policy, frozen reference, moving average. preference.py f32|amp|fused"""

import copy
import sys

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

mode = sys.argv[1]
device = torch.device("cuda")
policy = GPT2LMHeadModel(GPT2Config(n_layer=6, resid_pdrop=0.0)).to(device)
reference = copy.deepcopy(policy).eval()
for parameter in reference.parameters():
    parameter.requires_grad_(False)
average = torch.optim.swa_utils.AveragedModel(
    policy, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=mode == "fused")


def log_probs(model, ids, mask):
    """The log probability of each row of `ids` under `model`."""
    logits = model(input_ids=ids).logits[:, :-1]
    picked = torch.gather(logits.float().log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2)
    return (picked * mask[:, 1:]).sum(-1)


for step in range(4):
    chosen = torch.randint(0, 50257, (4, 256), device=device)
    rejected = torch.randint(0, 50257, (4, 256), device=device)
    mask = torch.ones_like(chosen)
    both = torch.cat([chosen, rejected])
    both_mask = torch.cat([mask, mask])
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mode == "amp"):
        of_policy = log_probs(policy, both, both_mask)
        with torch.no_grad():
            of_reference = log_probs(reference, both, both_mask)
    policy_chosen, policy_rejected = of_policy.chunk(2)
    reference_chosen, reference_rejected = of_reference.chunk(2)
    loss = -F.logsigmoid(
        0.1 * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    ).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    average.update_parameters(policy)
    print(step, loss.item(), (policy_chosen > policy_rejected).float().mean().item())
