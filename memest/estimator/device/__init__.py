"""What stands in for a GPU while the code of a model, or a whole script, runs on the meta device.

One file builds on another in this order; none imports from below:

- `tensors` says where a tensor lies, `storages` what is known of its memory, `patches` lets names
  of torch stand for others. `values` keeps the small integers that models branch on, `guesses`
  says what a script reads where nothing is known. `ranks` says which rank of several runs,
  `broadcasts` what ranks have told it, `collectives` what it gets from the others.
- `cuda_semantics` (with `recurrent`, `fused` and `double_backward`) decides as torch does for CUDA
  tensors, above autograd; `engine` numbers what a backward makes as the thread of a GPU does.
- `mode` runs every operator below autograd (with `in_place` and `indices`, which say what the GPU
  runs instead). It owns `memory` (with `history` and `garbage`), `timeline`, `kernel_calls`,
  `host` (with `host_draws`), `attribution` (with `labels`, `lines` and `modules`), and the values
  of `values`, `assumed` and `card_draws`. `sparse_rules` runs operators of sparse tensors.
- `attributes/` (what a tensor says and where it goes), `cuda/` (`torch.cuda`, NVML), `encoder`,
  `distributed/` (one rank of several), `files/` (checkpoints, published weights) and `libraries/`
  put all this in torch's place.
- `virtual_gpu` is the session in which a script sees it.
"""
