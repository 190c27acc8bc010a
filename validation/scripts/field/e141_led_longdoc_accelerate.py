"""Long-document summarisation: LED (windowed encoder attention) + 🤗 Accelerate.

label smoothing, gradient accumulation, clipping, Adafactor, beam search on the validation documents.
"""
import argparse
import random
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import Adafactor, LEDConfig, LEDForConditionalGeneration, get_linear_schedule_with_warmup

PAD, BOS, EOS = 1, 0, 2


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--window", type=int, default=512)
    p.add_argument("--max_source", type=int, default=4096)
    p.add_argument("--max_target", type=int, default=256)
    p.add_argument("--batch_size", type=int, default=3)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--updates", type=int, default=5)
    p.add_argument("--smoothing", type=float, default=0.1)
    p.add_argument("--beams", type=int, default=4)
    p.add_argument("--gen_len", type=int, default=48)
    p.add_argument("--d_model", type=int, default=768)
    p.add_argument("--layers", type=int, default=6)
    return p.parse_args()


def synth_docs(n, args, vocab):
    docs = []
    for _ in range(n):
        length = random.randint(args.max_source // 2, args.max_source)
        doc = [BOS] + random.choices(range(4, vocab), k=length - 2) + [EOS]
        summ = [BOS] + doc[1:-1:37][: random.randint(args.max_target // 4, args.max_target - 2)] + [EOS]
        docs.append((doc, summ))
    return docs


def collator(rows):
    def pad(seqs, value):
        width = max(map(len, seqs))
        return torch.tensor([s + [value] * (width - len(s)) for s in seqs])

    ids = pad([r[0] for r in rows], PAD)
    glob = torch.zeros_like(ids)
    glob[:, 0] = 1                      # global attention on <s>
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), "global_attention_mask": glob,
            "labels": pad([r[1] for r in rows], -100)}


def smoothed_nll(logits, labels, eps):
    logp = F.log_softmax(logits.float(), dim=-1)
    mask = labels.ne(-100)
    nll = -logp.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    uniform = -logp.mean(-1)
    return (((1 - eps) * nll + eps * uniform) * mask).sum() / mask.sum()


def main():
    args = parse()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accum)
    set_seed(141)
    config = LEDConfig(
        vocab_size=50265, d_model=args.d_model, encoder_layers=args.layers, decoder_layers=args.layers,
        encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=4 * args.d_model,
        decoder_ffn_dim=4 * args.d_model, attention_window=args.window, max_encoder_position_embeddings=args.max_source,
        max_decoder_position_embeddings=512, dropout=0.1, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )
    model = LEDForConditionalGeneration(config)
    optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False, warmup_init=False)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, args.updates)
    train = DataLoader(synth_docs(args.batch_size * args.accum * args.updates, args, config.vocab_size),
                       batch_size=args.batch_size, shuffle=True, collate_fn=collator)
    valid = DataLoader(synth_docs(2, args, config.vocab_size), batch_size=2, collate_fn=collator)
    model, optimizer, scheduler, train, valid = accelerator.prepare(model, optimizer, scheduler, train, valid)
    accelerator.print(f"parameters: {sum(p.numel() for p in model.parameters()):,}")

    model.train()
    seen = 0
    for batch in train:
        with accelerator.accumulate(model):
            labels = batch.pop("labels")
            decoder_in = labels.roll(1, dims=1).masked_fill(labels.roll(1, dims=1) == -100, PAD)
            decoder_in[:, 0] = config.decoder_start_token_id
            out = model(**batch, decoder_input_ids=decoder_in, use_cache=False)
            loss = smoothed_nll(out.logits, labels, args.smoothing)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen += 1
            accelerator.print(f"update {seen}: loss {loss.item():.4f} norm {float(norm):.3f} src {batch['input_ids'].size(1)} "
                              f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

    model.eval()
    torch.cuda.reset_peak_memory_stats()
    hits = total = 0
    for batch in valid:
        labels = batch.pop("labels")
        with torch.no_grad(), accelerator.autocast():
            gen = accelerator.unwrap_model(model).generate(**batch, num_beams=args.beams, max_new_tokens=args.gen_len,
                                                           min_new_tokens=args.gen_len, length_penalty=2.0,
                                                           no_repeat_ngram_size=3)
        for hyp, ref in zip(gen.tolist(), labels.tolist()):
            ref = {t for t in ref if t > 3}
            hits += len(ref & set(hyp))
            total += len(ref)
    accelerator.print(f"unigram recall {hits / max(total, 1):.4f}; generation peak "
                      f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.print("state saved")


if __name__ == "__main__":
    main()
