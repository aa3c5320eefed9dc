"""Checkpoints: by name, whole or not at all, and never put into the wrong run."""

import errno
import json
import os
import shutil

import pytest
import torch
from palimpsa_surgery.base.errors import TrainingError
from palimpsa_surgery.recipes.training import checkpointing
from palimpsa_surgery.recipes.training.checkpointing import (
    Position,
    latest_checkpoint,
    load_checkpoint,
    model_key,
    prune,
    read_position,
    save_checkpoint,
    trained_parameters,
)
from safetensors.torch import load_file, save_file
from torch import nn


def trained_net(seed=0, steps=3):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        advance(net, optimizer)
    return net, optimizer


def advance(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def position(step=3, **changes):
    return Position(
        **{"step": step, "tokens": 10 * step, "model": "m", "source": "s", "data": "d", "seed": 0, **changes}
    )


def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
    net, optimizer = trained_net()
    path = save_checkpoint(tmp_path, net, optimizer, position(), keep=2)
    other, its_optimizer = trained_net(seed=1, steps=0)
    other[1].bias.data.copy_(net[1].bias)
    assert load_checkpoint(path, other, its_optimizer, position(0)) == position()
    for _ in range(3):
        advance(net, optimizer)
        advance(other, its_optimizer)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_frozen_tensors_are_not_repeated(tmp_path):
    net, optimizer = trained_net()
    assert "1.bias" not in trained_parameters(net)
    path = save_checkpoint(tmp_path, net, optimizer, position(), keep=2)
    stored = checkpointing.safe_open(path / "training.safetensors", framework="pt")
    assert not [name for name in stored.keys() if "1.bias" in name]  # noqa: SIM118


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_newest_are_kept(keep, tmp_path):
    net, optimizer = trained_net()
    for step in (1, 2, 9, 10):
        save_checkpoint(tmp_path, net, optimizer, position(step), keep=keep)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"step-{n}" for n in (1, 2, 9, 10)[-keep:])
    assert latest_checkpoint(tmp_path).name == "step-10"


