"""BLIP-2 with adapters: LoRA on q and v of the language model, over a whole or a 4-bit base.

fine_tune_lora.py [KEY=VALUE ...]        the keys are those of `cfg`
"""

import torch
from fine_tune import Captioner, cfg, main
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, Blip2ForConditionalGeneration

cfg |= {
    "model_name": "Salesforce/blip2-flan-t5-xxl",
    "batch_size": 32,
    "accumulate_grad_batches": 2,
    "use_lora": True,
    "use_qlora": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
}


class Adapted(Captioner):
    """Only the adapters are trained."""

    def load(self):
        if cfg["use_qlora"]:
            four_bit = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
            base = Blip2ForConditionalGeneration.from_pretrained(
                cfg["model_name"], quantization_config=four_bit
            )
            base = prepare_model_for_kbit_training(base)
        else:
            dtype = torch.bfloat16 if cfg["precision"] == "bf16-true" else torch.float32
            base = Blip2ForConditionalGeneration.from_pretrained(cfg["model_name"], dtype=dtype)
        adapters = LoraConfig(
            r=cfg["lora_r"],
            lora_alpha=cfg["lora_alpha"],
            lora_dropout=cfg["lora_dropout"],
            target_modules=["q", "v"],
            bias="none",
        )
        return get_peft_model(base, adapters)


if __name__ == "__main__":
    main(Adapted)
