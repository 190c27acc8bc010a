import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, MixtralConfig, get_linear_schedule_with_warmup


def main():
    set_seed(99)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)

    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        max_position_embeddings=2048,
        sliding_window=None,
    )
    with accelerator.device:
        model = AutoModelForCausalLM.from_config(config)
    accelerator.print(f"{model.num_parameters() / 1e6:.0f}M parameters")

    tokens = torch.randint(0, config.vocab_size, (200, 1024))
    loader = DataLoader(TensorDataset(tokens), batch_size=10, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, foreach=False)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 50)

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    model.train()
    done = 0
    with tempfile.TemporaryDirectory() as tmp:
        for batch_idx, (ids,) in enumerate(loader):
            with accelerator.accumulate(model):
                out = model(input_ids=ids, labels=ids, use_cache=False)
                accelerator.backward(out.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                accelerator.print(
                    f"step {done} loss {out.loss.item():.4f} aux {out.aux_loss.item():.4f} "
                    f"max_alloc {torch.cuda.max_memory_allocated()} max_res {torch.cuda.max_memory_reserved()}"
                )
                if done == 2:
                    # simulate preemption: dump the state, read it back, carry on
                    path = os.path.join(tmp, "state.pt")
                    torch.save(
                        {
                            "model": accelerator.unwrap_model(model).state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "scheduler": scheduler.state_dict(),
                        },
                        path,
                    )
                    state = torch.load(path, map_location=accelerator.device)
                    accelerator.unwrap_model(model).load_state_dict(state["model"])
                    optimizer.load_state_dict(state["optimizer"])
                    scheduler.load_state_dict(state["scheduler"])
                    accelerator.print("resumed from", path, torch.cuda.memory_allocated())
                if done == 4:
                    break
    accelerator.print("done", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
