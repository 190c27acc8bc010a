import math
import os
import tempfile
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch.utils.data import DataLoader, Dataset
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

warnings.filterwarnings("ignore")

MASK, PAD, VOCAB = 103, 0, 30522


class Corpus(Dataset):
    def __init__(self, n, length, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randint(1000, VOCAB, (n, length), generator=g, dtype=torch.int32)

    def __len__(self):
        return self.x.size(0)

    def __getitem__(self, i):
        return self.x[i].long()


class ElectraPretrain(L.LightningModule):
    """Replaced-token detection: small generator + base discriminator, manual optimization."""

    def __init__(self, lr_gen=5e-4, lr_disc=2e-4, layer_decay=0.85, accumulate=2, disc_weight=50.0, total_updates=6):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        gen = ElectraConfig(vocab_size=VOCAB, embedding_size=768, hidden_size=256, num_hidden_layers=12,
                            num_attention_heads=4, intermediate_size=1024, max_position_embeddings=512)
        disc = ElectraConfig(vocab_size=VOCAB, embedding_size=768, hidden_size=768, num_hidden_layers=12,
                             num_attention_heads=12, intermediate_size=3072, max_position_embeddings=512)
        self.generator = ElectraForMaskedLM(gen)
        self.discriminator = ElectraForPreTraining(disc)
        # tied token and position embeddings, as in the paper
        self.generator.electra.embeddings.word_embeddings = self.discriminator.electra.embeddings.word_embeddings
        self.generator.electra.embeddings.position_embeddings = self.discriminator.electra.embeddings.position_embeddings
        self.generator.generator_lm_head.weight = self.discriminator.electra.embeddings.word_embeddings.weight

    def corrupt(self, ids):
        masked = torch.rand(ids.shape, device=ids.device) < 0.15
        return ids.masked_fill(masked, MASK), masked

    def forward(self, ids):
        inp, masked = self.corrupt(ids)
        gen_logits = self.generator(input_ids=inp).logits
        picked = gen_logits[masked]
        mlm = F.cross_entropy(picked.float(), ids[masked])
        with torch.no_grad():
            gumbel = -torch.log(-torch.log(torch.rand_like(picked, dtype=torch.float32).clamp_(1e-9, 1 - 1e-7)))
            fake = ids.clone()
            fake[masked] = (picked.float() + gumbel).argmax(-1)
        is_fake = (fake != ids).float()
        scores = self.discriminator(input_ids=fake).logits
        rtd = F.binary_cross_entropy_with_logits(scores.float(), is_fake)
        return mlm, rtd, scores, is_fake

    def training_step(self, batch, batch_idx):
        og, od = self.optimizers()
        mlm, rtd, scores, is_fake = self(batch)
        loss = (mlm + self.hparams.disc_weight * rtd) / self.hparams.accumulate
        self.manual_backward(loss)
        if (batch_idx + 1) % self.hparams.accumulate == 0:
            self.clip_gradients(og, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            self.clip_gradients(od, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            for o in (og, od):
                o.step()
                o.zero_grad()
            for s in self.lr_schedulers():
                s.step()
        self.log_dict({"mlm": mlm.detach(), "rtd": rtd.detach()}, prog_bar=False)
        if batch_idx % 2:
            print(f"batch {batch_idx}: mlm {mlm.item():.3f} rtd {rtd.item():.4f}")

    def validation_step(self, batch, batch_idx):
        mlm, rtd, scores, is_fake = self(batch)
        acc = ((scores > 0).float() == is_fake).float().mean()
        self.log_dict({"val_mlm": mlm, "val_rtd": rtd, "val_acc": acc})

    def configure_optimizers(self):
        hp = self.hparams
        depth = self.discriminator.config.num_hidden_layers
        groups = []
        for name, p in self.discriminator.named_parameters():
            if "encoder.layer." in name:
                d = depth - int(name.split("encoder.layer.")[1].split(".")[0])
            else:
                d = depth + 1 if "embeddings" in name else 0
            groups.append({"params": [p], "lr": hp.lr_disc * hp.layer_decay ** d,
                           "weight_decay": 0.01 if p.dim() > 1 else 0.0})
        shared = {id(p) for p in self.discriminator.parameters()}
        own = [p for p in self.generator.parameters() if id(p) not in shared]
        og = torch.optim.AdamW(own, lr=hp.lr_gen, weight_decay=0.01)
        od = torch.optim.AdamW(groups, lr=hp.lr_disc, betas=(0.9, 0.98), eps=1e-6)
        shape = lambda t: min(1.0, (t + 1) / 2) * max(0.0, 1 - t / hp.total_updates)
        return [og, od], [torch.optim.lr_scheduler.LambdaLR(o, shape) for o in (og, od)]


class MemoryPrinter(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 4 == 3:
            print(f"  [{batch_idx}] max allocated {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

    def on_validation_end(self, trainer, module):
        print({k: round(float(v), 4) for k, v in trainer.callback_metrics.items()})


if __name__ == "__main__":
    L.seed_everything(140, workers=True)
    bs, T, accumulate, updates = 64, 256, 2, 6
    train = DataLoader(Corpus(bs * accumulate * updates, T, 0), batch_size=bs, shuffle=True, drop_last=True)
    val = DataLoader(Corpus(bs * 2, T, 1), batch_size=bs * 2)
    with tempfile.TemporaryDirectory() as root:
        trainer = L.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                            default_root_dir=root, num_sanity_val_steps=0,
                            callbacks=[EMAWeightAveraging(decay=0.99), MemoryPrinter()])
        module = ElectraPretrain(accumulate=accumulate, total_updates=updates)
        trainer.fit(module, train, val)
        path = os.path.join(root, "disc.pt")
        torch.save(module.discriminator.state_dict(), path)
        print("saved %.1f MB" % (os.path.getsize(path) / 1e6))
