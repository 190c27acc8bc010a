"""More trainings of models of public libraries: `fresh.py NAME [STEPS]`, as `unseen.py`."""
import torch, torch.nn as nn, torch.nn.functional as F
from unseen import BF, FP, NAME, STEPS, amp, classify, dev, fused, graph, hf, ids, img, lab, loop, scaler, sgd, tm, tv
O = torch.optim
def nesterov(m): return O.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True)
def pixels(b, n, s): return torch.randn(b, n, 3, s, s, device=dev)
def lm(m, b, t, v, dt=None, mask=False, **kw):
    given = {"attention_mask": torch.ones(b, t, device=dev, dtype=torch.long)} if mask else {}
    if mask: given["attention_mask"][: b // 2, t - t // 8 :] = 0
    def s():
        x = ids(b, t, v)
        with torch.autocast("cuda", dtype=dt or BF, enabled=dt is not None): return m(input_ids=x, labels=x, **given).loss
    loop(m, s, **kw)
def tf32(): torch.backends.cuda.matmul.allow_tf32 = True

def tv_wide_resnet_cl(): m = tv("wide_resnet50_2"); classify(m, 192, 224, BF, True, opt=nesterov(m))
def tv_inception():
    m = tv("inception_v3", init_weights=False)
    def s():
        out, more = m(img(64, 299)); y = lab(64)
        return F.cross_entropy(out, y) + 0.4 * F.cross_entropy(more, y)
    loop(m, s, opt=O.RMSprop(m.parameters(), lr=1e-3))
def tv_shufflenet_bf16(): m = tv("shufflenet_v2_x1_5"); classify(m, 384, 224, BF, opt=sgd(m))
def tv_vit_large_fused(): m = tv("vit_l_16"); classify(m, 64, 224, BF, opt=fused(m))
def tv_lraspp_f16():
    m = tv("lraspp_mobilenet_v3_large", num_classes=21, weights_backbone=None)
    def s():
        with amp(FP): return F.cross_entropy(m(img(48, 512))["out"], torch.randint(0, 21, (48, 512, 512), device=dev))
    loop(m, s, opt=sgd(m), scaler=scaler())
def tv_s3d_bf16():
    m = tv("s3d")
    def s():
        with amp(): return F.cross_entropy(m(torch.randn(24, 3, 16, 224, 224, device=dev)), lab(24, 400))
    loop(m, s, opt=sgd(m))
def tv_mvit_bf16():
    m = tv("mvit_v2_s")
    def s():
        with amp(): return F.cross_entropy(m(torch.randn(8, 3, 16, 224, 224, device=dev)), lab(8, 400))
    loop(m, s, clip=1.0)
def timm_deit3_384(): m = tm("deit3_base_patch16_384"); classify(m, 48, 384, BF, opt=fused(m))
def timm_nfnet_bf16(): m = tm("dm_nfnet_f0"); classify(m, 96, 192, BF, opt=nesterov(m))
def timm_coatnet_bf16(): m = tm("coatnet_0_rw_224"); classify(m, 96, 224, BF)
def timm_davit_f16(): m = tm("davit_small"); classify(m, 96, 224, FP, scaler=scaler(), clip=1.0)
def timm_volo_bf16(): m = tm("volo_d1_224"); m.main_classifier_only = True; classify(m, 96, 224, BF)
def timm_focalnet_bf16(): m = tm("focalnet_small_srf"); classify(m, 96, 224, BF, opt=fused(m))
def timm_hrnet_tf32(): m = tm("hrnet_w18"); classify(m, 96, 224, opt=sgd(m))
def timm_res2net_tf32(): m = tm("res2net50_26w_4s"); classify(m, 128, 224, opt=nesterov(m))
def timm_gmlp_bf16(): m = tm("gmlp_s16_224"); classify(m, 192, 224, BF, opt=O.NAdam(m.parameters(), lr=1e-4))
def timm_eva02_ckpt(): m = tm("eva02_small_patch14_224"); m.set_grad_checkpointing(True); classify(m, 192, 224, BF)
def timm_mobilevit_f16(): m = tm("mobilevitv2_100"); classify(m, 192, 256, FP, scaler=scaler())
def timm_repvgg_compiled():
    m = tm("repvgg_b1").to(memory_format=torch.channels_last); c = torch.compile(m)
    def s():
        with amp(): return F.cross_entropy(c(img(160, 224, True)), lab(160))
    loop(m, s, opt=sgd(m))
def hf_mistral_bf16():
    m = hf("MistralForCausalLM", "MistralConfig", hidden_size=1536, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, intermediate_size=4096, vocab_size=32000, sliding_window=None).bfloat16()
    lm(m, 8, 1024, 32000, opt=O.Adafactor(m.parameters(), lr=1e-3))
def hf_gemma2_amp(): lm(hf("Gemma2ForCausalLM", "Gemma2Config", hidden_size=1024, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4, head_dim=128, intermediate_size=4096, vocab_size=64000), 4, 1024, 64000, BF)
def hf_falcon_accum(): lm(hf("FalconForCausalLM", "FalconConfig", hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, vocab_size=65024), 8, 512, 65000, BF, accum=3, clip=1.0)
def hf_gptj_ckpt():
    tf32(); m = hf("GPTJForCausalLM", "GPTJConfig", n_embd=1024, n_layer=12, n_head=16, rotary_dim=64)
    m.gradient_checkpointing_enable(); lm(m, 8, 512, 50000)
def hf_olmo_compiled():
    m = hf("OlmoForCausalLM", "OlmoConfig", hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, intermediate_size=4096, vocab_size=50304)
    c = torch.compile(m)
    def s():
        x = ids(16, 1024, 50000)
        with amp(): return c(input_ids=x, labels=x, use_cache=False).loss
    loop(m, s, opt=fused(m))
def hf_squeezebert_bf16(): lm(hf("SqueezeBertForMaskedLM", "SqueezeBertConfig"), 64, 256, 30000, BF)
def hf_electra_f16(): lm(hf("ElectraForMaskedLM", "ElectraConfig", hidden_size=768, num_attention_heads=12, intermediate_size=3072, embedding_size=768), 64, 256, 30000, FP, mask=True, scaler=scaler())
def hf_marian_accum():
    m = hf("MarianMTModel", "MarianConfig", vocab_size=58101, pad_token_id=58100, decoder_start_token_id=58100, d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8)
    mask = torch.ones(64, 128, device=dev, dtype=torch.long); mask[:32, 100:] = 0
    def s():
        with amp(): return m(input_ids=ids(64, 128, 58000), attention_mask=mask, labels=ids(64, 128, 58000)).loss
    loop(m, s, accum=2)
def hf_mt5_fp32():
    m = hf("MT5ForConditionalGeneration", "MT5Config", vocab_size=64000, d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6)
    def s(): return m(input_ids=ids(16, 256, 64000), labels=ids(16, 128, 64000)).loss
    loop(m, s, opt=O.Adagrad(m.parameters(), lr=1e-3))
def hf_vivit_bf16():
    m = hf("VivitForVideoClassification", "VivitConfig", num_frames=16, num_hidden_layers=8, num_labels=10)
    def s():
        with amp(): return m(pixel_values=pixels(8, 16, 224), labels=lab(8, 10)).loss
    loop(m, s)
def hf_videomae_bf16():
    m = hf("VideoMAEForVideoClassification", "VideoMAEConfig", num_labels=10)
    def s():
        with amp(): return m(pixel_values=pixels(8, 16, 224), labels=lab(8, 10)).loss
    loop(m, s, opt=O.RAdam(m.parameters(), lr=1e-4))
def hf_cvt_tf32():
    tf32(); m = hf("CvtForImageClassification", "CvtConfig", num_labels=10)
    def s(): return m(pixel_values=img(64, 224), labels=lab(64, 10)).loss
    loop(m, s, opt=O.Adamax(m.parameters(), lr=1e-3))
def hf_glpn_f16():
    m = hf("GLPNForDepthEstimation", "GLPNConfig")
    def s():
        with amp(FP): return F.l1_loss(m(pixel_values=img(16, 384)).predicted_depth.float(), torch.rand(16, 384, 384, device=dev))
    loop(m, s, scaler=scaler())
def hf_unispeech_bf16():
    m = hf("UniSpeechForSequenceClassification", "UniSpeechConfig", num_labels=8, mask_time_prob=0.0, layerdrop=0.0)
    def s():
        with amp(): return m(input_values=torch.randn(24, 80000, device=dev), labels=lab(24, 8)).loss
    loop(m, s, clip=1.0)
def hf_speech2text_f16():
    m = hf("Speech2TextForConditionalGeneration", "Speech2TextConfig", encoder_layers=12, decoder_layers=6, d_model=256)
    def s():
        with amp(FP): return m(input_features=torch.randn(48, 1024, 80, device=dev), labels=ids(48, 96, 10000)).loss
    loop(m, s, scaler=scaler(), opt=fused(m))
def peft_loha_llama():
    from peft import LoHaConfig, get_peft_model
    m = hf("LlamaForCausalLM", "LlamaConfig", hidden_size=2048, num_hidden_layers=10, num_attention_heads=16, num_key_value_heads=8, intermediate_size=5632, vocab_size=32000).bfloat16()
    lm(get_peft_model(m, LoHaConfig(r=8, target_modules=["q_proj", "v_proj"])), 4, 1024, 32000)
def pyg_train(make, n, e, f, width):
    c = nn.ModuleList(make() for _ in range(3)).to(dev); h = nn.Linear(width, 10).to(dev)
    x, edges = graph(n, e, f); y = lab(n, 10)
    def s():
        z = x
        for k in c: z = F.elu(k(z, edges))
        return F.cross_entropy(h(z), y)
    loop(nn.ModuleList([c, h]), s)
def pyg_gatv2():
    from torch_geometric.nn import GATv2Conv
    pyg_train(lambda: GATv2Conv(128, 16, heads=8), 100_000, 1_000_000, 128, 128)
def pyg_gin():
    from torch_geometric.nn import GINConv
    pyg_train(lambda: GINConv(nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256))), 200_000, 3_000_000, 256, 256)
