import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

torch.manual_seed(0)
teacher = BertForSequenceClassification(BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                                                   intermediate_size=4096, num_labels=77)).half().cuda().eval()
for p in teacher.parameters():
    p.requires_grad = False
student = BertForSequenceClassification(BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
                                                   intermediate_size=1536, num_labels=77)).cuda()
student.train()
adapter = torch.nn.Linear(384, 1024).cuda()

params = list(student.parameters()) + list(adapter.parameters())
optimizer = torch.optim.AdamW(params, lr=5e-4, fused=True)
total = 6
scheduler = get_linear_schedule_with_warmup(optimizer, 1, total)
temp, alpha = 2.0, 0.5

for it in range(total):
    lens = torch.randint(40, 129, (64,))
    ids = torch.randint(1000, 30000, (64, 128))
    mask = (torch.arange(128)[None] < lens[:, None]).long()
    labels = torch.randint(0, 77, (64,))
    ids, mask, labels = ids.cuda(), mask.cuda(), labels.cuda()
    with torch.no_grad():
        t = teacher(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        s = student(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
        hid = 0
        for i, h in enumerate(s.hidden_states[1:]):
            hid = hid + F.mse_loss(adapter(h), t.hidden_states[(i + 1) * 4].to(torch.bfloat16))
    kd = F.kl_div(F.log_softmax(s.logits.float() / temp, -1), F.softmax(t.logits.float() / temp, -1),
                  reduction="batchmean") * temp**2
    loss = alpha * kd + (1 - alpha) * s.loss + 0.01 * hid
    loss.backward()
    gn = torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"it {it} loss {loss.item():.3f} kd {kd.item():.3f} gradnorm {float(gn):.3f}")
    del t, s, hid
print(torch.cuda.memory_summary(abbreviated=True))
