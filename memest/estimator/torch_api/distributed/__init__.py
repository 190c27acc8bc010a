"""One rank of a process group, without communication.

- `process_group` makes groups of torch's `fake` backend under the name of the requested one.
- `ddp` lets torch's own reducer of `DistributedDataParallel` run on tensors without data.
- `fsdp` records storages that FSDP frees and allocates again, and propagates shapes of DTensors.
"""
