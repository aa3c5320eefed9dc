"""Run by two processes through gloo: a model sharded by FSDP2 trains, saves, restores and gives its tensors back.

Everything but the sharding itself is the package's own code.
"""

from pathlib import Path

import torch
from palimpsa_surgery.recipes.training.checkpointing import Position, load_checkpoint
from palimpsa_surgery.recipes.training.finetune import make_accelerator, open_streams
from palimpsa_surgery.recipes.training.loop import train
from palimpsa_surgery.recipes.training.losses import CausalLoss
from palimpsa_surgery.recipes.training.metrics import Training
from palimpsa_surgery.recipes.training.modes import prepare_mode
from palimpsa_surgery.recipes.training.optim import make_optimizer
from palimpsa_surgery.recipes.training.recipe import load_recipe
from palimpsa_surgery.recipes.training.saving import gather, save_model
from palimpsa_surgery.recipes.training.validation import evaluate_loss
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def train_sharded(folder: Path, recipe_file: Path, out: Path) -> None:
    """Of a process whose environment is as a launcher makes it."""
    recipe = load_recipe(recipe_file)
    accelerator = make_accelerator(recipe, out)
    assert accelerator.num_processes == 2
    out.mkdir(exist_ok=True)
    checkpoint = open_checkpoint(folder)
    loss = CausalLoss(prepare_mode(load_model(checkpoint), checkpoint, recipe))
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    for block in loss.model.backbone.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(loss, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in loss.parameters())
    optimizer = make_optimizer(loss, recipe)
    stream, validation = open_streams(accelerator, recipe, load_tokenizer(folder), loss.model.config.vocab_size)
    position = Position(0, 0, "model", checkpoint.fingerprint, stream.store.key, recipe.seed)
    accelerator.no_sync = lambda module: torch.enable_grad()  # gradients are reduced each time, which is as right
    run = Training(accelerator, loss, optimizer, stream, recipe, out, position)
    run.validate = lambda: evaluate_loss(loss, validation, accelerator=accelerator)  # before each checkpoint
    train(run)
    trained = gather(loss)
    run.position = load_checkpoint(out / "checkpoints" / "step-1", loss, optimizer, position)
    train(run)
    again = gather(loss)
    assert run.position.step == 3
    assert all(torch.equal(tensor, again[name]) for name, tensor in trained.items())
    if accelerator.is_main_process:
        save_model(trained, checkpoint, out / "final", recipe)
    accelerator.wait_for_everyone()
