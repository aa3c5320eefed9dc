"""The picture of `docs/framework.md`, from fewer draws."""

import collisions
import pytest
import torch
from bayesian_filter import AFTER, BEFORE, FULL, RESET
from collisions import MEMORIES, NEW, OFTEN, OLD, SHARED, SUM

ROOT = collisions.Path(collisions.__file__).resolve().parents[2]


def test_later_keys_collide_with_the_fact_on_the_shared_channels_alone():
    keys, values = collisions.draw(3)
    assert torch.equal(keys[:OFTEN], keys[:1].expand(OFTEN, -1))
    assert torch.equal(values[:OFTEN], values[:1].expand(OFTEN, -1))
    assert not keys[OFTEN:, :-SHARED].any()
    assert keys[OFTEN:, -SHARED:].all()
    assert torch.allclose(keys.norm(dim=1), torch.ones(len(keys)).double())


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_holds_the_fact_until_something_collides(memory):
    assert collisions.errors(memory, 2)[OLD][:OFTEN].max() < 1e-6


def test_importance_keeps_what_is_old_and_costs_what_is_new():
    last = {memory: {what: x[-1] for what, x in collisions.errors(memory, 8).items()} for memory in MEMORIES}
    order = sorted(MEMORIES, key=lambda memory: last[memory][OLD])
    assert order == [FULL, BEFORE, SUM, AFTER, RESET]
    assert last[RESET][NEW] < 0.6 * last[AFTER][NEW]


def test_the_script_draws_the_picture_of_the_page(tmp_path, capsys):
    collisions.main(["-o", str(tmp_path / "out.png"), "--draws", "1"])
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.count("the newest pair") == len(MEMORIES)
    assert "(framework.png)" in (ROOT / "docs" / "framework.md").read_text(encoding="utf-8")
