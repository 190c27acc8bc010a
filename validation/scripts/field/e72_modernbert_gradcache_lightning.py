"""Bi-encoder (ModernBERT-base size) trained with InfoNCE over large in-batch negatives.

Gradient caching: embed everything without graph, get d loss / d embedding, then redo the
forward in small chunks inside a backward hook. Works with Lightning's automatic optimization.
"""
import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import ModernBertConfig, ModernBertModel

PAD, CLS, SEP = 50283, 50281, 50282


class QueryPassagePairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.pairs = []
        for _ in range(n):
            nq = int(torch.randint(8, 48, (1,), generator=g))
            num_docs = int(torch.randint(80, 254, (1,), generator=g))
            doc = torch.randint(1000, 50000, (num_docs,), generator=g)
            query = doc[torch.randint(0, num_docs, (nq,), generator=g)]
            self.pairs.append((query, doc))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def collate(batch):
    def pack(seqs, max_len):
        ids = torch.full((len(seqs), max_len), PAD)
        for i, s in enumerate(seqs):
            s = torch.cat([torch.tensor([CLS]), s[: max_len - 2], torch.tensor([SEP])])
            ids[i, : len(s)] = s
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}

    queries, docs = zip(*batch)
    return {"query": pack(queries, 64), "doc": pack(docs, 256)}


class PairDataModule(L.LightningDataModule):
    def __init__(self, batch_size=192, n_train=192 * 8, n_val=384):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        self.train_set = QueryPassagePairs(self.hparams.n_train, 0)
        self.val_set = QueryPassagePairs(self.hparams.n_val, 1)

    def train_dataloader(self):
        return DataLoader(self.train_set, self.hparams.batch_size, shuffle=True, drop_last=True,
                          collate_fn=collate, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 128, collate_fn=collate)


class BiEncoder(L.LightningModule):
    def __init__(self, lr=5e-5, temperature=0.02, chunk_size=32, num_layers=22, hidden=768):
        super().__init__()
        self.save_hyperparameters()
        cfg = ModernBertConfig(num_hidden_layers=num_layers, hidden_size=hidden, intermediate_size=1152,
                               num_attention_heads=12, attn_implementation="sdpa")
        self.encoder = ModernBertModel(cfg)
        self.val_emb = []

    def embed(self, tok):
        h = self.encoder(**tok).last_hidden_state
        mask = tok["attention_mask"].unsqueeze(-1)
        pooled = (h * mask).sum(1) / mask.sum(1).clamp(min=1)
        return F.normalize(pooled.float(), dim=-1)

    def chunks(self, tok):
        n, c = tok["input_ids"].size(0), self.hparams.chunk_size
        for i in range(0, n, c):
            yield {k: v[i:i + c] for k, v in tok.items()}

    def info_nce(self, q, d):
        logits = q @ d.T / self.hparams.temperature
        target = torch.arange(len(q), device=q.device)
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))

    def training_step(self, batch, batch_idx):
        # pass 1: embeddings only
        with torch.no_grad():
            reps = {k: torch.cat([self.embed(c) for c in self.chunks(batch[k])]) for k in ("query", "doc")}
        reps = {k: v.detach().requires_grad_() for k, v in reps.items()}
        with torch.enable_grad():
            loss = self.info_nce(reps["query"], reps["doc"])
            loss.backward()
        cache = {k: v.grad for k, v in reps.items()}

        # pass 2 is triggered by Lightning calling .backward() on the returned loss
        def second_pass(grad_output):
            with torch.enable_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
                for key in ("query", "doc"):
                    grads = cache[key].split(self.hparams.chunk_size)
                    for chunk, g in zip(self.chunks(batch[key]), grads):
                        surrogate = (self.embed(chunk) * g).sum() * grad_output
                        surrogate.backward()

        loss = loss.detach().requires_grad_()
        loss.register_hook(second_pass)
        self.log("train_loss", loss.detach(), prog_bar=False)
        return loss

    def validation_step(self, batch, batch_idx):
        q, d = self.embed(batch["query"]), self.embed(batch["doc"])
        self.val_emb.append((q, d))
        self.log("val_loss", self.info_nce(q, d), batch_size=len(q))

    def on_validation_epoch_end(self):
        q, d = (torch.cat(x) for x in zip(*self.val_emb))
        hits = (q @ d.T).argmax(1) == torch.arange(len(q), device=q.device)
        self.log("val_recall@1", hits.float().mean())
        self.val_emb.clear()

    def configure_optimizers(self):
        decay = [p for n, p in self.named_parameters() if p.ndim >= 2]
        no_decay = [p for n, p in self.named_parameters() if p.ndim < 2]
        opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01},
                                 {"params": no_decay, "weight_decay": 0.0}], lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, self.hparams.lr, total_steps=int(total), pct_start=0.25)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class MemoryPrinter(L.Callback):
    def report(self, tag):
        print(f"{tag}: alloc {torch.cuda.max_memory_allocated() / 2**30:.3f} GiB, "
              f"reserved {torch.cuda.max_memory_reserved() / 2**30:.3f} GiB")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx in (0, 1):
            self.report(f"epoch {trainer.current_epoch} batch {batch_idx}")

    def on_validation_epoch_end(self, trainer, pl_module):
        self.report(f"val @ global step {trainer.global_step}")


if __name__ == "__main__":
    L.seed_everything(17)
    torch.set_float32_matmul_precision("high")
    trainer = L.Trainer(accelerator="cuda", devices=1, precision="bf16-mixed", max_epochs=2, accumulate_grad_batches=2,
                        gradient_clip_val=1.0, callbacks=[MemoryPrinter()], logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=1)
    trainer.fit(BiEncoder(), datamodule=PairDataModule())
    print({k: round(float(v), 4) for k, v in trainer.callback_metrics.items()})
    print("torch.cuda.max_memory_allocated =", torch.cuda.max_memory_allocated())
    print("torch.cuda.max_memory_reserved =", torch.cuda.max_memory_reserved())
