"""Conversations as data sets hold them, brought into the one form that chat templates of transformers read.

What a template could not be given, or would leave out without a word, is refused with its place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import DataError
from ...base.records import CHAT_SUFFIXES, iter_records

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_OF_THE_TALK = ("tools", "system", "chat_template_kwargs", "parallel_tool_calls")
_REFUSED = (
    *("functions", "documents", "images", "image", "videos", "video", "audio", "audios", "weight", "weights"),
    *("chosen", "rejected", "completion", "reasoning_content", "enable_thinking"),
)


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Attributes:
        messages: with `role`, `content` (text) and what else a template may read, such as `tool_calls`.
        where: its place, as `file:line`.
        tools: JSON schemas of the functions that the assistant may call.
        options: other values for the template.
        untrained: numbers of the assistant's messages that are no targets (`weight` 0).
    """

    messages: list[dict[str, Any]]
    where: str = "conversation"
    tools: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()


def iter_conversations(source: str | Path) -> Iterator[Conversation]:
    """The conversations of a file, a folder or a dataset: an object with `messages`, or ShareGPT's `conversations`.

    Raises:
        DataError: what cannot be read, or is no conversation that a template can be given, as `file:line`.
    """
    known = {"messages", "conversations", *_OF_THE_TALK}
    for where, value in iter_records(source, suffixes=CHAT_SUFFIXES):
        if not isinstance(value, dict) or not ("messages" in value or "conversations" in value):
            found = f"keys {', '.join(value)}" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise DataError(f"{where}: has {found}; expected a JSON object with `messages`")
        conversation = _conversation(value, where)
        beside = {key for key, item in value.items() if item is not None} - known
        if beside:
            logger.info("%s: not part of the conversations, and left out: %s", where, ", ".join(sorted(beside)))
            known |= beside
        yield conversation


def _conversation(value: dict[str, Any], where: str) -> Conversation:
    for key in _REFUSED:
        if value.get(key) not in (None, [], {}, ""):
            raise DataError(f"{where}: has {key}, which no chat template is given here; remove the key or the line")
    if value.get("messages") is not None and value.get("conversations") is not None:
        raise DataError(f"{where}: has both `messages` and `conversations`; keep one of them")
    messages = value.get("messages") if value.get("messages") is not None else value.get("conversations")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise DataError(f"{where}: `messages` must be a list of objects with `role` and `content`; correct the line")
    system = value.get("system")
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    places = [f"{where}: message {number + 1 - bool(system)}" for number in range(len(messages))]
    weights = [_weight(message, place) for message, place in zip(messages, places, strict=True)]
    options = value.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise DataError(f"{where}: `chat_template_kwargs` is a {type(options).__name__}; expected an object")
    return Conversation(
        messages=[_message(message, place) for message, place in zip(messages, places, strict=True)],
        where=where,
        tools=_tools(value.get("tools"), where),
        options=options,
        untrained=frozenset(number for number, weight in enumerate(weights) if not weight),
    )


def _weight(message: dict[str, Any], where: str) -> bool:
    weight = message.get("weight")
    if weight is None:
        return True
    if weight not in (0, 1):
        raise DataError(f"{where}: has the weight {weight!r}; expected 0 (no target) or 1")
    return bool(weight)


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    known = {key: item for key, item in message.items() if item is not None and key != "weight"}
    if "from" in known and "role" not in known:
        speaker = known.pop("from")
        if speaker not in _SHAREGPT:
            raise DataError(f"{where}: is from {speaker!r}; expected {', '.join(_SHAREGPT)}, or `role` and `content`")
        known = {"role": _SHAREGPT[speaker], "content": known.pop("value", None), **known}
    role = known.get("role")
    if role not in ROLES:
        hint = "; name the model's role assistant" if role in ("model", "bot", "gpt", "ai") else "; correct the line"
        said = f"has the role {role!r}" if role is not None else "has no role"
        raise DataError(f"{where}: {said}, expected one of {', '.join(ROLES)}{hint}")
    calls = known.get("tool_calls")
    if calls:
        known["tool_calls"] = [_tool_call(call, where) for call in _listed(calls, where, "tool_calls")]
    known["content"] = _content(known.get("content", "" if calls else None), where)
    return {key: item for key, item in known.items() if key == "content" or item not in ([], {}, "")}


def _content(content: Any, where: str) -> str:
    """Text, or the text of parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        found = "no content" if content is None else f"a {type(content).__name__} as content"
        raise DataError(f"{where}: has {found}, expected a text; correct the line")
    for part in content:
        given = {key for key, item in part.items() if item is not None} if isinstance(part, dict) else set()
        if given != {"type", "text"} or part["type"] != "text" or not isinstance(part["text"], str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(f"{where}: has a part of content ({kind}) that is more than text; remove it or the line")
    return "".join(part["text"] for part in content)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call as templates of transformers read it: under `function`, the arguments as an object."""
    if isinstance(call, dict) and "function" not in call and "name" in call:
        call = {"type": "function", "function": call}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: has a tool call without a function's name; correct the line")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: calls {function['name']} with arguments that are no JSON object; correct the line")
    call = {key: item for key, item in call.items() if item is not None}
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """Schemas of functions as transformers gives them to a template."""
    if not tools:
        return None
    listed = _listed(tools, where, "tools")
    if not all(isinstance(tool, dict) for tool in listed):
        raise DataError(f"{where}: `tools` must be a list of JSON schemas of functions; correct the line")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed]


def _listed(value: Any, where: str, key: str) -> list[Any]:
    """A list, also one that is written as JSON in a text, as data sets of fixed columns do."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list):
        raise DataError(f"{where}: `{key}` must be a list; correct the line")
    return value
