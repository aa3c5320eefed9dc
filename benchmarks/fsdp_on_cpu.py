"""`palimpsa` sharded by Accelerate's FSDP2 on CPUs through gloo, which Accelerate itself offers on accelerators only.

    python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/fsdp_on_cpu.py finetune MODEL ...

For finding faults where there is no GPU: wrapping, sharding, checkpoints and gathering are the code that runs on GPUs,
with the settings of the shipped `fsdp2` configuration. Times say nothing.
"""

from __future__ import annotations

import os

from palimpsa_surgery.base.files import load_yaml
from palimpsa_surgery.cli import main
from palimpsa_surgery.recipes.launch import find_config


def environment() -> dict[str, str]:
    """What `accelerate launch` would set for the shipped configuration."""
    settings = load_yaml(find_config("fsdp2"))["fsdp_config"]
    settings["fsdp_transformer_cls_to_wrap"] = settings.pop("fsdp_transformer_layer_cls_to_wrap")
    return {
        "ACCELERATE_USE_FSDP": "true",
        **{
            name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in settings.items()
        },
    }


def allow_cpu() -> None:
    """Accelerate shards only where it counts accelerators: its processes on CPUs are counted as such."""
    from accelerate.state import DistributedType, PartialState

    original = PartialState.__init__

    def start(self, cpu: bool = False, **options) -> None:
        original(self, cpu, **options)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = start


if __name__ == "__main__":
    os.environ.update(environment())
    allow_cpu()
    main()
