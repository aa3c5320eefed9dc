"""The probes measure what they say: an oracle gets all of it right, a guesser what chance gives."""

import numpy as np
import pytest
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.recipes.evaluation.suites import needle as suite_needle
from palimpsa_surgery.recipes.evaluation.suites import recall as suite_recall
from palimpsa_surgery.recipes.evaluation.suites.suite import EvalOptions, EvalText, Subject
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from probes import Guesser, Oracle

VOCABULARY = 4096
OPTIONS = EvalOptions(lengths=(48, 96), tokens=2048, trials=3, pairs=(4, 8), depths=(0.0, 0.5, 1.0), chunk=128)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded_checkpoint_path())


@pytest.fixture(scope="module")
def text(tokenizer):
    return EvalText(None, tokenizer, longest=128, tokens=2048, seed=0, vocab_size=VOCABULARY)


def figures(result):
    return {
        measurement.key: measurement.samples[:, 0].sum() / measurement.samples[:, 1].sum() for measurement in result[0]
    }


@pytest.mark.parametrize("chunk", [128, 31, 5])
@pytest.mark.parametrize("suite", [suite_recall, suite_needle])
def test_an_oracle_is_right_every_time_in_one_pass_or_in_pieces(text, suite, chunk):
    oracle = Oracle(VOCABULARY)
    options = EvalOptions(**{**OPTIONS.__dict__, "chunk": chunk})
    found = figures(suite.run(Subject(oracle, "oracle"), text, options))
    assert found
    for (name, *_), value in found.items():
        assert value == pytest.approx(0.0, abs=1e-4) if name == "key loss" else value == 1.0
    assert max(oracle.lengths) <= chunk


def test_a_guesser_finds_the_values_by_chance(text):
    options = EvalOptions(lengths=(16,), trials=60, pairs=(4, 10), chunk=4096)
    for (name, (_, pairs), _), value in figures(
        suite_recall.run(Subject(Guesser(VOCABULARY), "g"), text, options)
    ).items():
        if name == "exact":
            assert value < 0.02
        else:
            questions = 60 * pairs
            assert value == pytest.approx(1 / pairs, abs=4 * (1 / pairs / questions) ** 0.5)


def test_a_guesser_finds_no_needle(text):
    found = figures(suite_needle.run(Subject(Guesser(VOCABULARY), "g"), text, OPTIONS))
    assert all(value < 0.2 for (name, *_), value in found.items() if name == "accuracy")
    assert all(value > 6 for (name, *_), value in found.items() if name == "key loss"), "log 4096 is 8.3"


def test_chance_and_direction_are_said(text):
    options = EvalOptions(lengths=(16,), trials=1, pairs=(4,))
    accuracy, exact = suite_recall.run(Subject(Guesser(VOCABULARY), "g"), text, options).measurements[:2]
    assert (accuracy.chance, exact.chance) == (0.25, 0.0)
    assert accuracy.better == "higher"


@pytest.mark.parametrize(("pairs", "distance"), [(2, 0), (5, 33), (16, 64)])
def test_a_recall_sequence_is_pairs_text_questions(text, pairs, distance):
    ids, values, due = suite_recall.recall_sequence(text, pairs, distance, number=1)
    assert len(ids) == 4 * pairs + distance
    table = dict(zip(ids[: 2 * pairs : 2].tolist(), ids[1 : 2 * pairs : 2].tolist(), strict=True))
    assert len(table) == pairs
    assert [table[ids[position]] for position in due] == values.tolist() == ids[due + 1].tolist()
    assert np.array_equal(ids[2 * pairs : 2 * pairs + distance], text.filler(distance, 1))
    assert not {*table, *table.values()} & set(text.filler(distance, 1).tolist())


def test_every_model_meets_the_same_questions_and_every_trial_others(text, tokenizer):
    again = EvalText(None, tokenizer, longest=128, tokens=2048, seed=0, vocab_size=VOCABULARY)
    first, second = (suite_recall.recall_sequence(t, 4, 32, 0)[0] for t in (text, again))
    assert np.array_equal(first, second)
    for number, seed in ((1, 0), (0, 1)):
        assert not np.array_equal(first[:8], suite_recall.recall_sequence(text, 4, 32, number, seed)[0][:8])
    assert not np.array_equal(
        suite_needle.needle_sequence(text, 64, 0.5, 0)[1], suite_needle.needle_sequence(text, 64, 0.5, 1)[1]
    )


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [48, 97])
def test_the_needle_lies_at_its_depth(text, tokenizer, length, depth):
    ids, key = suite_needle.needle_sequence(text, length, depth, number=2)
    needle = [*tokenizer(suite_needle.CUE, add_special_tokens=False)["input_ids"], *key]
    assert len(ids) == length
    assert ids[-len(needle) :].tolist() == needle
    starts = [i for i in range(length - len(needle)) if ids[i : i + len(needle)].tolist() == needle]
    assert starts == [round(depth * (length - 2 * len(needle)))]


def test_a_length_without_room_for_a_needle_is_refused(text):
    with pytest.raises(UsageError, match="20 tokens hold no needle; give at least"):
        suite_needle.needle_sequence(text, 20, 0.5, 0)
