"""Trainings of text and image models, 40 steps each: `steady.py NAME [STEPS]`; `list` names them."""
import sys
import torch, torch.nn as nn, torch.nn.functional as F
NAME = sys.argv[1]; STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 40
torch.manual_seed(0); dev = "cuda"
def ids(b, t, v): return torch.randint(0, v, (b, t), device=dev)
def loop(params, step, opt=None, accum=1, scaler=None, clip=None):
    opt = opt or torch.optim.AdamW(params, lr=1e-4)
    for i in range(STEPS):
        for _ in range(accum):
            loss = step() / accum
            (scaler.scale(loss) if scaler else loss).backward()
        if clip: torch.nn.utils.clip_grad_norm_(params, clip)
        if scaler: scaler.step(opt); scaler.update()
        else: opt.step()
        opt.zero_grad(set_to_none=True)
def hf(cls, cfg, **kw):
    import transformers as T
    m = getattr(T, cls)(getattr(T, cfg)(**kw)); return m.to(dev).train()
def amp(dt=torch.bfloat16): return torch.autocast("cuda", dtype=dt)

def bert_f32_mlm():
    m = hf("BertForMaskedLM", "BertConfig"); P = list(m.parameters())
    def s(): x = ids(16, 128, 30000); return m(input_ids=x, labels=x).loss
    loop(P, s, clip=1.0)
def roberta_f16_cls():
    m = hf("RobertaForSequenceClassification", "RobertaConfig", num_labels=3, vocab_size=50265, max_position_embeddings=514); P = list(m.parameters())
    def s():
        with amp(torch.float16): return m(input_ids=ids(32, 128, 50000), attention_mask=torch.ones(32, 128, device=dev, dtype=torch.long), labels=torch.randint(0, 3, (32,), device=dev)).loss
    loop(P, s, scaler=torch.amp.GradScaler("cuda"))
def gpt2m_bf16():
    m = hf("GPT2LMHeadModel", "GPT2Config", n_layer=24, n_embd=1024, n_head=16); P = list(m.parameters())
    def s():
        x = ids(4, 512, 50000)
        with amp(): return m(input_ids=x, labels=x).loss
    loop(P, s, clip=1.0)
def gpt2_tf32_accum():
    torch.backends.cuda.matmul.allow_tf32 = True
    m = hf("GPT2LMHeadModel", "GPT2Config"); P = list(m.parameters())
    def s(): x = ids(2, 1024, 50000); return m(input_ids=x, labels=x).loss
    loop(P, s, accum=4)
LL = dict(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=4)
def llama1b_ckpt():
    m = hf("LlamaForCausalLM", "LlamaConfig", **LL).bfloat16(); m.gradient_checkpointing_enable(); P = list(m.parameters())
    def s(): x = ids(2, 1024, 32000); return m(input_ids=x, labels=x).loss
    loop(P, s)
def llama_lora():
    from peft import LoraConfig, get_peft_model
    m = hf("LlamaForCausalLM", "LlamaConfig", **LL).bfloat16(); m = get_peft_model(m, LoraConfig(r=16, target_modules=["q_proj", "v_proj", "k_proj", "o_proj"])); P = [p for p in m.parameters() if p.requires_grad]
    def s(): x = ids(4, 512, 32000); return m(input_ids=x, labels=x).loss
    loop(P, s)
def t5_bf16():
    m = hf("T5ForConditionalGeneration", "T5Config", d_model=768, d_ff=3072, num_layers=12, num_heads=12, d_kv=64, decoder_start_token_id=0); P = list(m.parameters())
    def s():
        with amp(): return m(input_ids=ids(8, 512, 32000), labels=ids(8, 64, 32000)).loss
    loop(P, s)
def opt_f16():
    m = hf("OPTForCausalLM", "OPTConfig", hidden_size=1024, ffn_dim=4096, num_hidden_layers=24, num_attention_heads=16); P = list(m.parameters())
    def s():
        x = ids(8, 256, 50000)
        with amp(torch.float16): return m(input_ids=x, labels=x).loss
    loop(P, s, scaler=torch.amp.GradScaler("cuda"))
def distilbert_compiled():
    m = hf("DistilBertForSequenceClassification", "DistilBertConfig"); P = list(m.parameters()); c = torch.compile(m)
    def s():
        with amp(): return c(input_ids=ids(32, 256, 30000), labels=torch.randint(0, 2, (32,), device=dev)).loss
    loop(P, s)
class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__(); self.h = h; self.n1 = nn.LayerNorm(d); self.n2 = nn.LayerNorm(d); self.qkv = nn.Linear(d, 3 * d); self.o = nn.Linear(d, d); self.f = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
    def forward(self, x):
        b, t, d = x.shape; q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)); return x + self.f(self.n2(x))
