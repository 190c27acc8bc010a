"""Fine-tunes of the sizes that recipes use on GPUs of 80 GB: `realistic.py NAME [STEPS]`, as `unseen.py`."""
import torch, torch.nn as nn, torch.nn.functional as F
from fresh import lm, tf32
from unseen import BF, FP, NAME, amp, classify, dev, fused, hf, ids, img, lab, loop, scaler, sgd, tm, tv
O = torch.optim
LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

def low(cls, cfg, **kw):
    torch.set_default_dtype(BF); m = hf(cls, cfg, **kw); torch.set_default_dtype(torch.float32)
    return m
def lora(m, r=16, on=ALL, ckpt=False):
    from peft import LoraConfig, get_peft_model
    if ckpt: m.gradient_checkpointing_enable(); m.enable_input_require_grads()
    return get_peft_model(m, LoraConfig(r=r, lora_alpha=2 * r, lora_dropout=0.05, target_modules=on))
def padded(b, t): mask = torch.ones(b, t, device=dev, dtype=torch.long); mask[: b // 2, t - t // 4 :] = 0; return mask
def seq2seq(m, b, t, made, v, dt=BF, **kw):
    mask = padded(b, t)
    def s():
        with amp(dt): return m(input_ids=ids(b, t, v), attention_mask=mask, labels=ids(b, made, v)).loss
    loop(m, s, clip=1.0, **kw)
def encoder(m, b, t, v, dt=None, qa=False, **kw):
    mask = padded(b, t)
    def s():
        given = dict(start_positions=lab(b, t), end_positions=lab(b, t)) if qa else dict(labels=lab(b, 3))
        with torch.autocast("cuda", dtype=dt or BF, enabled=dt is not None): return m(input_ids=ids(b, t, v), attention_mask=mask, **given).loss
    loop(m, s, clip=1.0, **kw)

def hf_llama1b_bf16():
    m = low("LlamaForCausalLM", "LlamaConfig", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True)
    lm(m, 4, 2048, 128000, opt=fused(m), clip=1.0)
def peft_qwen15b_accum():
    m = low("Qwen2ForCausalLM", "Qwen2Config", hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960, vocab_size=151936, tie_word_embeddings=True)
    lm(lora(m), 4, 1024, 151000, BF, accum=4, clip=1.0)
def peft_gemma2b_ckpt():
    m = low("Gemma2ForCausalLM", "Gemma2Config", hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256, intermediate_size=9216, vocab_size=256000, attn_implementation="eager")
    lm(lora(m, 8, ckpt=True), 4, 1024, 255000, BF, clip=1.0)
def hf_tinyllama_accum(): lm(hf("LlamaForCausalLM", "LlamaConfig", hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, intermediate_size=5632, vocab_size=32000), 4, 2048, 32000, BF, accum=4, clip=1.0)
def peft_mistral7b_ckpt():
    m = low("MistralForCausalLM", "MistralConfig", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=32000, sliding_window=None)
    lm(lora(m, on=["q_proj", "v_proj"], ckpt=True), 4, 2048, 32000, BF, clip=1.0)
def hf_t5_large_bf16(): seq2seq(hf("T5ForConditionalGeneration", "T5Config", d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, vocab_size=32128, decoder_start_token_id=0), 16, 512, 128, 32000)
def hf_bart_large_f16(): seq2seq(hf("BartForConditionalGeneration", "BartConfig"), 16, 1024, 128, 50000, FP, scaler=scaler())
def hf_pegasus_large_ckpt():
    m = hf("PegasusForConditionalGeneration", "PegasusConfig", d_model=1024, encoder_layers=16, decoder_layers=16, encoder_attention_heads=16, decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096, vocab_size=96103)
    m.gradient_checkpointing_enable(); seq2seq(m, 16, 512, 64, 96000, opt=O.Adafactor(m.parameters(), lr=1e-4))
def hf_bert_large_f16(): encoder(hf("BertForQuestionAnswering", "BertConfig", **LARGE), 32, 384, 30000, FP, qa=True, scaler=scaler())
def hf_roberta_large_tf32(): tf32(); encoder(hf("RobertaForSequenceClassification", "RobertaConfig", **LARGE, vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, num_labels=3), 32, 256, 50000)
def hf_deberta_large_bf16(): encoder(hf("DebertaV2ForSequenceClassification", "DebertaV2Config", **LARGE, vocab_size=128100, type_vocab_size=0, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False, pooler_hidden_size=1024, num_labels=3), 16, 256, 128000, BF)
def hf_gpt2_large_fp32(): lm(hf("GPT2LMHeadModel", "GPT2Config", n_embd=1280, n_layer=36, n_head=20), 4, 1024, 50000, clip=1.0)
def compiled_lm(m, b, t, v):
    c = torch.compile(m)
    def s():
        x = ids(b, t, v)
        with amp(): return c(input_ids=x, labels=x, use_cache=False).loss
    loop(m, s, opt=fused(m), clip=1.0)
def hf_gpt2_medium_compiled(): compiled_lm(hf("GPT2LMHeadModel", "GPT2Config", n_embd=1024, n_layer=24, n_head=16), 16, 1024, 50000)
def hf_qwen05b_compiled(): compiled_lm(hf("Qwen2ForCausalLM", "Qwen2Config", hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True), 8, 1024, 151000)
def hf_whisper_small_ckpt():
    m = hf("WhisperForConditionalGeneration", "WhisperConfig", d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)
    m.gradient_checkpointing_enable()
    def s():
        with amp(FP): return m(input_features=torch.randn(16, 80, 3000, device=dev), labels=ids(16, 128, 50000), use_cache=False).loss
    loop(m, s, scaler=scaler(), clip=1.0)
def hf_wav2vec2_large_accum():
    m = hf("Wav2Vec2ForCTC", "Wav2Vec2Config", **LARGE, feat_extract_norm="layer", conv_bias=True, do_stable_layer_norm=True, vocab_size=40, layerdrop=0.0, attention_dropout=0.0, hidden_dropout=0.0, feat_proj_dropout=0.0, ctc_loss_reduction="mean")
    m.freeze_feature_encoder(); m.gradient_checkpointing_enable()
    def s():
        with amp(FP): return m(input_values=torch.randn(16, 80000, device=dev), labels=ids(16, 60, 39)).loss
    loop(m, s, scaler=scaler(), accum=2, clip=1.0)
def peft_blip2_bf16():
    m = lora(low("Blip2ForConditionalGeneration", "Blip2Config", text_config=dict(model_type="opt", hidden_size=2560, num_hidden_layers=32, num_attention_heads=32, ffn_dim=10240, word_embed_proj_dim=2560, vocab_size=50304), image_token_index=50265), on=["q_proj", "k_proj"])
    def s():
        x = ids(16, 96, 50000); x[:, :32] = 50265
        with amp(): return m(pixel_values=img(16, 224).to(BF), input_ids=x, attention_mask=torch.ones_like(x), labels=x).loss
    loop(m, s)
def timm_vit_large_bf16(): m = tm("vit_large_patch16_224"); classify(m, 128, 224, BF, opt=fused(m), clip=1.0)
def hf_clip_large_ckpt():
    m = hf("CLIPModel", "CLIPConfig", projection_dim=768, text_config=dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, projection_dim=768), vision_config=LARGE | dict(patch_size=14, projection_dim=768))
    m.gradient_checkpointing_enable()
    def s():
        with amp(): return m(input_ids=ids(128, 77, 49000), pixel_values=img(128, 224), return_loss=True).loss
    loop(m, s, clip=1.0)
