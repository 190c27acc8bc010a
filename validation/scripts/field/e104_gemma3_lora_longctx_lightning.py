# LoRA long-context adaptation of a Gemma-3-1B shaped decoder.
# Lightning 2.x: the model is created in configure_model so that it is born on the GPU in bf16.
import lightning as L
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.optimization import get_cosine_schedule_with_warmup

CTX = 4096
VOCAB = 262144


class LongContextData(L.LightningDataModule):
    def __init__(self, ctx=CTX, vocab=VOCAB, n_train=16, n_val=2, batch_size=1):
        super().__init__()
        self.ctx = ctx
        self.vocab = vocab
        self.n_train = n_train
        self.n_val = n_val
        self.batch_size = batch_size

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(7)
        prompt_len = self.ctx // 4

        def make(n):
            ids = torch.randint(10, self.vocab, (n, self.ctx), generator=g)
            labels = ids.clone()
            labels[:, :prompt_len] = -100  # loss on the completion only
            return TensorDataset(ids, labels)

        self.train_set, self.val_set = make(self.n_train), make(self.n_val)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class GemmaLoRA(L.LightningModule):
    def __init__(self, lr=2e-4, rank=32, warmup=1, num_layers=26):
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self):
        if self.model is not None:
            return
        config = Gemma3TextConfig(
            vocab_size=VOCAB,
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=self.hparams.num_layers,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            max_position_embeddings=32768,
            attn_implementation="eager",  # recommended for training Gemma
            use_cache=False,
        )
        base = Gemma3ForCausalLM(config)
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
        lora = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=self.hparams.rank,
            lora_alpha=2 * self.hparams.rank,
            lora_dropout=0.05,
            bias="none",
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        )
        self.model = get_peft_model(base, lora)
        self.model.print_trainable_parameters()

    def forward(self, input_ids, labels):
        return self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=labels)

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        loss = self(ids, labels).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        ids, labels = batch
        loss = self(ids, labels).loss
        self.log("val/loss", loss, batch_size=ids.size(0))
        self.log("val/ppl", torch.exp(loss.float()), batch_size=ids.size(0))

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.norm() for n, p in self.named_parameters() if "lora_B" in n and p.grad is not None]
        self.log("train/lora_B_grad", torch.stack(norms).mean())

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        opt = torch.optim.AdamW(params, lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.0)
        sched = get_cosine_schedule_with_warmup(
            opt, self.hparams.warmup, int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(3407)
    torch.set_float32_matmul_precision("high")
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        precision="bf16-true",
        max_epochs=1,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
        val_check_interval=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = GemmaLoRA()
    trainer.fit(module, datamodule=LongContextData())
    print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})
    print("peak allocated bytes:", torch.cuda.max_memory_allocated())
    print("peak reserved bytes:", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
