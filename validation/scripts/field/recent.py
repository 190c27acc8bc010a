"""Trainings of models of public libraries, a third group: `recent.py NAME [STEPS]`, as `unseen.py`."""
import torch, torch.nn as nn, torch.nn.functional as F
from fresh import lm, nesterov, tf32
from unseen import BF, FP, NAME, amp, classify, dev, fused, hf, ids, img, lab, loop, scaler, sgd, tm, tv
O = torch.optim
SMALL = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)

def hf_cohere_fp32(): lm(hf("CohereForCausalLM", "CohereConfig", **SMALL | {"num_hidden_layers": 8, "intermediate_size": 2048}, num_key_value_heads=12, vocab_size=32000), 4, 512, 32000)
def hf_qwen2_ckpt():
    m = hf("Qwen2ForCausalLM", "Qwen2Config", hidden_size=1536, num_hidden_layers=14, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960, vocab_size=64000).bfloat16()
    m.gradient_checkpointing_enable(); lm(m, 4, 1024, 64000, opt=fused(m))
def hf_persimmon_f16(): lm(hf("PersimmonForCausalLM", "PersimmonConfig", hidden_size=1024, num_hidden_layers=14, intermediate_size=4096, num_attention_heads=16, vocab_size=50000), 8, 512, 50000, FP, scaler=scaler(), clip=1.0)
def hf_codegen_bf16(): lm(hf("CodeGenForCausalLM", "CodeGenConfig", n_embd=1024, n_layer=12, n_head=16, rotary_dim=32, vocab_size=51200), 8, 512, 51000, BF)
def hf_ernie_accum(): lm(hf("ErnieForMaskedLM", "ErnieConfig"), 32, 256, 30000, BF, mask=True, accum=4)
def hf_deberta_bf16(): lm(hf("DebertaV2ForMaskedLM", "DebertaV2Config", **SMALL, vocab_size=64000, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True), 16, 256, 64000, BF)
def hf_funnel_tf32():
    tf32(); m = hf("FunnelForMaskedLM", "FunnelConfig", block_sizes=[3, 3, 3])
    lm(m, 16, 256, 30000)
def hf_pegasus_bf16():
    m = hf("PegasusForConditionalGeneration", "PegasusConfig", d_model=768, encoder_layers=8, decoder_layers=8, encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, vocab_size=96103)
    def s():
        with amp(): return m(input_ids=ids(16, 512, 96000), labels=ids(16, 128, 96000)).loss
    loop(m, s, clip=1.0)
def hf_blenderbot_f16():
    m = hf("BlenderbotForConditionalGeneration", "BlenderbotConfig", d_model=1024, encoder_layers=2, decoder_layers=10, encoder_ffn_dim=4096, decoder_ffn_dim=4096, encoder_attention_heads=16, decoder_attention_heads=16, vocab_size=8008, max_position_embeddings=512)
    def s():
        with amp(FP): return m(input_ids=ids(32, 256, 8000), labels=ids(32, 128, 8000)).loss
    loop(m, s, scaler=scaler(), opt=fused(m))
def hf_phi_compiled():
    m = hf("PhiForCausalLM", "PhiConfig", hidden_size=1280, num_hidden_layers=12, num_attention_heads=20, intermediate_size=5120, vocab_size=51200); c = torch.compile(m)
    def s():
        x = ids(8, 1024, 51000)
        with amp(): return c(input_ids=x, labels=x, use_cache=False).loss
    loop(m, s)
def hf_gpt_neo_ckpt():
    m = hf("GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=1024, num_layers=12, num_heads=16, attention_types=[[["global", "local"], 6]])
    m.gradient_checkpointing_enable(); lm(m, 8, 512, 50000, BF, accum=2)
def hf_megatron_fp32(): lm(hf("MegatronBertForMaskedLM", "MegatronBertConfig", num_hidden_layers=10, vocab_size=29056), 16, 256, 29000)
def hf_granite_bf16():
    m = hf("GraniteForCausalLM", "GraniteConfig", hidden_size=1536, num_hidden_layers=16, num_attention_heads=24, num_key_value_heads=8, intermediate_size=4096, vocab_size=49152).bfloat16()
    lm(m, 8, 1024, 49000, clip=1.0)
def peft_lora_stablelm():
    from peft import LoraConfig, get_peft_model
    m = hf("StableLmForCausalLM", "StableLmConfig", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=32, intermediate_size=5632, vocab_size=50304).bfloat16()
    lm(get_peft_model(m, LoraConfig(r=16, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])), 4, 1024, 50000)
