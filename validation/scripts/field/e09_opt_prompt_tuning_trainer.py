import shutil
import tempfile

import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    OPTConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

set_seed(3)

# OPT-1.3B shape, fewer layers
config = OPTConfig(
    hidden_size=2048,
    ffn_dim=8192,
    num_hidden_layers=18,
    num_attention_heads=32,
    word_embed_proj_dim=2048,
    vocab_size=50272,
    max_position_embeddings=1024,
    do_layer_norm_before=True,
)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

model = get_peft_model(
    model, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=32, token_dim=2048,
                              num_transformer_submodules=1, num_attention_heads=32, num_layers=18)
)
model.print_trainable_parameters()


def example(n):
    ids = torch.randint(4, config.vocab_size, (480,))
    ids[n:] = 1
    mask = (torch.arange(480) < n).long()
    labels = torch.where(mask.bool(), ids, torch.tensor(-100))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


train = [example(int(n)) for n in torch.randint(200, 481, (160,))]
evals = [example(int(n)) for n in torch.randint(200, 481, (16,))]

out = tempfile.mkdtemp()


class VerboseTrainer(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print(f"  loss={loss.item():.4f} alloc={torch.cuda.max_memory_allocated()} "
              f"reserved={torch.cuda.max_memory_reserved()}")
        return loss


trainer = VerboseTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_steps=5,
        learning_rate=3e-2,
        lr_scheduler_type="cosine",
        optim="sgd",
        optim_args="momentum=0.9",
        bf16=True,
        prediction_loss_only=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        label_names=["labels"],
    ),
    train_dataset=train,
    eval_dataset=evals,
    data_collator=default_data_collator,
)
trainer.train()
print(trainer.evaluate())

model.eval()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    prompt = torch.stack([e["input_ids"][:64] for e in evals[:4]]).cuda()
    gen = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
print("generated", gen.shape)
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
shutil.rmtree(out, ignore_errors=True)
