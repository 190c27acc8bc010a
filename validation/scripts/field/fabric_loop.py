import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from transformers import ViTMAEConfig, ViTMAEForPreTraining


def main():
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(0)
    with fabric.init_module():
        mae = ViTMAEForPreTraining(ViTMAEConfig(hidden_size=768, num_hidden_layers=12, decoder_hidden_size=512, decoder_num_hidden_layers=8))
        probe = torch.nn.Linear(768, 100)
    opt = torch.optim.AdamW(mae.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05)
    opt2 = torch.optim.SGD(probe.parameters(), lr=0.1)
    mae, opt = fabric.setup(mae, opt)
    probe, opt2 = fabric.setup(probe, opt2)
    ds = torch.utils.data.TensorDataset(torch.randn(48 * 6, 3, 224, 224), torch.randint(0, 100, (48 * 6,)))
    dl = fabric.setup_dataloaders(torch.utils.data.DataLoader(ds, 48, shuffle=True))
    for i, (x, y) in enumerate(dl):
        accumulating = i % 2 == 0
        with fabric.no_backward_sync(mae, enabled=accumulating):
            out = mae(pixel_values=x)
            fabric.backward(out.loss / 2)
        if not accumulating:
            fabric.clip_gradients(mae, opt, max_norm=0.02)
            opt.step()
            opt.zero_grad()
        with torch.no_grad(), fabric.autocast():
            feats = mae.module.vit(pixel_values=x).last_hidden_state[:, 0] if hasattr(mae, "module") else None
        loss = F.cross_entropy(probe(feats.float()), y)
        fabric.backward(loss)
        opt2.step()
        opt2.zero_grad()
        fabric.print(i, out.loss.item(), loss.item())
    fabric.save("/tmp/memest_fabric.ckpt", {"mae": mae, "opt": opt, "step": i})
    state = {"mae": mae, "opt": opt, "step": 0}
    fabric.load("/tmp/memest_fabric.ckpt", state)
    import os
    os.remove("/tmp/memest_fabric.ckpt")
    fabric.print(state["step"], torch.cuda.memory_allocated())


if __name__ == "__main__":
    main()