def hf_levit_f16():
    m = hf("LevitForImageClassification", "LevitConfig", num_labels=10)
    def s():
        with amp(FP): return m(pixel_values=img(256, 224), labels=lab(256, 10)).loss
    loop(m, s, scaler=scaler())
def hf_dinov2_accum():
    m = hf("Dinov2ForImageClassification", "Dinov2Config", num_labels=10)
    def s():
        with amp(): return m(pixel_values=img(48, 224), labels=lab(48, 10)).loss
    loop(m, s, accum=2)
def hf_chinese_clip_bf16():
    m = hf("ChineseCLIPModel", "ChineseCLIPConfig")
    def s():
        with amp(): return m(input_ids=ids(128, 64, 21000), pixel_values=img(128, 224), return_loss=True).loss
    loop(m, s)
def tv_resnet101_cl_f16(): m = tv("resnet101"); classify(m, 128, 224, FP, True, opt=sgd(m), scaler=scaler())
def tv_effnetv2_bf16(): m = tv("efficientnet_v2_s"); classify(m, 96, 256, BF, opt=O.RMSprop(m.parameters(), lr=1e-3))
def tv_convnext_compiled():
    m = tv("convnext_tiny").to(memory_format=torch.channels_last); c = torch.compile(m)
    def s():
        with amp(): return F.cross_entropy(c(img(128, 224, True)), lab(128))
    loop(m, s)
def tv_swinv2_f16(): m = tv("swin_v2_t"); classify(m, 64, 256, FP, scaler=scaler(), clip=1.0)
def tv_googlenet_tf32():
    m = tv("googlenet", init_weights=False, aux_logits=False); classify(m, 192, 224, opt=nesterov(m))
def hf_convnextv2_bf16():
    m = hf("ConvNextV2ForImageClassification", "ConvNextV2Config", num_labels=10)
    def s():
        with amp(): return m(pixel_values=img(96, 224), labels=lab(96, 10)).loss
    loop(m, s, opt=sgd(m))
def tv_squeezenet_accum(): m = tv("squeezenet1_1"); classify(m, 256, 224, BF, opt=sgd(m), accum=2)
def timm_vit384_ckpt(): m = tm("vit_base_patch16_384"); m.set_grad_checkpointing(True); classify(m, 48, 384, BF)
def timm_crossvit_fp32(): m = tm("crossvit_15_240"); classify(m, 32, 240)
def timm_cait_bf16(): m = tm("cait_s24_224"); classify(m, 64, 224, BF)
def timm_ghostnet_f16(): m = tm("ghostnet_130"); classify(m, 256, 224, FP, opt=sgd(m), scaler=scaler())
def timm_resnest_tf32(): m = tm("resnest50d"); classify(m, 64, 224, opt=sgd(m))
def timm_twins_bf16(): m = tm("twins_svt_small"); classify(m, 128, 224, BF, opt=fused(m))
def timm_edgenext_f16(): m = tm("edgenext_base"); classify(m, 128, 256, FP, scaler=scaler())
def timm_hiera_bf16(): m = tm("hiera_small_224"); classify(m, 96, 224, BF, opt=O.NAdam(m.parameters(), lr=1e-4))

CASES = {k: f for k, f in list(globals().items()) if k.split("_")[0] in ("tv", "timm", "hf", "peft") and "_" in k and callable(f)}
if __name__ == "__main__":
    if NAME == "list": print(" ".join(CASES))
    else: torch.manual_seed(0); CASES[NAME]()
