"""TRL's trainers on a small Llama. trl_training.py sft|sft-packed|sft-lora|dpo|dpo-lora"""

import random
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

generator = random.Random(0)
words = [
    "".join(generator.choice("abcdefghij") for _ in range(generator.randint(2, 8)))
    for _ in range(800)
]


def sentence(num_words):
    """So many words, drawn at random."""
    return " ".join(generator.choice(words) for _ in range(num_words))


bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
bpe.train_from_iterator(
    (sentence(40) for _ in range(200)),
    trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bpe, bos_token="</s>", eos_token="</s>", pad_token="<pad>"
)
mode = sys.argv[1]
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=10,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
    )
)
arguments = {
    "output_dir": tempfile.mkdtemp(),
    "max_steps": 5,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "bf16": True,
}
lora = None
if "lora" in mode:
    from peft import LoraConfig

    lora = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
if mode.startswith("sft"):
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": sentence(generator.randint(40, 200))} for _ in range(160)]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(max_length=512, packing="packed" in mode, **arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
else:
    from trl import DPOConfig, DPOTrainer

    rows = [
        {
            "prompt": sentence(20),
            "chosen": sentence(generator.randint(20, 60)),
            "rejected": sentence(generator.randint(20, 60)),
        }
        for _ in range(80)
    ]
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(max_length=256, **arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
trainer.train()
