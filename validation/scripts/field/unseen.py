"""Trainings of models of public libraries: `unseen.py NAME [STEPS]`; `list` names them."""
import sys
import torch, torch.nn as nn, torch.nn.functional as F
NAME = sys.argv[1] if len(sys.argv) > 1 else "list"; STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 14
dev, BF, FP = "cuda", torch.bfloat16, torch.float16
def ids(b, t, v): return torch.randint(1, v, (b, t), device=dev)
def img(b, s, last=False): x = torch.randn(b, 3, s, s, device=dev); return x.contiguous(memory_format=torch.channels_last) if last else x
def lab(b, n=1000): return torch.randint(0, n, (b,), device=dev)
def amp(dt=BF): return torch.autocast("cuda", dtype=dt)
def loop(model, step, opt=None, accum=1, scaler=None, clip=None):
    params = [p for p in model.parameters() if p.requires_grad]
    opt = opt or torch.optim.AdamW(params, lr=1e-4)
    for _ in range(STEPS):
        for _ in range(accum):
            loss = step() / accum
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler and clip: scaler.unscale_(opt)
        if clip: torch.nn.utils.clip_grad_norm_(params, clip)
        if scaler: scaler.step(opt); scaler.update()
        else: opt.step()
        opt.zero_grad(set_to_none=True)
def scaler(): return torch.amp.GradScaler("cuda", init_scale=256.0)
def sgd(m): return torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
def fused(m): return torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True)
def tv(name, **kw):
    import torchvision
    return torchvision.models.get_model(name, weights=None, **kw).to(dev).train()
def tm(name, **kw):
    import timm
    return timm.create_model(name, pretrained=False, **kw).to(dev).train()
def hf(cls, cfg, **kw):
    import transformers as T
    with torch.device(dev): return getattr(T, cls)(getattr(T, cfg)(**kw)).to(dev).train()
def classify(m, b, s, dt=None, last=False, **kw):
    if last: m = m.to(memory_format=torch.channels_last)
    def step():
        if dt is None: return F.cross_entropy(m(img(b, s, last)), lab(b))
        with amp(dt): return F.cross_entropy(m(img(b, s, last)), lab(b))
    loop(m, step, **kw)

def tv_densenet121(): m = tv("densenet121"); classify(m, 64, 224, opt=sgd(m))
def tv_regnet_cl_f16(): m = tv("regnet_y_8gf"); classify(m, 96, 224, FP, True, opt=sgd(m), scaler=scaler())
def tv_mobilenet_rms(): m = tv("mobilenet_v3_large"); classify(m, 256, 224, BF, opt=torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9))
def tv_vgg16bn(): m = tv("vgg16_bn"); classify(m, 48, 224, opt=sgd(m))
def tv_fcn_bf16():
    m = tv("fcn_resnet101", num_classes=21, weights_backbone=None)
    def s():
        with amp(): return F.cross_entropy(m(img(8, 384))["out"], torch.randint(0, 21, (8, 384, 384), device=dev))
    loop(m, s, opt=sgd(m))
def tv_mc3_video():
    m = tv("mc3_18")
    def s(): return F.cross_entropy(m(torch.randn(16, 3, 16, 112, 112, device=dev)), lab(16, 400))
    loop(m, s, opt=sgd(m))
def tv_swin3d_bf16():
    m = tv("swin3d_t")
    def s():
        with amp(): return F.cross_entropy(m(torch.randn(4, 3, 16, 224, 224, device=dev)), lab(4, 400))
    loop(m, s)
def tv_resnext_compiled():
    m = tv("resnext50_32x4d").to(memory_format=torch.channels_last); c = torch.compile(m)
    def s():
        with amp(): return F.cross_entropy(c(img(192, 224, True)), lab(192))
    loop(m, s, opt=sgd(m))
def timm_maxvit_bf16(): m = tm("maxvit_tiny_tf_224"); classify(m, 48, 224, BF)
def timm_mixer_fused(): m = tm("mixer_b16_224"); classify(m, 128, 224, BF, opt=fused(m))
def timm_poolformer_f16(): m = tm("poolformer_s24"); classify(m, 64, 224, FP, scaler=scaler(), clip=1.0)
def timm_bit_tf32(): m = tm("resnetv2_50x1_bit"); classify(m, 96, 224, opt=sgd(m))
def timm_xcit_bf16(): m = tm("xcit_small_12_p16_224"); classify(m, 96, 224, BF)
def timm_beit_ckpt(): m = tm("beit_base_patch16_224"); m.set_grad_checkpointing(True); classify(m, 96, 224, BF)
def timm_convmixer_bf16(): m = tm("convmixer_768_32"); classify(m, 32, 224, BF, opt=fused(m))
def timm_pvt_fp32():
    torch.backends.cuda.matmul.allow_tf32 = True; m = tm("pvt_v2_b2"); classify(m, 64, 224)
