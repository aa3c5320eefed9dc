"""Conversations as tokens: the template's text, the assistant's words as targets, nothing left out without a word."""

import json

import pytest
from palimpsa_surgery.base.errors import DataError, UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.recipes.data.chat import render_chat
from palimpsa_surgery.recipes.data.conversations import Conversation
from palimpsa_surgery.recipes.data.documents import open_text
from palimpsa_surgery.recipes.data.packing import IGNORED, TokenStream, split_documents
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer

HEAD = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
TEMPLATE = HEAD + "[{{ m.role }}] {{ m.content }}\n" + PROMPT
TRIMS = "{{ bos_token }}be kind\n" + HEAD + "[{{ m.role }}] {{ m.content | trim }}\n" + PROMPT
MARKS = (
    HEAD + "[{{ m.role }}]>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]>{% endif %}"
)
THINKS = (  # reasoning is kept in the last turn alone
    HEAD + "[{{ m.role }}] {% if m.reasoning_content and loop.last %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.content }}\n" + PROMPT
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}" + HEAD + "[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}{{ '\\n' }}" + PROMPT
)
ALTERNATES = (
    HEAD + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}\n" + PROMPT
)
TALK = [
    {"role": "user", "content": "what is a row"},
    {"role": "assistant", "content": "a line of a table"},
    {"role": "user", "content": "and a column"},
    {"role": "assistant", "content": "a field of every row"},
]
SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "t1"}}}


@pytest.fixture
def tokenizer():
    tokenizer = load_tokenizer(embedded_checkpoint_path())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def talk(*contents, **more):
    roles = ("user", "assistant")
    return Conversation([{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **more)


def trained(tokenizer, conversation):
    """The text of every sequence, and its parts that are targets, without the end token."""
    found = []
    for ids, mask in render_chat(conversation, tokenizer):
        assert len(ids) == len(mask)
        end = len(ids) - (ids[-1] == tokenizer.eos_token_id)
        on = [token for token, one in zip(ids[:end], mask[:end], strict=True) if one]
        found.append((tokenizer.decode(ids[:end]), tokenizer.decode(on)))
    return found


def test_the_text_is_the_templates_and_the_assistants_words_are_marked(tokenizer):
    [(ids, mask)] = render_chat(Conversation(TALK), tokenizer)
    assert ids[-1] == tokenizer.eos_token_id
    assert mask[-1] == 1
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert trained(tokenizer, Conversation(TALK)) == [(rendered, "a line of a table\na field of every row\n")]


def test_a_conversation_that_ends_with_the_user_ends_unmarked(tokenizer):
    [(_, mask)] = render_chat(Conversation(TALK[:3]), tokenizer)
    assert mask[-1] == 0
    assert sum(mask) > 0


@pytest.mark.parametrize(
    ("template", "targets"),
    [(TRIMS, "a line\na field\n"), (MARKS, "  a line </s>a field</s>")],
)
def test_the_mask_follows_what_the_template_renders(tokenizer, template, targets):
    tokenizer.chat_template = template
    conversation = talk("what is a row", "  a line ", "and a column", "a field")
    rendered = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    assert trained(tokenizer, conversation) == [(rendered, targets)]


def test_marks_tell_where_a_first_message_of_the_assistant_begins(tokenizer):
    hello = Conversation([{"role": "assistant", "content": "hello"}, *TALK[:2]], where="t:1")
    with pytest.raises(DataError, match=r"t:1: begins with the assistant.*put a message before it"):
        render_chat(hello, tokenizer)
    tokenizer.chat_template = MARKS
    assert trained(tokenizer, hello)[0][1] == "hello</s>a line of a table</s>"


def test_each_turn_is_trained_after_the_history_it_was_written_after(tokenizer):
    tokenizer.chat_template = THINKS
    messages = [dict(message) for message in TALK]
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "rows", "columns"
    assert trained(tokenizer, Conversation(messages)) == [
        ("[user] what is a row\n[assistant] <rows>a line of a table\n", "<rows>a line of a table\n"),
        (
            "[user] what is a row\n[assistant] a line of a table\n[user] and a column\n"
            "[assistant] <columns>a field of every row\n",
            "<columns>a field of every row\n",
        ),
    ]
    assert len(trained(tokenizer, Conversation(TALK))) == 1


@pytest.mark.parametrize("seed", range(3))
def test_sequences_of_one_conversation_stay_on_one_side_of_the_split(tokenizer, tmp_path, seed):
    tokenizer.chat_template = THINKS
    path = tmp_path / "talk.jsonl"
    lines = []
    for number in range(6):
        messages = [{**m, "content": f"{m['content']} {number} {seed}"} for m in TALK]
        messages[1]["reasoning_content"] = messages[3]["reasoning_content"] = "so"
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join([*lines, lines[0]]))
    store = open_text(path, tokenizer, chat=True, cache=tmp_path / "cache")
    kept, out = split_documents(store, 0.3)
    assert store.records.tolist() == [n for n in range(7) for _ in range(2)]
    sides = [{number % 6 for number in store.records[side]} for side in (kept, out)]
    assert not sides[0] & sides[1]
    assert len(kept) + len(out) == 14


def test_a_weight_of_nothing_is_no_target(tokenizer):
    conversation = Conversation(TALK, untrained=frozenset({1}))
    assert trained(tokenizer, conversation)[0][1] == "a field of every row\n"


def test_tools_and_their_calls_reach_the_template(tokenizer):
    tokenizer.chat_template = TOOLS
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "seen", "name": "look", "tool_call_id": "1"},
        {"role": "assistant", "content": "it is there"},
    ]
    [(text, targets)] = trained(tokenizer, Conversation(messages, tools=[SCHEMA]))
    assert json.loads(text.splitlines()[0]) == [SCHEMA]
    assert targets == "(look at=t1)\nit is there\n"


