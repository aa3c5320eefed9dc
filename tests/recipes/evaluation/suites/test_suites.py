"""What suites share, and those that measure loss, speed and importance."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError, DataError, EvaluationError, UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path, token_sequences
from palimpsa_surgery.mixers.importance import record_importance
from palimpsa_surgery.recipes.evaluation.suites import importance as suite_importance
from palimpsa_surgery.recipes.evaluation.suites import loss as suite_loss
from palimpsa_surgery.recipes.evaluation.suites import positions as suite_positions
from palimpsa_surgery.recipes.evaluation.suites import speed as suite_speed
from palimpsa_surgery.recipes.evaluation.suites.suite import SUITES, EvalOptions, EvalText, Subject, suite_module
from palimpsa_surgery.recipes.training.validation import evaluate_loss
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from tiny import make_model

LENGTHS = (24, 50)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded_checkpoint_path())


@pytest.fixture(scope="module")
def evaluated(tokenizer):
    return EvalText(None, tokenizer, longest=50, tokens=300, seed=0, vocab_size=4096)


@pytest.fixture(scope="module")
def subject():
    return Subject(make_model(layers=(0, 1)).eval(), "tiny")


def options(**changes):
    return EvalOptions(**{"lengths": LENGTHS, "tokens": 300, "trials": 2, "chunk": 32, "repeats": 2, **changes})


def value(measurement):
    return measurement.samples[:, 0].sum() / measurement.samples[:, 1].sum()


@pytest.mark.parametrize("name", SUITES)
def test_each_suite_is_a_module_with_a_run(name):
    assert callable(suite_module(name).run)
    assert (Path(__file__).parents[4] / "recipes" / "evaluation" / "suites" / f"{name}.py").is_file()


def test_an_unknown_suite_is_refused_with_the_names():
    with pytest.raises(UsageError, match=r"suite 'los' does not exist; expected some of loss, positions"):
        suite_module("los")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (1, 8)}, "a sequence of 1 token predicts nothing"),
        ({"lengths": ()}, "lengths is empty"),
        ({"pairs": (1,)}, "1 pair would leave nothing to choose"),
        ({"depths": (0.5, 1.5)}, r"depths: \(0\.5, 1\.5\) must lie between 0"),
        ({"trials": 0}, "trials is 0"),
        ({"chunk": -1}, "chunk is -1"),
    ],
)
def test_options_that_make_no_sense(changes, message):
    with pytest.raises(UsageError, match=message):
        EvalOptions(**changes)


def test_lengths_are_sorted_and_each_counts_once():
    assert EvalOptions(lengths=(64, 16, 64)).lengths == (16, 64)


def test_the_text_is_the_same_at_every_length(evaluated):
    short, whole = evaluated.sequences(25), evaluated.sequences(50)
    assert (len(short), len(whole)) == (12, 6)
    assert np.array_equal(np.concatenate(short), np.concatenate(whole))
    assert np.array_equal(evaluated.stream, np.concatenate(whole))
    assert [len(sequence) for sequence in evaluated.sequences(24)] == [24] * 12, "what is left of a block is not used"


def test_the_text_comes_from_all_over_the_data(tokenizer, tmp_path):
    path = tmp_path / "text.jsonl"
    words = ["table", "index", "query", "commit", "schema", "column", "vacuum", "cursor"]
    path.write_text("".join(json.dumps({"text": f" {word}" * 60}) + "\n" for word in words))
    spread = EvalText(path, tokenizer, longest=20, tokens=100, seed=0, vocab_size=4096)
    assert len({sequence[10] for sequence in spread.sequences(20)}) > 3
    assert len({sequence[10] for sequence in token_sequences(path, tokenizer, tokens=100, seq_len=20)[0]}) < 3


def test_filler_goes_round_and_has_an_end(evaluated):
    assert np.array_equal(evaluated.filler(20, 2), evaluated.stream[40:60])
    assert len(evaluated.filler(250, 7)) == 250
    assert not len(evaluated.filler(0, 3))
    with pytest.raises(DataError, match="the text holds 300 tokens, fewer than the 301"):
        evaluated.filler(301, 0)


def test_rare_tokens_are_known_and_absent_from_the_text_around(evaluated, tokenizer):
    around = evaluated.filler(60, 0)
    drawn = evaluated.rare_tokens(20, around, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == 20
    assert set(drawn.tolist()) <= set(evaluated.stream.tolist()) - set(tokenizer.all_special_ids) - set(around.tolist())
    with pytest.raises(DataError, match="too few to draw 900"):
        evaluated.rare_tokens(900, around, np.random.default_rng(0))


def test_rare_tokens_are_still_found_when_the_text_around_uses_all_of_them(evaluated):
    drawn = evaluated.rare_tokens(4, evaluated.stream, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == 4


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    with pytest.raises(CheckpointError, match="embedding has 100 rows"):
        EvalText(None, tokenizer, longest=50, tokens=300, seed=0, vocab_size=100).sequences(20)


def test_the_loss_is_that_of_training_at_every_length(subject, evaluated):
    found = {m.key: m for m in suite_loss.run(subject, evaluated, options()).measurements}
    for length in LENGTHS:
        expected = evaluate_loss(subject.model, evaluated.sequences(length))
        loss = found["loss", ("length", length)]
        assert value(loss) == pytest.approx(expected.loss, abs=1e-5)
        assert len(loss.samples) == expected.sequences
        assert found["perplexity", ("length", length)].exponential


def test_a_text_shorter_than_a_sequence_is_measured_whole_and_said(subject, tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("CREATE TABLE t(a, b); SELECT a FROM t;")
    short = EvalText(tmp_path / "short.txt", tokenizer, longest=64, tokens=64, seed=0, vocab_size=4096)
    found, notes = suite_loss.run(subject, short, options(lengths=(64,)))
    assert found[0].at["length"] == len(short.stream) < 64
    assert "does not fill a sequence of 64 tokens" in notes[0]


@pytest.mark.parametrize("targets", [1, 15, 16, 31, 49, 4095])
def test_buckets_cover_every_target_once(targets):
    edges = suite_positions.bucket_edges(targets)
    assert [position for start, stop in edges for position in range(start, stop)] == list(range(1, targets + 1))
    assert all(stop <= 2 * start for start, stop in edges[1:])


def test_positions_by_chunked_prefill_equal_one_pass(evaluated):
    subject = Subject(make_model().double().eval(), "tiny")
    pieces = suite_positions.run(subject, evaluated, options(chunk=7)).measurements
    sequences = torch.from_numpy(np.stack(evaluated.sequences(50)))
    with torch.no_grad():
        logits = subject.model(input_ids=sequences, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, sequences[:, 1:], reduction="none").numpy()
    assert [m.at for m in pieces] == [{"from": 1, "to": 15}, {"from": 16, "to": 31}, {"from": 32, "to": 49}]
    for measurement in pieces:
        part = losses[:, measurement.at["from"] - 1 : measurement.at["to"]]
        np.testing.assert_allclose(measurement.samples[:, 0], part.sum(axis=1), rtol=1e-6)
        assert (measurement.samples[:, 1] == part.shape[1]).all()


def test_loss_and_positions_share_their_passes(evaluated):
    subject, passes = Subject(make_model().eval(), "tiny"), []
    subject.model.register_forward_hook(lambda *_: passes.append(1))
    subject.model.backbone.register_forward_hook(lambda *_: passes.append(1))
    suite_loss.run(subject, evaluated, options())
    count = len(passes)
    suite_positions.run(subject, evaluated, options())
    assert len(passes) == count > 0


def test_a_loss_that_is_not_finite_names_model_sequence_and_token(evaluated):
    model = make_model().eval()
    with torch.no_grad():
        model.backbone.embeddings.weight[evaluated.sequences(24)[3][5]] = float("nan")
    with pytest.raises(
        EvaluationError, match=r"broken: the loss is not finite in sequence \d+ of 24 tokens, first at token"
    ):
        suite_loss.run(Subject(model, "broken"), evaluated, options())


def test_speed_counts_tokens_over_seconds(subject, evaluated):
    found = {m.name: m for m in suite_speed.run(subject, evaluated, options(decode_tokens=3)).measurements}
    assert set(found) == {"prefill", "decode", "state of a sequence"}
    for name, tokens in (("prefill", 50), ("decode", 3)):
        assert found[name].samples.shape == (2, 2)
        assert (found[name].samples[:, 0] == tokens).all()
        assert (found[name].samples[:, 1] > 0).all()
        assert not found[name].paired
    config = subject.model.config
    recurrent = config.num_heads * (config.head_dim + config.beta_groups) * config.state_size
    convolved = (config.num_heads * config.head_dim + 2 * config.n_groups * config.state_size) * 3
    assert value(found["state of a sequence"]) == 2 * 4 * (recurrent + convolved) / 2**20


@pytest.mark.parametrize("chunk", [500, 24, 7])
def test_importance_in_pieces_equals_that_of_whole_texts(subject, evaluated, chunk):
    found = {m.key: m for m in suite_importance.run(subject, evaluated, options(chunk=chunk)).measurements}
    for length in LENGTHS:
        for number, sequence in enumerate(evaluated.sequences(50)[:2]):
            with torch.no_grad(), record_importance(subject.model) as recorder:
                subject.model(input_ids=torch.from_numpy(sequence[None, :length]), use_cache=False)
            for layer, expected in recorder.layers().items():
                place = (("layer", layer), ("length", length))
                wanted = {"metaplasticity ratio": expected.ratio, "mean importance": expected.mean}
                wanted["head spread"] = expected.head_spread
                for name, figure in wanted.items():
                    assert found[(name, *place)].samples[number, 0] == pytest.approx(figure, rel=1e-4)
                for head, ratio in enumerate(expected.head_ratio if length == 50 else ()):
                    detail = found[(suite_importance.HEAD_RATIO, *place, ("head", head))]
                    assert detail.samples[number, 0] == pytest.approx(ratio, rel=1e-4)
                    assert detail.detail


def test_a_plain_mamba2_has_no_importance(evaluated):
    found, notes = suite_importance.run(Subject(make_model(layers=()).eval(), "plain"), evaluated, options())
    assert not found
    assert notes == ["plain has no swapped layer, so it has no importance"]
