"""Conversations: the template's text, and only the assistant's words as targets."""

import json

import pytest
from palimpsa_surgery.base.errors import DataError, UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path, load_tokenizer
from palimpsa_surgery.recipes.chat import iter_conversations, render_chat
from palimpsa_surgery.recipes.data import open_text
from palimpsa_surgery.recipes.packing import IGNORED, TokenStream

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TALK = [
    {"role": "user", "content": "what is a row"},
    {"role": "assistant", "content": "a line of a table"},
    {"role": "user", "content": "and a column"},
    {"role": "assistant", "content": "a field of every row"},
]


@pytest.fixture
def tokenizer():
    tokenizer = load_tokenizer(embedded_checkpoint_path())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_the_text_is_the_templates_and_the_assistants_words_are_marked(tokenizer):
    ids, mask = render_chat(TALK, tokenizer)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == tokenizer.apply_chat_template(TALK, tokenize=False)
    trained = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on][:-1])
    assert trained == "a line of a table\na field of every row\n"
    assert mask[-1] == 1


def test_a_conversation_that_ends_with_the_user_ends_unmarked(tokenizer):
    _, mask = render_chat(TALK[:3], tokenizer)
    assert mask[-1] == 0
    assert sum(mask) > 0


def test_windows_of_conversations_predict_the_assistant_only(tokenizer, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n\n" + json.dumps({"messages": TALK[:2]}) + "\n")
    store = open_text(path, tokenizer, chat=True, cache=tmp_path / "cache")
    window = TokenStream(store).window(0, len(store.tokens) - 1)
    ids, mask = (
        first + second for first, second in zip(*(render_chat(t, tokenizer) for t in (TALK, TALK[:2])), strict=True)
    )
    assert window.input_ids.tolist() == ids[:-1]
    assert window.targets.tolist() == [token if on else IGNORED for token, on in zip(ids[1:], mask[1:], strict=True)]


def test_a_folder_of_conversations_is_read_in_order(tmp_path):
    for name, talk in (("b.jsonl", TALK[:2]), ("a.jsonl", TALK)):
        (tmp_path / name).write_text(json.dumps({"messages": talk}) + "\n")
    assert list(iter_conversations(tmp_path)) == [TALK, TALK[:2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"talk\.jsonl:1: expected a JSON object with `messages`"),
        ('{"text": "x"}', r"talk\.jsonl:1: expected a JSON object with `messages`"),
        ('{"messages": [{"role": "user"}]}', "must be a list of objects with `role` and `content`"),
    ],
)
def test_a_line_of_another_form_is_named(line, message, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        list(iter_conversations(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: holds no \.jsonl file"):
        list(iter_conversations(tmp_path / "nowhere.jsonl"))


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="has no chat template"):
        render_chat(TALK, tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages | length }} turns {% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UsageError, match="rewrites earlier turns"):
        render_chat(TALK, tokenizer)