@pytest.mark.parametrize(
    ("template", "change", "what"),
    [
        (TEMPLATE, {"tools": [SCHEMA]}, "the tools"),
        (TEMPLATE, {"options": {"enable_thinking": True}}, "the option enable_thinking"),
        (TEMPLATE, {"tool_calls": [CALL]}, r"tool_calls of message 2 \(assistant\)"),
        (TEMPLATE, {"reasoning_content": "so"}, r"reasoning_content of message 2 \(assistant\)"),
        (TEMPLATE, {"name": "Ann"}, r"name of message 2 \(assistant\)"),
        (
            TEMPLATE.replace("m.content", "m.content.split('</t>')[-1]"),
            {"content": "<t>a</t>b"},
            "content of message 2",
        ),
        (TEMPLATE.replace("[{{", "{% if m.role == 'user' %}{% continue %}{% endif %}[{{"), {}, r"content of message 1"),
    ],
)
def test_what_a_template_leaves_out_is_refused(tokenizer, template, change, what):
    tokenizer.chat_template = template
    messages = [TALK[0], TALK[1] | {k: v for k, v in change.items() if k not in ("tools", "options")}]
    rest = {k: v for k, v in change.items() if k in ("tools", "options")}
    with pytest.raises(DataError, match=f"talk.jsonl:3: the chat template leaves out {what}"):
        render_chat(Conversation(messages, "talk.jsonl:3", **rest), tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ALTERNATES, r"t:1: the chat template refuses the conversation \(roles must alternate\)"),
        (HEAD + "{{ m.content + 3 }}{% endfor %}", "t:1: the chat template refuses the conversation"),
        ("{% for %}", "t:1: the chat template refuses the conversation"),
    ],
)
def test_a_template_that_refuses_a_conversation_is_told_with_its_place(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        render_chat(Conversation([{"role": "system", "content": "be nice"}, *TALK], "t:1"), tokenizer)


def test_special_tokens_in_a_conversation_can_be_refused(tokenizer):
    conversation = talk("what ends a text", "<|endoftext|> does", where="t:4")
    assert len(render_chat(conversation, tokenizer)) == 1
    with pytest.raises(DataError, match=r"t:4: spells the special token <\|endoftext\|>"):
        render_chat(conversation, tokenizer, refuse_special_tokens=True)


def test_a_turn_that_ends_with_the_end_token_gets_no_second_one(tokenizer):
    tokenizer.chat_template = HEAD + "[{{ m.role }}] {{ m.content }}{{ eos_token }}\n" + PROMPT
    [(ids, _)] = render_chat(Conversation(TALK), tokenizer)
    assert ids.count(tokenizer.eos_token_id) == 4


def test_sequences_of_conversations_predict_the_assistant_only(tokenizer, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n\n" + json.dumps({"messages": TALK[:2]}) + "\n")
    store = open_text(path, tokenizer, chat=True, cache=tmp_path / "cache")
    sequence = TokenStream(store).sequence(0, len(store.tokens) - 1)
    rendered = [render_chat(Conversation(one), tokenizer)[0] for one in (TALK, TALK[:2])]
    ids, mask = (first + second for first, second in zip(*rendered, strict=True))
    assert sequence.input_ids.tolist() == ids[:-1]
    assert sequence.targets.tolist() == [token if on else IGNORED for token, on in zip(ids[1:], mask[1:], strict=True)]


def test_conversations_without_an_assistant_are_nothing_to_train_on(tokenizer, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK[:1]}))
    with pytest.raises(DataError, match="holds no words of an assistant"):
        open_text(path, tokenizer, chat=True, cache=tmp_path / "cache")


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="has no chat template"):
        render_chat(Conversation(TALK), tokenizer)


