"""The sequences of the recall task, checked token by token and against numpy's own weighted draws."""

import numpy as np
import pytest
from mqar_data import POWER, Task, recall_batch
from palimpsa_surgery.base.errors import UsageError

TASKS = [Task(8, 2), Task(16, 4), Task(33, 5), Task(64, 15)]


def batch_of(task, vocab=32, rows=50, seed=0):
    return recall_batch(task, vocab, rows, np.random.default_rng(seed))


def read_back(ids, task):
    """What a reader with a perfect memory knows: key to value from the pairs, by a loop."""
    return {int(ids[2 * n]): int(ids[2 * n + 1]) for n in range(task.pairs)}


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_key_is_asked_for_once_and_its_value_is_due(task):
    batch = batch_of(task)
    assert batch.ids.shape == (50, task.length)
    for ids, positions, values in zip(*batch, strict=True):
        memory = read_back(ids, task)
        assert len(memory) == task.pairs
        assert len(set(memory.values())) == task.pairs
        assert [memory[int(ids[p])] for p in positions] == values.tolist()
        assert sorted(int(ids[p]) for p in positions) == sorted(memory)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_keys_and_values_come_from_their_halves_and_questions_from_after_the_pairs(task):
    batch = batch_of(task)
    keys, values = batch.ids[:, 0 : 2 * task.pairs : 2], batch.ids[:, 1 : 2 * task.pairs : 2]
    assert int(keys.min()) >= 1
    assert int(keys.max()) < 16 <= int(values.min())
    assert int(batch.positions.min()) >= 2 * task.pairs
    assert int(batch.positions.max()) < task.length
    assert not ((batch.positions - 2 * task.pairs) % 2).any()


def test_the_rest_is_random_tokens_of_the_whole_vocabulary():
    task = Task(64, 4)
    batch = batch_of(task, rows=400)
    rest = np.ones(batch.ids.shape, bool)
    rest[:, : 2 * task.pairs] = False
    np.put_along_axis(rest, batch.positions.numpy(), False, axis=1)
    counts = np.bincount(batch.ids.numpy()[rest], minlength=32)
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_gaps_follow_the_power_law_as_drawn_by_numpy_without_replacement():
    task, rows = Task(28, 4), 6000
    slots = (task.length - 2 * task.pairs) // 2
    weight = np.arange(1, slots + 1) ** (POWER - 1)
    drawn = np.random.default_rng(1)
    expected = np.bincount(
        np.concatenate([drawn.choice(slots, task.pairs, replace=False, p=weight / weight.sum()) for _ in range(rows)]),
        minlength=slots,
    )
    gaps = (batch_of(task, rows=rows).positions.numpy() - 2 * task.pairs) // 2
    # Counts are 1,500 and more: five standard deviations of the quotient of two such counts are less than 18 %.
    np.testing.assert_allclose(np.bincount(gaps.ravel(), minlength=slots), expected, rtol=0.18)
    first = np.bincount(gaps[:, 0], minlength=slots) / rows
    np.testing.assert_allclose(first, weight / weight.sum(), atol=0.03)


def test_each_pair_is_as_likely_to_hold_any_key():
    keys = batch_of(Task(32, 8), rows=20000).ids[:, 0].numpy()
    counts = np.bincount(keys, minlength=16)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:] / 20000, 1 / 15, atol=0.01)


def test_the_generator_decides_everything():
    assert all(bool((a == b).all()) for a, b in zip(batch_of(TASKS[1]), batch_of(TASKS[1]), strict=True))
    assert not bool((batch_of(TASKS[1]).ids == batch_of(TASKS[1], seed=1).ids).all())


@pytest.mark.parametrize(("task", "vocab"), [(Task(16, 5), 64), (Task(64, 16), 32)], ids=["length", "vocabulary"])
def test_a_task_without_room_is_refused(task, vocab):
    with pytest.raises(UsageError, match=f"task {task}: .*take fewer pairs"):
        batch_of(task, vocab)