def hf_dpt_bf16():
    m = hf("DPTForDepthEstimation", "DPTConfig")
    def s():
        with amp(): return F.l1_loss(m(pixel_values=img(8, 384)).predicted_depth, torch.rand(8, 384, 384, device=dev))
    loop(m, s, clip=1.0)
def hf_timesformer_bf16():
    m = hf("TimesformerForVideoClassification", "TimesformerConfig", num_frames=8)
    def s():
        with amp(): return m(pixel_values=torch.randn(4, 8, 3, 224, 224, device=dev), labels=lab(4, 2)).loss
    loop(m, s, opt=fused(m))
def hf_albert_f16():
    m = hf("AlbertForMaskedLM", "AlbertConfig", hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_hidden_layers=24)
    mask = torch.ones(16, 256, device=dev, dtype=torch.long); mask[:, 200:] = 0
    def s():
        x = ids(16, 256, 30000)
        with amp(FP): return m(input_ids=x, attention_mask=mask, labels=x).loss
    loop(m, s, scaler=scaler(), clip=1.0)
def hf_neox_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    m = hf("GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    def s(): x = ids(4, 512, 50000); return m(input_ids=x, labels=x).loss
    loop(m, s, accum=2, clip=1.0)
def hf_bloom_bf16():
    m = hf("BloomForCausalLM", "BloomConfig", hidden_size=1024, n_layer=16, n_head=16, vocab_size=100000).bfloat16()
    def s(): x = ids(8, 512, 100000); return m(input_ids=x, labels=x).loss
    loop(m, s)
def hf_starcoder_compiled():
    m = hf("Starcoder2ForCausalLM", "Starcoder2Config", hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=2, intermediate_size=4096, vocab_size=49152, sliding_window=None)
    c = torch.compile(m)
    def s():
        x = ids(16, 1024, 49000)
        with amp(): return c(input_ids=x, labels=x, use_cache=False).loss
    loop(m, s)
def hf_fnet_fp32():
    m = hf("FNetForMaskedLM", "FNetConfig")
    def s(): x = ids(32, 512, 32000); return m(input_ids=x, labels=x).loss
    loop(m, s)
def hf_xlnet_fp32():
    m = hf("XLNetLMHeadModel", "XLNetConfig", d_model=768, n_layer=12, n_head=12, d_inner=3072)
    def s(): x = ids(8, 256, 32000); return m(input_ids=x, labels=x, use_mems=False).loss
    loop(m, s, clip=1.0)
def hf_m2m_bf16():
    m = hf("M2M100ForConditionalGeneration", "M2M100Config", vocab_size=64000, encoder_layers=6, decoder_layers=6, d_model=768, encoder_ffn_dim=3072, decoder_ffn_dim=3072, encoder_attention_heads=12, decoder_attention_heads=12)
    mask = torch.ones(16, 192, device=dev, dtype=torch.long); mask[:8, 160:] = 0
    def s():
        with amp(): return m(input_ids=ids(16, 192, 64000), attention_mask=mask, labels=ids(16, 128, 64000)).loss
    loop(m, s, accum=2)
def hf_whisper_f16():
    m = hf("WhisperForConditionalGeneration", "WhisperConfig", d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
    def s():
        with amp(FP): return m(input_features=torch.randn(16, 80, 3000, device=dev), labels=ids(16, 96, 50000)).loss
    loop(m, s, scaler=scaler())
def hf_ast_bf16():
    m = hf("ASTForAudioClassification", "ASTConfig", num_labels=50)
    def s(): return m(input_values=torch.randn(16, 1024, 128, device=dev, dtype=BF), labels=lab(16, 50)).loss
    m = m.bfloat16(); loop(m, s, opt=fused(m))
def hf_wavlm_fp32():
    m = hf("WavLMForSequenceClassification", "WavLMConfig", num_labels=8, mask_time_prob=0.0, layerdrop=0.0)
    def s(): return m(input_values=torch.randn(8, 64000, device=dev), labels=lab(8, 8)).loss
    loop(m, s, opt=torch.optim.AdamW(m.parameters(), lr=1e-4, foreach=False))
def hf_encodec():
    m = hf("EncodecModel", "EncodecConfig")
    def s():
        x = torch.randn(32, 1, 48000, device=dev)
        return F.l1_loss(m.decoder(m.encoder(x)), x)
    loop(m, s)
def hf_siglip_f16():
    m = hf("SiglipModel", "SiglipConfig")
    def s():
        with amp(FP): return m(input_ids=ids(64, 64, 32000), pixel_values=img(64, 224), return_loss=True).loss
    loop(m, s, scaler=scaler(), clip=1.0)
def hf_mpnet_pairs():
    m = hf("MPNetModel", "MPNetConfig")
    def embed(x):
        h = m(input_ids=x, attention_mask=torch.ones_like(x)).last_hidden_state
        return F.normalize(h.mean(1), dim=-1)
    def s():
        with amp():
            a, b = embed(ids(64, 128, 30000)), embed(ids(64, 128, 30000))
            return F.cross_entropy(20.0 * a @ b.T, torch.arange(64, device=dev))
    loop(m, s)
def graph(n, e, f): return torch.randn(n, f, device=dev), torch.randint(0, n, (2, e), device=dev)
def pyg_sage():
    from torch_geometric.nn import GraphSAGE
    m = GraphSAGE(128, 256, 3, 40).to(dev); x, e = graph(250_000, 4_000_000, 128); y = lab(250_000, 40)
    loop(m, lambda: F.cross_entropy(m(x, e), y), opt=torch.optim.Adam(m.parameters(), lr=1e-3))
def pyg_pna():
    from torch_geometric.nn import PNAConv
    deg = torch.ones(32, dtype=torch.long); kw = dict(aggregators=["mean", "min", "max", "std"], scalers=["identity", "amplification"], deg=deg)
    c = nn.ModuleList(PNAConv(64, 64, **kw) for _ in range(3)).to(dev); h = nn.Linear(64, 10).to(dev); m = nn.ModuleList([c, h])
    x, e = graph(80_000, 1_000_000, 64); y = lab(80_000, 10)
    def s():
        z = x
        for k in c: z = F.relu(k(z, e))
        return F.cross_entropy(h(z), y)
    loop(m, s)
def pyg_transformer():
    from torch_geometric.nn import TransformerConv
    c = nn.ModuleList(TransformerConv(128, 32, heads=4) for _ in range(4)).to(dev); h = nn.Linear(128, 10).to(dev); m = nn.ModuleList([c, h])
    x, e = graph(80_000, 1_200_000, 128); y = lab(80_000, 10)
    def s():
        z = x
        for k in c: z = F.relu(k(z, e))
        return F.cross_entropy(h(z), y)
    loop(m, s)
def diff_vae_tf32():
    from diffusers import AutoencoderKL
    torch.backends.cuda.matmul.allow_tf32 = True
    m = AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(128, 256, 256), layers_per_block=2, norm_num_groups=32).to(dev).train()
    def s():
        x = img(4, 256); q = m.encode(x).latent_dist
        return F.mse_loss(m.decode(q.sample()).sample, x) + 1e-6 * q.kl().mean()
    loop(m, s)
def diff_unet_f16():
    from diffusers import UNet2DModel
    m = UNet2DModel(sample_size=64, block_out_channels=(128, 256, 384), down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D")).to(dev).train()
    def s():
        x = img(16, 64); t = torch.randint(0, 1000, (16,), device=dev)
        with amp(FP): return F.mse_loss(m(x, t).sample.float(), x)
    loop(m, s, scaler=scaler(), clip=1.0)
def diff_sd3_bf16():
    from diffusers import SD3Transformer2DModel
    m = SD3Transformer2DModel(sample_size=64, num_layers=10, attention_head_dim=64, num_attention_heads=16, joint_attention_dim=1024, caption_projection_dim=1024, pooled_projection_dim=1024).to(dev, BF).train()
    def s():
        r = lambda *n: torch.randn(*n, device=dev, dtype=BF)
        x = r(8, 16, 64, 64)
        return F.mse_loss(m(x, encoder_hidden_states=r(8, 154, 1024), pooled_projections=r(8, 1024), timestep=torch.rand(8, device=dev) * 1000).sample, x)
    loop(m, s, opt=fused(m))
def lit_mnasnet_accum():
    import lightning as L
    class Lit(L.LightningModule):
        def __init__(self): super().__init__(); self.m = tv("mnasnet1_0")
        def training_step(self, b, i): return F.cross_entropy(self.m(b[0]), b[1])
        def configure_optimizers(self): return sgd(self.m)
    data = [(img(128, 224), lab(128)) for _ in range(2)] * STEPS
    L.Trainer(max_steps=STEPS, accumulate_grad_batches=2, precision="bf16-mixed", logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=1).fit(Lit(), torch.utils.data.DataLoader(data, batch_size=None))

CASES = {k: f for k, f in list(globals().items()) if k.split("_")[0] in ("tv", "timm", "hf", "pyg", "diff", "lit") and "_" in k and callable(f)}
if __name__ == "__main__":
    if NAME == "list": print(" ".join(CASES))
    else: torch.manual_seed(0); CASES[NAME]()
