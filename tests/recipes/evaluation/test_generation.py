import json
import shutil

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError, PalimpsaError, UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.recipes.evaluation.generation import continue_text, generate
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from pico import with_first_token


@pytest.fixture(scope="module")
def loaded():
    source = embedded_checkpoint_path()
    return load_model(source), load_tokenizer(source)


def test_greedy_text_is_the_most_likely_continuation(loaded):
    model, tokenizer = loaded
    ids = tokenizer("CREATE TABLE", add_special_tokens=False, return_tensors="pt")["input_ids"]
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    expected = tokenizer.decode(ids[0, -6:], skip_special_tokens=True)
    assert continue_text(model, tokenizer, "CREATE TABLE", max_new_tokens=6) == expected


def test_sampling_repeats_with_its_seed(loaded):
    def sample(seed):
        return continue_text(*loaded, "The database", max_new_tokens=12, temperature=1.5, seed=seed)

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_a_folder_is_enough():
    assert generate(embedded_checkpoint_path(), "SELECT", max_new_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt has no token"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ("a", {"temperature": -0.5}, r"temperature is -0\.5"),
        (
            "a",
            {"temperature": 1e-40},
            r"temperature is 1e-40, expected 0 .* or a number from 1e-06",
        ),
        ("a", {"temperature": float("nan")}, "temperature is nan"),
        ("a", {"temperature": float("inf")}, "temperature is inf"),
        ("a", {"seed": 2**64}, "seed is 18446744073709551616, expected a number of at most 64 bits"),
        ("a", {"seed": -(2**63) - 1}, "seed is -9223372036854775809"),
        (b"a\xff".decode("utf-8", "surrogateescape"), {}, "the prompt is not UTF-8 text"),
    ],
)
def test_requests_that_make_no_sense(loaded, prompt, options, message):
    with pytest.raises(UsageError, match=message):
        continue_text(*loaded, prompt, **options)


@pytest.mark.parametrize("options", [{"temperature": 1e-6}, {"temperature": 1e30}, {"seed": 2**64 - 1}, {"seed": -1}])
def test_numbers_at_the_edge_of_what_makes_sense(loaded, options):
    assert isinstance(continue_text(*loaded, "a", max_new_tokens=2, **{"temperature": 1.0, **options}), str)


def by_transformers(folder, prompt, seed):
    """What the README's lines print, and no more than eight tokens of it."""
    tokenizer = load_tokenizer(folder)
    given = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(seed)
    added = load_model(folder).generate(**given, max_new_tokens=8)[0, given["input_ids"].shape[1] :]
    return tokenizer.decode(added, skip_special_tokens=True)


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.mark.parametrize("first_token", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "temperature": 1.3, "top_k": 7},
        {"do_sample": True, "top_p": 0.5},
        {"repetition_penalty": 3.0},
        {"num_beams": 3},
        {"return_dict_in_generate": True},
    ],
)
def test_the_generation_config_holds_as_in_transformers(folder, settings, first_token):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0, **settings}))
    if first_token:
        content = json.loads((folder / "tokenizer.json").read_text())
        with_first_token(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))
    if "return_dict_in_generate" in settings:
        assert generate(folder, "the table", max_new_tokens=8)
        return
    for seed in range(2):
        expected = by_transformers(folder, "the table", seed)
        assert generate(folder, "the table", max_new_tokens=8, seed=seed) == expected


@pytest.mark.parametrize("stop", ["(", ["(", "zzz"]], ids=["one", "several"])
def test_texts_that_stop_it_hold_as_in_transformers(folder, stop):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    given = tokenizer("the table", return_tensors="pt")
    added = model.generate(**given, max_new_tokens=8)[0, given["input_ids"].shape[1] :]
    word = tokenizer.decode(added[2]).strip() if isinstance(stop, str) else [tokenizer.decode(added[2]).strip(), "zzz"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "stop_strings": word}))
    stopped = load_model(folder).generate(**given, max_new_tokens=8, pad_token_id=0, tokenizer=tokenizer)
    expected = tokenizer.decode(stopped[0, given["input_ids"].shape[1] :])
    assert len(expected) < len(tokenizer.decode(added))
    assert generate(folder, "the table", max_new_tokens=8) == expected