def timm_swin_base_f16(): classify(tm("swin_base_patch4_window7_224", drop_path_rate=0.2), 128, 224, FP, scaler=scaler(), clip=5.0)
def timm_convnext_base_accum(): classify(tm("convnext_base", drop_path_rate=0.2), 64, 224, BF, True, accum=2)
def tv_resnet50_cl_f16(): m = tv("resnet50"); classify(m, 256, 224, FP, True, opt=sgd(m), scaler=scaler())
def tv_resnet152_tf32(): m = tv("resnet152"); classify(m, 128, 224, opt=sgd(m))
def timm_effnet_b4_cl_f16(): m = tm("efficientnet_b4", drop_rate=0.4, drop_path_rate=0.2); classify(m, 64, 380, FP, True, opt=O.RMSprop(m.parameters(), lr=1e-3, momentum=0.9), scaler=scaler())
def tv_maskrcnn_fp32():
    m = tv("maskrcnn_resnet50_fpn", weights_backbone=None)
    def target():
        at = 500 * torch.rand(6, 2, device=dev); masks = torch.zeros(6, 800, 800, dtype=torch.uint8, device=dev); masks[:, 200:400, 200:400] = 1
        return dict(boxes=torch.cat([at, at + 100 + 150 * torch.rand(6, 2, device=dev)], 1), labels=1 + lab(6, 90), masks=masks)
    loop(m, lambda: sum(m([*torch.rand(4, 3, 800, 800, device=dev)], [target() for _ in range(4)]).values()), opt=sgd(m))
def hf_segformer_b3_f16():
    m = hf("SegformerForSemanticSegmentation", "SegformerConfig", depths=[3, 4, 18, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768, num_labels=150)
    def s():
        with amp(FP): return m(pixel_values=img(16, 512), labels=torch.randint(0, 150, (16, 512, 512), device=dev)).loss
    loop(m, s, scaler=scaler())
def diff_sd15_ckpt():
    from bitsandbytes.optim import AdamW8bit
    from diffusers import UNet2DConditionModel
    m = UNet2DConditionModel(sample_size=64, cross_attention_dim=768).to(dev).train(); m.enable_gradient_checkpointing()
    def s():
        x, t = torch.randn(4, 4, 64, 64, device=dev), torch.randint(0, 1000, (4,), device=dev)
        with amp(FP): return F.mse_loss(m(x, t, encoder_hidden_states=torch.randn(4, 77, 768, device=dev)).sample.float(), torch.randn_like(x))
    loop(m, s, opt=AdamW8bit(m.parameters(), lr=1e-5), scaler=scaler(), accum=4, clip=1.0)
def timm_vit_base_compiled():
    m = tm("vit_base_patch16_224"); c = torch.compile(m)
    def s():
        with amp(): return F.cross_entropy(c(img(256, 224)), lab(256))
    loop(m, s, opt=fused(m))

CASES = {k: f for k, f in list(globals().items()) if k.split("_")[0] in ("tv", "timm", "hf", "peft", "diff") and "_" in k and callable(f)}
if __name__ == "__main__":
    if NAME == "list": print(" ".join(CASES))
    else: torch.manual_seed(0); CASES[NAME]()
