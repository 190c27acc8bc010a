"""Three steps of a small Llama with one option: options.py adapter|optimizer|trainer NAME

`adapter` has a kind of PEFT's adapters, or a variant of LoRA. `optimizer` has a class of
torch.optim, with a switch behind a dash. `trainer` has an option of transformers' Trainer, or a
value of its `optim`.
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

BATCH_SIZE, NUM_TOKENS, NUM_STEPS, VOCABULARY = 4, 128, 3, 2048
ATTENTION = ["q_proj", "v_proj"]
PROMPT = {"num_virtual_tokens": 8}

ADAPTERS = {
    "ADALORA": {"target_modules": ATTENTION, "total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 8, "adapter_layers": 2},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1] * 3, "cpt_tokens_type_mask": [1, 2, 3]},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MULTITASK_PROMPT_TUNING": {**PROMPT, "num_tasks": 2},
    "PREFIX_TUNING": PROMPT,
    "PROMPT_TUNING": PROMPT,
    "P_TUNING": {**PROMPT, "encoder_hidden_size": 64},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3]},
}
"""Arguments of kinds of adapters that need other ones than `target_modules`."""

VARIANTS_OF_LORA = {
    "dora": {"target_modules": ATTENTION, "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "olora": {"target_modules": ATTENTION, "init_lora_weights": "olora"},
    "pissa": {"target_modules": ATTENTION, "init_lora_weights": "pissa_niter_4"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "r": 32},
    "tokens": {"target_modules": ATTENTION, "trainable_token_indices": [1, 2]},
}

TRAINER = {
    "accumulate": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpoint": {"gradient_checkpointing": True},
    "compile": {"torch_compile": True},
    "empty-cache": {"torch_empty_cache_steps": 1},
    "evaluate": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluate-bf16": {
        "eval_strategy": "steps", "eval_steps": 2, "bf16": True, "bf16_full_eval": True,
    },
    "fp16": {"fp16": True},
    "label-smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "no-clipping": {"max_grad_norm": 0.0},
    "plain": {},
    "reentrant": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "save": {"save_strategy": "steps", "save_steps": 2},
    "tf32": {"tf32": True},
}  # fmt: skip


def llama():
    """A Llama of 7 million parameters, on the host."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
        )
    )


def random_ids():
    """A batch of random tokens on the GPU."""
    return torch.randint(0, VOCABULARY, (BATCH_SIZE, NUM_TOKENS), device="cuda")


def adapter(name):
    """Train an adapter with AdamW."""
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS

    variant = VARIANTS_OF_LORA.get(name)
    kind = "LORA" if variant else name
    arguments = variant or ADAPTERS.get(name, {"target_modules": ATTENTION})
    model = get_peft_model(llama().cuda(), CONFIGS[kind](task_type="CAUSAL_LM", **arguments))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    more = {}
    if name == "MULTITASK_PROMPT_TUNING":
        more["task_ids"] = torch.zeros(BATCH_SIZE, dtype=torch.long, device="cuda")
    for _ in range(NUM_STEPS):
        ids = random_ids()
        if name == "CPT":
            more["input_type_mask"] = torch.ones_like(ids) * 4
        mask = torch.ones_like(ids)
        model(input_ids=ids, attention_mask=mask, labels=ids, **more).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer(name):
    """Train all weights with an optimizer of torch."""
    kind, _, switch = name.partition("-")
    model = llama().cuda()
    options = {switch: True} if switch else {}
    if kind == "SGD":
        options["momentum"] = 0.9
    is_muon = kind == "Muon"
    weights = [p for p in model.parameters() if p.ndim == 2 or not is_muon]
    made = getattr(torch.optim, kind)(weights, lr=1e-3, **options)
    for _ in range(NUM_STEPS):
        ids = random_ids()

        def closure(ids=ids):
            made.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        if kind == "LBFGS":
            made.step(closure)
        else:
            closure()
            made.step()


class Tokens(Dataset):
    """Counting tokens, which are their own labels."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(NUM_TOKENS) % VOCABULARY
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def trainer(name):
    """Train with the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        options = {"save_strategy": "no", **TRAINER.get(name, {"optim": name})}
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=NUM_STEPS,
            report_to=[],
            **options,
        )
        data = Tokens()
        Trainer(model=llama(), args=arguments, train_dataset=data, eval_dataset=data).train()


{"adapter": adapter, "optimizer": optimizer, "trainer": trainer}[sys.argv[1]](sys.argv[2])