@pytest.mark.parametrize("end", [[], None])
def test_a_config_that_names_no_end_takes_the_tokenizers(folder, end):
    text = generate(folder, "the table", max_new_tokens=8)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    assert generate(folder, "the table", max_new_tokens=8) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_healing": True}, "^generation_config.json has token_healing = True: token_healing changes the prompt"),
        (
            {"do_sample": True, "temperature": 0.0},
            r"has do_sample = True, temperature = 0.0, which transformers refuses \(`temper.*\); correct that file$",
        ),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            "num_beam_groups = 2, which transformers ref",
        ),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha = 0.6, which transformers refuses"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation is not supported with stateful models"),
        ({"cache_implementation": "quantized"}, "cache_implementation = 'quantized', which transformers refuses"),
        ({"num_beams": 0}, "num_beams = 0, which transformers refuses"),
        ({"stop_strings": []}, r"stop_strings = \[\], which transformers refuses"),
        ({"num_return_sequences": 3}, r"model: transformers refuses its generation_config.json \(Greedy methods"),
        (
            {"max_new_tokens": "x"},
            r"model: transformers refuses its generation_config.json \(.*; correct that file, or",
        ),
        ({"eos_token_id": "x"}, "has eos_token_id = 'x', expected a token's number or a list of them"),
    ],
)
def test_a_generation_config_that_cannot_be_followed_is_named(folder, settings, message):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **settings}))
    with pytest.raises(PalimpsaError, match=message) as caught:
        generate(folder, "the table", max_new_tokens=4)
    assert "\n" not in str(caught.value)


def test_a_token_without_a_row_in_the_prompt_is_refused(loaded):
    model, _ = loaded
    other = load_tokenizer(embedded_checkpoint_path())
    other.add_special_tokens({"pad_token": "<|far|>"})
    for number in range(8):
        other.add_tokens(f"<|far{number}|>", special_tokens=True)
    with pytest.raises(
        UsageError, match=r"spells <\|far7\|>, whose id 4101 the model's embedding of 4096 rows does not"
    ):
        continue_text(model, other, "a <|far7|>")


@pytest.mark.parametrize("listed", [False, True])
def test_each_end_token_of_the_generation_config_ends_the_text(folder, listed):
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    ids = tokenizer("the table", return_tensors="pt")["input_ids"]
    added = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    end = added[3].item()
    assert end not in added[:3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4095, end] if listed else end}))
    assert generate(folder, "the table", max_new_tokens=8) == tokenizer.decode(added[:4])


def test_without_a_generation_config_the_end_is_that_of_the_tokenizer(loaded):
    model, tokenizer = loaded
    ids = tokenizer("CREATE TABLE", return_tensors="pt")["input_ids"]
    added = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    other = load_tokenizer(embedded_checkpoint_path())
    other.eos_token = other.convert_ids_to_tokens(added[1].item())
    model = load_model(embedded_checkpoint_path())
    model.generation_config.eos_token_id = None
    assert continue_text(model, other, "CREATE TABLE", max_new_tokens=4) == tokenizer.decode(added[:1])


def test_a_temperature_of_zero_takes_the_most_likely_whatever_the_config_says(folder):
    greedy = generate(folder, "the table", max_new_tokens=8)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 5.0}')
    assert generate(folder, "the table", max_new_tokens=8, temperature=0) == greedy
    assert generate(folder, "the table", max_new_tokens=8) != greedy


@pytest.mark.parametrize(
    ("weight", "value", "message"),
    [
        ("backbone.layers.1.mixer.D", float("nan"), r"backbone\.layers\.1\.mixer\.D has weights that are not finite"),
        ("backbone.norm_f.weight", 3e38, "its weights are, so the numbers grew too large"),
    ],
)
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_logits_that_are_not_finite_are_refused(weight, value, message, temperature):
    model = load_model(embedded_checkpoint_path(), dtype=torch.float32)
    torch.nn.init.constant_(model.get_parameter(weight), value)
    tokenizer = load_tokenizer(embedded_checkpoint_path())
    with pytest.raises(CheckpointError, match=f"the logits after 0 of the new tokens are not finite; {message}"):
        continue_text(model, tokenizer, "CREATE TABLE", temperature=temperature)