class GPT(nn.Module):
    def __init__(self, d=768, n=12, h=12, v=50304, t=1024):
        super().__init__(); self.e = nn.Embedding(v, d); self.p = nn.Embedding(t, d); self.b = nn.ModuleList(Block(d, h) for _ in range(n)); self.n = nn.LayerNorm(d); self.u = nn.Linear(d, v, bias=False); self.u.weight = self.e.weight
    def forward(self, x, y):
        h = self.e(x) + self.p(torch.arange(x.shape[1], device=x.device))
        for b in self.b: h = b(h)
        l = self.u(self.n(h)); return F.cross_entropy(l.view(-1, l.size(-1)), y.view(-1))
def gpt_compiled():
    m = GPT().to(dev); P = list(m.parameters()); c = torch.compile(m)
    def s():
        with amp(): return c(ids(8, 1024, 50000), ids(8, 1024, 50000))
    loop(P, s, opt=torch.optim.AdamW(P, lr=1e-4, fused=True), clip=1.0)
def gpt_eager_f16():
    m = GPT(d=1024, n=16, h=16).to(dev); P = list(m.parameters())
    def s():
        with amp(torch.float16): return m(ids(4, 1024, 50000), ids(4, 1024, 50000))
    loop(P, s, scaler=torch.amp.GradScaler("cuda"), accum=2)
def trainer(m, n, item, **kw):
    import transformers as T
    class D(torch.utils.data.Dataset):
        def __len__(self): return 100000
        def __getitem__(self, i): return item()
    a = T.TrainingArguments("/tmp/tr", max_steps=STEPS, per_device_train_batch_size=n, report_to=[], save_strategy="no", logging_steps=10, disable_tqdm=True, **kw)
    T.Trainer(m, a, train_dataset=D()).train()
def qwen_trainer():
    m = hf("Qwen3ForCausalLM", "Qwen3Config", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    def it(): x = torch.randint(0, 150000, (512,)); return dict(input_ids=x, labels=x)
    trainer(m, 2, it, bf16=True, gradient_checkpointing=True, gradient_accumulation_steps=2)
def bart_trainer():
    m = hf("BartForConditionalGeneration", "BartConfig", d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)
    def it(): return dict(input_ids=torch.randint(4, 50000, (256,)), labels=torch.randint(4, 50000, (64,)))
    trainer(m, 16, it, fp16=True)
def vit_trainer():
    m = hf("ViTForImageClassification", "ViTConfig", num_labels=100)
    def it(): return dict(pixel_values=torch.randn(3, 224, 224), labels=torch.randint(0, 100, ()))
    trainer(m, 32, it, bf16=True, dataloader_num_workers=4)
def mixtral_bf16():
    m = hf("MixtralForCausalLM", "MixtralConfig", vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, num_local_experts=8).bfloat16(); P = list(m.parameters())
    def s(): x = ids(4, 512, 32000); return m(input_ids=x, labels=x).loss
    loop(P, s)
def gemma_f32():
    m = hf("Gemma2ForCausalLM", "Gemma2Config", vocab_size=32000, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, head_dim=64); P = list(m.parameters())
    def s(): x = ids(4, 256, 32000); return m(input_ids=x, labels=x).loss
    loop(P, s)
def img(b, r=224, c=3): return torch.randn(b, c, r, r, device=dev)
def lab(b, n=1000): return torch.randint(0, n, (b,), device=dev)
def timm_m(name, **kw):
    import timm; return timm.create_model(name, pretrained=False, **kw).to(dev).train()
def resnet50_amp_cl():
    m = timm_m("resnet50").to(memory_format=torch.channels_last); P = list(m.parameters())
    def s():
        with amp(): return F.cross_entropy(m(img(64).to(memory_format=torch.channels_last)), lab(64))
    loop(P, s, opt=torch.optim.SGD(P, 0.1, momentum=0.9))
def vitb_bf16():
    m = timm_m("vit_base_patch16_224"); P = list(m.parameters())
    def s():
        with amp(): return F.cross_entropy(m(img(64)), lab(64))
    loop(P, s)
def vitl_ckpt():
    m = timm_m("vit_large_patch16_224"); m.set_grad_checkpointing(); P = list(m.parameters())
    def s():
        with amp(): return F.cross_entropy(m(img(32)), lab(32))
    loop(P, s)
def convnext_f32():
    m = timm_m("convnext_tiny"); P = list(m.parameters())
    loop(P, lambda: F.cross_entropy(m(img(32)), lab(32)))
def effnet_amp():
    m = timm_m("efficientnet_b2"); P = list(m.parameters())
    def s():
        with amp(torch.float16): return F.cross_entropy(m(img(64, 260)), lab(64))
    loop(P, s, opt=torch.optim.RMSprop(P, 1e-3), scaler=torch.amp.GradScaler("cuda"))
def swin_f32():
    m = timm_m("swin_tiny_patch4_window7_224"); P = list(m.parameters())
    loop(P, lambda: F.cross_entropy(m(img(32)), lab(32)))
def mobilenet_amp():
    m = timm_m("mobilenetv3_large_100"); P = list(m.parameters())
    def s():
        with amp(): return F.cross_entropy(m(img(128)), lab(128))
    loop(P, s)
def regnet_compiled():
    m = timm_m("regnety_016"); P = list(m.parameters()); c = torch.compile(m)
    def s():
        with amp(): return F.cross_entropy(c(img(64)), lab(64))
    loop(P, s)
def vits_compiled():
    m = timm_m("vit_small_patch16_224"); P = list(m.parameters()); c = torch.compile(m)
    def s():
        with amp(): return F.cross_entropy(c(img(128)), lab(128))
    loop(P, s)
def fasterrcnn():
    import torchvision; m = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None).to(dev).train(); P = [p for p in m.parameters() if p.requires_grad]
    def s():
        x = [torch.rand(3, 600, 800, device=dev) for _ in range(4)]
        t = [dict(boxes=torch.tensor([[20., 30., 300., 400.], [100., 100., 500., 350.]], device=dev), labels=torch.tensor([1, 2], device=dev)) for _ in range(4)]
        return sum(m(x, t).values())
    loop(P, s, opt=torch.optim.SGD(P, 1e-4, momentum=0.9))
