import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.recipes.generation import continue_text, generate
from palimpsa_surgery.surgery.loading import load_model
from palimpsa_surgery.surgery.tokenizer import load_tokenizer


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
    ],
)
def test_requests_that_make_no_sense(loaded, prompt, options, message):
    with pytest.raises(UsageError, match=message):
        continue_text(*loaded, prompt, **options)