def test_a_template_that_prompts_in_another_way_is_refused(tokenizer):
    tokenizer.chat_template = TEMPLATE.replace("[assistant] {% endif", "[assistant] <think>{% endif")
    with pytest.raises(UsageError, match=r"renders message 2 in another way than it prompts for it"):
        render_chat(Conversation(TALK), tokenizer)


def test_a_tokenizer_that_begins_each_piece_with_a_space_is_not_cut(tokenizer):
    from tokenizers import pre_tokenizers

    pieces = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    tokenizer.backend_tokenizer.pre_tokenizer = pieces
    [(ids, mask)] = render_chat(Conversation(TALK), tokenizer)
    whole = tokenizer(tokenizer.apply_chat_template(TALK, tokenize=False), add_special_tokens=False)["input_ids"]
    assert ids[:-1] == whole
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on][:5]).strip().startswith("a line of")


@pytest.mark.parametrize(("tools", "expected"), [(None, "plain"), ([SCHEMA], "with tools")])
def test_of_several_templates_the_one_for_the_conversation_is_taken(tokenizer, tools, expected):
    tokenizer.chat_template = {"default": f"plain {TEMPLATE}", "tool_use": f"with tools {TOOLS}"}
    [(ids, _)] = render_chat(Conversation(TALK, tools=tools), tokenizer)
    assert tokenizer.decode(ids).startswith(expected)


def test_a_template_for_tools_that_leaves_them_out_is_refused(tokenizer):
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": f"with tools {TEMPLATE}"}
    with pytest.raises(DataError, match="leaves out the tools"):
        render_chat(Conversation(TALK, tools=[SCHEMA]), tokenizer)


def test_several_templates_of_which_none_is_the_default_are_refused(tokenizer):
    tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": TEMPLATE}
    with pytest.raises(UsageError, match="has the chat templates rag, tool_use, none of them named default"):
        render_chat(Conversation(TALK), tokenizer)


def without(role):
    return TEMPLATE.replace("[{{ m.role", "{% if m.role == '" + role + "' %}{% continue %}{% endif %}[{{ m.role")


LAST_USER = (
    "{% set last = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | last %}"
    "[user] {{ last }}\n{% for m in messages if m.role == 'assistant' %}[assistant] {{ m.content }}\n" + PROMPT
)


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("template", "messages", "number"),
    [
        (
            without("tool"),
            said(
                ("user", "warm?"), ("assistant", "I look"), ("tool", "12 degrees"), ("assistant", "It has 12 degrees")
            ),
            3,
        ),
        (
            without("system"),
            said(("system", "in French"), ("user", "say it in French"), ("assistant", "oui")),
            1,
        ),
        (without("system"), said(("system", "user"), ("user", "hello"), ("assistant", "yes")), 1),
        (
            without("system"),
            said(("user", "a b"), ("assistant", "c"), ("system", "b"), ("user", "b b"), ("assistant", "b")),
            3,
        ),
        (LAST_USER, said(("user", "one"), ("assistant", "1"), ("user", "one, two"), ("assistant", "2")), 1),
    ],
)
def test_words_of_a_message_that_stand_elsewhere_do_not_hide_that_it_is_left_out(tokenizer, template, messages, number):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=rf"t.jsonl:7: the chat template leaves out content of message {number} "):
        render_chat(Conversation(messages, "t.jsonl:7"), tokenizer)