def deeplab_amp():
    import torchvision; m = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None).to(dev).train(); P = list(m.parameters())
    def s():
        with amp(): return F.cross_entropy(m(img(8, 512))["out"], torch.randint(0, 21, (8, 512, 512), device=dev))
    loop(P, s, opt=torch.optim.SGD(P, 1e-2))
def conv(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU())
class UNet(nn.Module):
    def __init__(self, c=64):
        super().__init__(); self.i = nn.Conv2d(3, c, 3, padding=1); self.d = nn.ModuleList([conv(c, c), conv(c, 2 * c), conv(2 * c, 4 * c)]); self.m = conv(4 * c, 4 * c); self.u = nn.ModuleList([conv(8 * c, 2 * c), conv(4 * c, c), conv(2 * c, c)]); self.o = nn.Conv2d(c, 3, 1)
    def forward(self, x):
        h = self.i(x); k = []
        for d in self.d: h = d(h); k.append(h); h = F.avg_pool2d(h, 2)
        h = self.m(h)
        for u in self.u: h = F.interpolate(h, scale_factor=2, mode="nearest"); h = u(torch.cat([h, k.pop()], 1))
        return self.o(h)
def unet_f32():
    m = UNet(96).to(dev); P = list(m.parameters())
    def s():
        x = img(16, 128); return F.mse_loss(m(x + torch.randn_like(x)), x)
    loop(P, s)
def unet_bf16():
    m = UNet(128).to(dev); P = list(m.parameters())
    def s():
        x = img(16, 128)
        with amp(): return F.mse_loss(m(x + torch.randn_like(x)), x)
    loop(P, s)
def segformer_f16():
    m = hf("SegformerForSemanticSegmentation", "SegformerConfig", num_labels=150, depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768); P = list(m.parameters())
    def s():
        with amp(torch.float16): return m(pixel_values=img(8, 512), labels=torch.randint(0, 150, (8, 512, 512), device=dev)).loss
    loop(P, s, scaler=torch.amp.GradScaler("cuda"))
def clip_bf16():
    m = hf("CLIPModel", "CLIPConfig"); P = list(m.parameters())
    def s():
        with amp(): return m(input_ids=ids(64, 77, 49000), pixel_values=img(64), return_loss=True).loss
    loop(P, s)
def resnet_lightning():
    import lightning as L, torchvision
    class M(L.LightningModule):
        def __init__(self): super().__init__(); self.m = torchvision.models.resnet34(num_classes=100)
        def training_step(self, b, i): return F.cross_entropy(self.m(b[0]), b[1])
        def configure_optimizers(self): return torch.optim.Adam(self.parameters(), 1e-3)
    class D(torch.utils.data.Dataset):
        def __len__(self): return 100000
        def __getitem__(self, i): return torch.zeros(3, 224, 224), 1
    L.Trainer(max_steps=STEPS, precision="bf16-mixed", accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(M(), torch.utils.data.DataLoader(D(), 128, num_workers=4))
def encoder_f32():
    m = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 12).to(dev); h = nn.Linear(512, 1000).to(dev); P = [*m.parameters(), *h.parameters()]
    loop(P, lambda: F.cross_entropy(h(m(torch.randn(32, 256, 512, device=dev))).mean(1), lab(32)))
CASES = [k for k, v in list(globals().items()) if callable(v) and getattr(v, "__module__", "") == "__main__" and k not in ("ids", "loop", "hf", "amp", "Block", "GPT", "trainer", "img", "lab", "timm_m", "conv", "UNet")]
if NAME == "list": print(" ".join(CASES))
else: globals()[NAME]()
