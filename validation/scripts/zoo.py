"""Three steps of one of transformers' architectures, small. zoo.py NAME f32|amp|bf16"""

import sys

import torch
import transformers as T

VOCABULARY = 8000
TEXT = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
}
ENCODER = {**TEXT, "intermediate_size": 2048}
DECODER = {**TEXT, "intermediate_size": 1376}
VISION = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}
GROUPED = {"num_key_value_heads": 4, "head_dim": 64}


def ids(num_rows, num_tokens):
    """Random tokens on the card."""
    return torch.randint(10, VOCABULARY, (num_rows, num_tokens)).cuda()


def classes(num_rows):
    """A label of two for each row."""
    return torch.randint(0, 2, (num_rows,)).cuda()


def text(num_rows=4, num_tokens=256):
    """Tokens that are their own labels."""
    tokens = ids(num_rows, num_tokens)
    return {"input_ids": tokens, "labels": tokens.clone()}


def classified(num_rows=8, num_tokens=200):
    """Tokens, the first row padded, with a class each."""
    tokens = ids(num_rows, num_tokens)
    mask = torch.ones_like(tokens)
    mask[0, -20:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": classes(num_rows)}


def images(num_rows=16, size=224):
    """Pictures with a class each."""
    pixels = torch.randn(num_rows, 3, size, size).cuda()
    return {"pixel_values": pixels, "labels": classes(num_rows)}


def translated():
    """Tokens, and others as labels."""
    return {"input_ids": ids(8, 200), "labels": ids(8, 60)}


MODELS = {
    "bert": (lambda: T.BertForSequenceClassification(T.BertConfig(**ENCODER)), classified),
    "mlm": (lambda: T.RobertaForMaskedLM(T.RobertaConfig(**ENCODER)), lambda: text(8, 200)),
    "distil": (
        lambda: T.DistilBertForSequenceClassification(
            T.DistilBertConfig(
                dim=512, hidden_dim=2048, n_layers=4, n_heads=8, vocab_size=VOCABULARY
            )
        ),
        classified,
    ),
    "deberta": (
        lambda: T.DebertaV2ForSequenceClassification(
            T.DebertaV2Config(
                **ENCODER,
                relative_attention=True,
                position_buckets=64,
                pos_att_type=["p2c", "c2p"],
                norm_rel_ebd="layer_norm",
            )
        ),
        classified,
    ),
    "electra": (lambda: T.ElectraForSequenceClassification(T.ElectraConfig(**ENCODER)), classified),
    "albert": (lambda: T.AlbertForSequenceClassification(T.AlbertConfig(**ENCODER)), classified),
    "bart": (
        lambda: T.BartForConditionalGeneration(
            T.BartConfig(
                vocab_size=VOCABULARY,
                d_model=512,
                encoder_layers=3,
                decoder_layers=3,
                encoder_ffn_dim=2048,
                decoder_ffn_dim=2048,
                encoder_attention_heads=8,
                decoder_attention_heads=8,
            )
        ),
        translated,
    ),
    "whisper": (
        lambda: T.WhisperForConditionalGeneration(
            T.WhisperConfig(
                vocab_size=VOCABULARY,
                d_model=384,
                encoder_layers=4,
                decoder_layers=4,
                encoder_attention_heads=6,
                decoder_attention_heads=6,
                encoder_ffn_dim=1536,
                decoder_ffn_dim=1536,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=3,
                suppress_tokens=None,
                begin_suppress_tokens=None,
            )
        ),
        lambda: {"input_features": torch.randn(4, 80, 3000).cuda(), "labels": ids(4, 60)},
    ),
    "wav2vec2": (
        lambda: T.Wav2Vec2ForSequenceClassification(
            T.Wav2Vec2Config(**VISION, apply_spec_augment=False)
        ),
        lambda: {"input_values": torch.randn(4, 32000).cuda(), "labels": classes(4)},
    ),
    "vit": (lambda: T.ViTForImageClassification(T.ViTConfig(**VISION)), images),
    "deit": (lambda: T.BeitForImageClassification(T.BeitConfig(**VISION)), images),
    "clip": (
        lambda: T.CLIPModel(T.CLIPConfig(text_config=dict(ENCODER), vision_config=dict(VISION))),
        lambda: {
            "input_ids": ids(16, 60),
            "pixel_values": torch.randn(16, 3, 224, 224).cuda(),
            "return_loss": True,
        },
    ),
    "opt": (
        lambda: T.OPTForCausalLM(
            T.OPTConfig(
                vocab_size=VOCABULARY,
                hidden_size=512,
                ffn_dim=2048,
                num_hidden_layers=4,
                num_attention_heads=8,
                word_embed_proj_dim=512,
            )
        ),
        text,
    ),
    "bloom": (
        lambda: T.BloomForCausalLM(
            T.BloomConfig(vocab_size=VOCABULARY, hidden_size=512, n_layer=4, n_head=8)
        ),
        text,
    ),
    "falcon": (lambda: T.FalconForCausalLM(T.FalconConfig(**TEXT)), text),
    "neox": (lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**ENCODER)), text),
    "gptj": (
        lambda: T.GPTJForCausalLM(
            T.GPTJConfig(vocab_size=VOCABULARY, n_embd=512, n_layer=4, n_head=8, rotary_dim=32)
        ),
        text,
    ),
    "phi": (lambda: T.PhiForCausalLM(T.PhiConfig(**DECODER)), text),
    "gemma2": (lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**DECODER, **GROUPED)), text),
    "gemma3": (
        lambda: T.Gemma3ForCausalLM(T.Gemma3TextConfig(**DECODER, **GROUPED, sliding_window=128)),
        text,
    ),
    "mistral": (
        lambda: T.MistralForCausalLM(
            T.MistralConfig(**DECODER, num_key_value_heads=4, sliding_window=128)
        ),
        text,
    ),
    "mixtral": (
        lambda: T.MixtralForCausalLM(
            T.MixtralConfig(**DECODER, num_key_value_heads=4, num_local_experts=4)
        ),
        text,
    ),
    "qwen3": (lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**DECODER, **GROUPED)), text),
    "qwen3moe": (
        lambda: T.Qwen3MoeForCausalLM(
            T.Qwen3MoeConfig(
                **DECODER,
                **GROUPED,
                moe_intermediate_size=256,
                num_experts=8,
                num_experts_per_tok=2,
            )
        ),
        text,
    ),
    "mamba": (
        lambda: T.MambaForCausalLM(
            T.MambaConfig(vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=2)
        ),
        lambda: text(2, 64),
    ),
    "gpt2cls": (
        lambda: T.GPT2ForSequenceClassification(
            T.GPT2Config(vocab_size=VOCABULARY, n_embd=512, n_layer=4, n_head=8, pad_token_id=0)
        ),
        lambda: {"input_ids": ids(8, 128), "labels": classes(8)},
    ),
    "qa": (
        lambda: T.BertForQuestionAnswering(T.BertConfig(**ENCODER)),
        lambda: {
            "input_ids": ids(8, 200),
            "start_positions": torch.randint(0, 200, (8,)).cuda(),
            "end_positions": torch.randint(0, 200, (8,)).cuda(),
        },
    ),
    "token": (
        lambda: T.BertForTokenClassification(T.BertConfig(**ENCODER)),
        lambda: {"input_ids": ids(8, 200), "labels": torch.randint(0, 2, (8, 200)).cuda()},
    ),
    "segformer": (
        lambda: T.SegformerForSemanticSegmentation(T.SegformerConfig(num_labels=10)),
        lambda: {
            "pixel_values": torch.randn(4, 3, 256, 256).cuda(),
            "labels": torch.randint(0, 10, (4, 256, 256)).cuda(),
        },
    ),
    "videomae": (
        lambda: T.VideoMAEForVideoClassification(
            T.VideoMAEConfig(
                hidden_size=384,
                num_hidden_layers=3,
                num_attention_heads=6,
                intermediate_size=1536,
            )
        ),
        lambda: {"pixel_values": torch.randn(2, 16, 3, 224, 224).cuda(), "labels": classes(2)},
    ),
}

name, precision = sys.argv[1:3]
make, batch_of = MODELS[name]
model = make().cuda().train()
if precision == "bf16":
    model = model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(3):
    batch = batch_of()
    if precision == "bf16":
        batch = {
            k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in batch.items()
        }
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "amp"):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