def diff_unet_cond_bf16():
    from diffusers import UNet2DConditionModel
    m = UNet2DConditionModel(sample_size=64, block_out_channels=(320, 640, 960), down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=768).to(dev).train()
    def s():
        x = torch.randn(24, 4, 64, 64, device=dev); t = torch.randint(0, 1000, (24,), device=dev)
        with amp(): return F.mse_loss(m(x, t, encoder_hidden_states=torch.randn(24, 77, 768, device=dev)).sample.float(), x)
    loop(m, s, clip=1.0)
def diff_pixart_bf16():
    from diffusers import PixArtTransformer2DModel
    m = PixArtTransformer2DModel(sample_size=64, num_layers=12, num_attention_heads=16, attention_head_dim=72, cross_attention_dim=1152, caption_channels=1024).to(dev, BF).train()
    def s():
        r = lambda *n: torch.randn(*n, device=dev, dtype=BF)
        x = r(12, 4, 64, 64); t = torch.randint(0, 1000, (12,), device=dev)
        return m(x, encoder_hidden_states=r(12, 120, 1024), timestep=t, added_cond_kwargs={"resolution": None, "aspect_ratio": None}).sample.float().square().mean()
    loop(m, s, opt=fused(m))
def lit_fit(make, b, s, **kw):
    import lightning as L
    class Lit(L.LightningModule):
        def __init__(self): super().__init__(); self.m = make()
        def training_step(self, batch, i): return F.cross_entropy(self.m(batch[0]), batch[1])
        def configure_optimizers(self): return O.AdamW(self.parameters(), lr=1e-4)
    data = [(img(b, s), lab(b)) for _ in range(2)] * STEPS
    L.Trainer(max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=1, **kw).fit(Lit(), torch.utils.data.DataLoader(data, batch_size=None))
def lit_vit_clip(): lit_fit(lambda: tv("vit_b_16"), 96, 224, precision="bf16-mixed", gradient_clip_val=1.0)

CASES = {k: f for k, f in list(globals().items()) if k.split("_")[0] in ("tv", "timm", "hf", "pyg", "diff", "lit", "peft") and "_" in k and callable(f) and k not in ("pyg_train", "lit_fit")}
if __name__ == "__main__":
    if NAME == "list": print(" ".join(CASES))
    else: torch.manual_seed(0); CASES[NAME]()