@pytest.mark.parametrize(
    "template",
    [
        TRIMS,
        TEMPLATE.replace("m.content", "m.content | tojson"),
        TEMPLATE.replace("m.content", "m.content | upper"),
        # The words of a system turn may be put elsewhere, and a template may look into a message.
        "{% set s = messages[0].content %}{% for m in messages[1:] %}[{{ m.role }}] {{ m.content }}"
        "{% if m.role == 'user' and loop.first %} ({{ s }}){% endif %}\n" + PROMPT,
        TEMPLATE.replace(
            "[{{ m.role }}]", "{% if m.content.startswith('<r>') %}[r]{% else %}[{{ m.role }}]{% endif %}"
        ),
        TEMPLATE.replace("{{ m.content", "{{ '<t>' if '<t>' in m.content }}{{ m.content.split('<t>')[-1]"),
    ],
)
def test_what_a_template_renders_in_its_own_way_is_not_left_out(tokenizer, template):
    tokenizer.chat_template = template
    messages = said(("system", " be\n\nkind "), ("user", '<r>a "b"</r>'), ("assistant", "<t>c d"), ("user", ""))
    messages.append(TALK[1])
    [(ids, mask)] = render_chat(Conversation(messages), tokenizer)
    assert 0 < sum(mask) < len(ids)


ESCAPES = ["e", "tojson", "replace('<', '(lt)')"]
LONG = " ".join(f"<w{number}>" for number in range(40))


@pytest.mark.parametrize("cut", ["[:30] ~ m.content[-30:]", "[:30]", "[30:]"])
@pytest.mark.parametrize("escape", ["string", *ESCAPES])
def test_a_template_that_escapes_a_message_and_drops_a_part_of_it_is_refused(tokenizer, escape, cut):
    tokenizer.chat_template = TEMPLATE.replace("m.content", f"(m.content{cut}) | {escape}")
    with pytest.raises(DataError, match=r"t:1: the chat template leaves out content of message 1 \(user\)"):
        render_chat(Conversation(said(("user", LONG), ("assistant", "yes")), "t:1"), tokenizer)


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_that_escapes_a_message_whole_is_taken(tokenizer, escape):
    tokenizer.chat_template = TEMPLATE.replace("m.content", f"m.content | {escape}")
    messages = said(("user", f'{LONG} & "so"\n\t? é'), ("assistant", "a < b"))
    assert len(render_chat(Conversation(messages), tokenizer)) == 1


SPOKEN = (
    HEAD + "[{{ m.role }}]{% if m.role == 'assistant' and m.tool_calls and not m.content %}{{ m.tool_calls | tojson }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% else %}{{ m.content }}{% endif %}" + PROMPT
)


@pytest.mark.parametrize(
    ("content", "what"), [("", "message 2"), ("I look", r"tool_calls of message 2")], ids=["alone", "beside words"]
)
def test_a_turn_that_a_template_with_marks_does_not_mark_is_refused(tokenizer, content, what):
    tokenizer.chat_template = SPOKEN
    call = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    messages = [TALK[0], call, {"role": "tool", "content": "seen"}, TALK[1]]
    match = rf"t:1: the chat template marks nothing of {what} \(assistant\) with {{% generation %}}.*give .* weight 0"
    with pytest.raises(DataError, match=match):
        render_chat(Conversation(messages, "t:1"), tokenizer)
    [(ids, mask)] = render_chat(Conversation(messages, untrained=frozenset({1})), tokenizer)
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]).startswith("a line of a table</s>")


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("marks", [False, True])
def test_an_end_token_that_is_put_before_what_comes_next_is_trained_behind_every_turn(tokenizer, marks, space):
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    words = "{% if m.role == 'assistant' %}" + marked + "{% else %}{{ m.content }}{% endif %}"
    tokenizer.chat_template = (
        HEAD
        + f"[{{{{ m.role }}}}]{words if marks else '{{ m.content }}'}{{% if not loop.last %}}{space}{{{{ eos_token }}}}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}" + space + "{{ eos_token }}[assistant]{% endif %}"
    )
    [(ids, mask)] = render_chat(Conversation(TALK), tokenizer)
    targets = tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert targets == f"a line of a table{space}<|endoftext|>a field of every row<|endoftext|>"
    assert ids.count(tokenizer.eos_token_id) == 4


def test_an_end_token_that_opens_the_next_turn_is_no_second_end(tokenizer):
    tokenizer.chat_template = (
        HEAD
        + "{{ eos_token }}[{{ m.role }}]{{ m.content }}{{ eos_token }}"
        + PROMPT.replace("[assistant] ", "{{ eos_token }}[assistant]")
    )
    [(ids, mask)] = render_chat(Conversation(TALK), tokenizer)
    assert [i for i, on in zip(ids, mask, strict=True) if on].count(tokenizer.eos_token_id) == 2
