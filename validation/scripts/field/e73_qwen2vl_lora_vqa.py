"""LoRA fine-tuning of a small Qwen2-VL on VQA-style data.

Vision tower frozen, patch merger fully trained, LoRA on the language model. Batches come in two
image sizes (square photos and wide document crops), patchified like Qwen2VLImageProcessor does.
"""
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

DEV = "cuda"
DTYPE = torch.bfloat16
PATCH, MERGE, TEMPORAL = 14, 2, 2
IMAGE_SIZES = [(448, 448), (448, 728)]  # (height, width), multiples of 28
BATCH_SIZE = 4
STEPS = 16
EVAL_EVERY = 8

IM_START, IM_END, PAD = 151644, 151645, 151643
VISION_START, VISION_END, IMAGE_PAD = 151652, 151653, 151655


def build_model():
    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=151936,
            hidden_size=1280,
            intermediate_size=5120,
            num_hidden_layers=20,
            num_attention_heads=10,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
            pad_token_id=PAD,
        ),
        vision_config=dict(depth=20, embed_dim=1024, num_heads=16, hidden_size=1280, mlp_ratio=4),
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(DTYPE)
    with torch.device(DEV):
        model = Qwen2VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    return model


def patchify(images):
    """(B, 3, H, W) -> flattened patches in merge-window order, plus grid_thw"""
    b, c, h, w = images.shape
    gh, gw = h // PATCH, w // PATCH
    x = images.unsqueeze(1).expand(b, TEMPORAL, c, h, w)
    x = x.reshape(b, 1, TEMPORAL, c, gh // MERGE, MERGE, PATCH, gw // MERGE, MERGE, PATCH)
    x = x.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    x = x.reshape(b * gh * gw, c * TEMPORAL * PATCH * PATCH)
    grid = torch.tensor([[1, gh, gw]] * b)
    return x, grid


def make_batch(index, gen):
    h, w = IMAGE_SIZES[index % 2]
    images = torch.rand(BATCH_SIZE, 3, h, w, generator=gen) * 2 - 1
    pixel_values, grid = patchify(images)
    n_img = (h // PATCH // MERGE) * (w // PATCH // MERGE)

    rows, labels = [], []
    for _ in range(BATCH_SIZE):
        n_q = int(torch.randint(12, 40, (1,), generator=gen))
        n_a = int(torch.randint(16, 96, (1,), generator=gen))
        q = torch.randint(100, 100000, (n_q,), generator=gen).tolist()
        a = torch.randint(100, 100000, (n_a,), generator=gen).tolist()
        prompt = [IM_START, VISION_START] + [IMAGE_PAD] * n_img + [VISION_END] + q + [IM_END, IM_START]
        rows.append(prompt + a + [IM_END])
        labels.append([-100] * len(prompt) + a + [IM_END])
    longest = max(map(len, rows))
    input_ids = torch.tensor([r + [PAD] * (longest - len(r)) for r in rows])
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "mm_token_type_ids": (input_ids == IMAGE_PAD).int(),
        "labels": torch.tensor([l + [-100] * (longest - len(l)) for l in labels]),
        "pixel_values": pixel_values.to(DTYPE),
        "image_grid_thw": grid,
    }


def to_device(batch):
    return {k: v.to(DEV, non_blocking=True) for k, v in batch.items()}


@torch.inference_mode()
def evaluate(model, batches):
    model.eval()
    nll, correct, count = 0.0, 0, 0
    for batch in batches:
        out = model(**to_device(batch), use_cache=False)
        nll += out.loss.item()
        pred = out.logits[:, :-1].argmax(-1).cpu()
        target = batch["labels"][:, 1:]
        mask = target != -100
        correct += (pred[mask] == target[mask]).sum().item()
        count += mask.sum().item()
    model.train()
    return nll / len(batches), correct / count


def main():
    torch.manual_seed(3407)
    gen = torch.Generator().manual_seed(3407)

    model = build_model()
    model.requires_grad_(False)
    lora = LoraConfig(
        r=32,
        lora_alpha=64,
        lora_dropout=0.05,
        bias="none",
        target_modules=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    )
    model = get_peft_model(model, lora)
    for name, p in model.named_parameters():
        if "visual.merger" in name:
            p.requires_grad_(True)
    model.print_trainable_parameters()

    lora_params = [p for n, p in model.named_parameters() if p.requires_grad and "lora_" in n]
    merger_params = [p for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    optimizer = torch.optim.AdamW(
        [{"params": lora_params, "lr": 2e-4}, {"params": merger_params, "lr": 2e-5}],
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    val_batches = [make_batch(i, gen) for i in range(2)]

    model.train()
    for step in range(STEPS):
        batch = to_device(make_batch(step, gen))
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lora_params + merger_params, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step < 2 or step % 4 == 3:
            print(f"step {step:02d} seq {batch['input_ids'].shape[1]} patches {batch['pixel_values'].shape[0]} "
                  f"loss {loss.item():.4f} | {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
        if (step + 1) % EVAL_EVERY == 0:
            val_loss, acc = evaluate(model, val_batches)
            print(f"  val loss {val_loss:.4f} acc {acc:.4f}")

    print(f"peak allocated: {torch.cuda.max_memory_allocated()}")
    print(f"peak reserved:  {torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
