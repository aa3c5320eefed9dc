"""Conversations of data sets in one form; what a template could not be given is refused with its place."""

import json

import pytest
from palimpsa_surgery.base.errors import DataError
from palimpsa_surgery.recipes.data.conversations import iter_conversations

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 3}}}


def read(tmp_path, *lines, name="talk.jsonl"):
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return list(iter_conversations(path))


def answer(**keys):
    return {"messages": [TALK[0], {"role": "assistant", **keys}]}


@pytest.mark.parametrize(
    "line",
    [
        {"messages": TALK},
        {"messages": TALK, "id": 3, "source": "x", "tools": None, "images": []},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{**TALK[0], "name": None}, {**TALK[1], "tool_calls": [], "weight": 1}]},
        answer(content=[{"type": "text", "text": "a"}]),
    ],
)
def test_all_forms_of_a_conversation_are_one(tmp_path, line):
    [conversation] = read(tmp_path, line)
    assert conversation.messages == TALK
    assert conversation.where.endswith("talk.jsonl:1")
    assert (conversation.tools, conversation.untrained) == (None, frozenset())


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"function": {"name": "look", "arguments": '{"at": 3}'}}],
        [{"name": "look", "arguments": {"at": 3}}],
        json.dumps([CALL]),
    ],
)
def test_calls_of_tools_have_the_form_that_templates_read(tmp_path, calls):
    [conversation] = read(tmp_path, answer(content=None, tool_calls=calls))
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_a_system_text_and_weights_are_kept(tmp_path, as_text):
    schema = {"name": "look", "parameters": {}}
    tools = json.dumps([schema]) if as_text else [schema]
    [conversation] = read(tmp_path, {**answer(content="a", weight=0), "tools": tools, "system": "be brief"})
    assert conversation.tools == [{"type": "function", "function": schema}]
    assert conversation.messages[0] == {"role": "system", "content": "be brief"}
    assert conversation.untrained == {2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ({"text": "x"}, "has keys text; expected a JSON object with `messages`"),
        ({"messages": []}, "must be a list of objects"),
        ({"messages": TALK, "conversations": TALK}, "has both"),
        ({"messages": [{"role": "user"}]}, "message 1: has no content"),
        (answer(content=None), "message 2: has no content"),
        (answer(content=3), "message 2: has a int as content"),
        (answer(content=[{"type": "image_url", "image_url": {}}]), r"message 2: has a part of content \(image_url\)"),
        (answer(content="a", weight=0.5), "has the weight 0.5; expected 0"),
        (answer(content="a", tool_calls=[{"id": 1}]), "a tool call without a function's name"),
        (answer(tool_calls=[{"name": "f", "arguments": "{"}]), "calls f with arguments that are no JSON object"),
        (
            {"messages": [{"role": "model", "content": "a"}]},
            "has the role 'model', expected one of .* name .* assistant",
        ),
        ({"messages": [{"role": "User", "content": "a"}]}, "has the role 'User', expected one of system"),
        ({"conversations": [{"from": "observation", "value": "a"}]}, "is from 'observation'; expected system, human"),
        ({"messages": TALK, "functions": [{}]}, "has functions"),
        ({"messages": TALK, "images": ["a.png"]}, "has images"),
        ({"messages": TALK, "tools": "look"}, "`tools` must be a list"),
    ],
)
def test_a_line_of_another_form_is_named(line, message, tmp_path):
    with pytest.raises(DataError, match=rf"talk\.jsonl:2: .*{message}"):
        read(tmp_path, {"messages": TALK}, line)


def test_conversations_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_bytes('{"messages": [{"role": "user", "content": "café"}]}'.encode("latin1"))
    with pytest.raises(DataError, match=r"talk\.jsonl:1: is not UTF-8"):
        list(iter_conversations(path))


def test_a_folder_is_read_in_order_and_what_is_left_out_is_said(tmp_path, caplog):
    read(tmp_path, {"messages": TALK}, name="b.jsonl")
    read(tmp_path, {"messages": TALK[:1]}, name="a.jsonl")
    (tmp_path / "c.jsonl.zst").write_bytes(b"(\xb5/\xfd")
    assert [one.messages for one in iter_conversations(tmp_path)] == [TALK[:1], TALK]
    assert "2 files read, a.jsonl, b.jsonl; left out: c.jsonl.zst (of another kind)" in caplog.text


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: does not exist"):
        list(iter_conversations(tmp_path / "nowhere.jsonl"))