def test_half_written_folders_are_not_seen_and_cleared(tmp_path):
    net, optimizer = trained_net()
    save_checkpoint(tmp_path, net, optimizer, position(1), keep=2)
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "training.safetensors").write_bytes(b"half")
    (tmp_path / ".step-7.tmp-abc").mkdir()
    assert latest_checkpoint(tmp_path).name == "step-1"
    prune(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize(
    "left", [(), ("state.json",), ("training.safetensors",), ("training.safetensors", "state.json")]
)
def test_a_kill_amid_pruning_leaves_nothing_for_good(left, tmp_path):
    net, optimizer = trained_net()
    for step in (1, 2):
        save_checkpoint(tmp_path, net, optimizer, position(step), keep=2)
    for file in (tmp_path / "step-1").iterdir():
        if file.name not in left:
            file.unlink()
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_folders_of_other_names_are_the_users(tmp_path):
    net, optimizer = trained_net()
    for step in (1, 2):
        save_checkpoint(tmp_path, net, optimizer, position(step), keep=2)
    (tmp_path / "step-1").rename(tmp_path / "step-1-good")
    (tmp_path / "step-notes").mkdir()
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1-good", "step-2", "step-notes"]
    assert latest_checkpoint(tmp_path).name == "step-2"


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    net, optimizer = trained_net()
    first = save_checkpoint(tmp_path, net, optimizer, position(1), keep=1)

    def full(tensors, path):
        path.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpointing, "save_file", full)
    with pytest.raises(TrainingError, match=r"step-2: could not be written .*No space left.*step-1 is whole"):
        save_checkpoint(tmp_path, net, optimizer, position(2), keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    load_checkpoint(first, *trained_net(seed=1), position(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "other layers are swapped, or other parameters train"),
        ({"source": "other"}, "the model is another"),
        ({"data": "other"}, "the training text, or the tokenizer, is another"),
        ({"seed": 1}, "the seed is another"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(changes, message, tmp_path):
    net, optimizer = trained_net()
    path = save_checkpoint(tmp_path, net, optimizer, position(), keep=2)
    with pytest.raises(TrainingError, match=f"step-3: cannot be resumed, {message}"):
        load_checkpoint(path, net, optimizer, position(0, **changes))


def test_the_model_key_knows_layers_and_shapes():
    net, _ = trained_net()
    key = model_key(net, [1])
    assert key == model_key(trained_net(seed=5)[0], [1])
    assert key != model_key(net, [2])
    net[1].bias.requires_grad_(True)
    assert key != model_key(net, [1])


def flipped(path, place=-5):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def changed(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


DAMAGE = [
    ("training.safetensors", lambda file: os.truncate(file, 50), "cannot be read"),
    ("training.safetensors", lambda file: file.unlink(), "cannot be read"),
    ("training.safetensors", flipped, r".* is not as it was written \(its checksum is another\)"),
    ("training.safetensors", lambda file: changed(file, lambda t: t.pop("param/0.weight")), "lacks param/0.weight"),
    ("training.safetensors", lambda file: changed(file, lambda t: t.pop("exp_avg/0.bias")), "lacks exp_avg/0.bias"),
    (
        "training.safetensors",
        lambda file: changed(file, lambda t: t.update({"param/0.weight": t["param/0.weight"].T.contiguous()})),
        "param/0.weight is not as it was written",
    ),
    (
        "training.safetensors",
        lambda file: changed(file, lambda t: t.update({"param/9.bias": torch.ones(1)})),
        "holds param/9.bias, which the run does not train",
    ),
    ("state.json", lambda file: os.truncate(file, 30), "cannot be read .* is not JSON"),
    ("state.json", lambda file: file.write_text(file.read_text().replace('"tokens": 30', '"tokens": 31')), "is not as"),
]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("file", "damage", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_the_file(file, damage, message, alone, tmp_path):
    net, optimizer = trained_net()
    if not alone:
        save_checkpoint(tmp_path, net, optimizer, position(2), keep=2)
    path = save_checkpoint(tmp_path, net, optimizer, position(3), keep=2)
    damage(path / file)
    advice = "there is no earlier checkpoint, .* --force" if alone else "delete step-3 and resume: .* from step-2"
    with pytest.raises(TrainingError, match=rf"^step-3/{file}: {message}.*; {advice}$"):
        load_checkpoint(path, net, optimizer, position(0))


def test_a_flip_of_any_byte_of_the_values_is_seen(tmp_path):
    net, optimizer = trained_net()
    path = save_checkpoint(tmp_path, net, optimizer, position(), keep=2)
    file = path / "training.safetensors"
    whole = file.read_bytes()
    for place in range(8 + int.from_bytes(whole[:8], "little"), len(whole)):
        file.write_bytes(whole)
        flipped(file, place)
        with pytest.raises(TrainingError, match="is not as it was written"):
            load_checkpoint(path, net, optimizer, position(0))


def as_an_earlier_release_wrote_it(path):
    state = path / "state.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps({key: content[key] for key in content if key not in ("tensors", "checksum")}))
    return path


def test_a_checkpoint_without_checksums_is_resumed_and_one_that_lacks_a_tensor_refused(tmp_path):
    net, optimizer = trained_net()
    path = as_an_earlier_release_wrote_it(save_checkpoint(tmp_path, net, optimizer, position(), keep=2))
    assert load_checkpoint(path, *trained_net(seed=1), position(0)) == position()
    changed(path / "training.safetensors", lambda tensors: tensors.pop("param/0.bias"))
    with pytest.raises(TrainingError, match=r"step-3/training\.safetensors: lacks param/0\.bias;"):
        load_checkpoint(path, net, optimizer, position(0))


def test_a_parameter_that_no_gradient_has_reached_has_no_state(tmp_path):
    net, optimizer = trained_net()
    optimizer.state.pop(net[0].bias)
    path = save_checkpoint(tmp_path, net, optimizer, position(), keep=2)
    other, its_optimizer = trained_net(seed=1, steps=0)
    assert load_checkpoint(path, other, its_optimizer, position(0)) == position()
    assert other[0].bias not in its_optimizer.state


def test_another_version_is_refused_by_name(tmp_path):
    net, optimizer = trained_net()
    path = save_checkpoint(tmp_path, net, optimizer, position(), keep=2)
    state = path / "state.json"
    state.write_text(state.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    with pytest.raises(TrainingError, match=r"state\.json: is of another version"):
        read_position(path)


def test_no_checkpoint_is_none(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    shutil.rmtree(tmp_path)
    assert latest_checkpoint(tmp_path) is None
