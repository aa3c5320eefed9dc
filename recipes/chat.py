"""Conversations as training data: the chat template's text, and which of its tokens the assistant wrote."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.errors import DataError, UsageError

Conversation = list[dict[str, str]]


def iter_conversations(source: str | Path) -> Iterator[Conversation]:
    """The `messages` of every line of a `.jsonl` or `.jsonl.gz` file, or of all such files of a folder.

    Raises:
        DataError: no such file, or a line without `messages`, as `file:line`.
    """
    path = Path(source)
    files = [path] if path.is_file() else sorted(path.rglob("*.jsonl*")) if path.is_dir() else []
    if not files:
        raise DataError(
            f"{source}: holds no .jsonl file; conversations are read from jsonl with `messages` on each line"
        )
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _messages(line, f"{file}:{number}")


def _messages(line: str, where: str) -> Conversation:
    try:
        messages = json.loads(line)["messages"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{where}: expected a JSON object with `messages` ({error!r}); correct the line") from error
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
    ):
        raise DataError(f"{where}: `messages` must be a list of objects with `role` and `content`; correct the line")
    return messages


def render_chat(messages: Conversation, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and, for each, 1 where the assistant wrote it (its end-of-turn token included).

    The template renders growing prefixes of the conversation; what an assistant message adds after the generation
    prompt is what the assistant wrote. That needs no marks inside the template.

    Raises:
        UsageError: no chat template, or a template whose prefixes do not grow.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("data.chat: the tokenizer has no chat template; use one that has it, or train on text")
    ids: list[int] = []
    mask: list[int] = []
    done = ""
    for index, message in enumerate(messages):
        after = _render(tokenizer, messages[: index + 1], prompt=False)
        if message["role"] == "assistant":
            before = _render(tokenizer, messages[:index], prompt=True)
            done = _append(tokenizer, done, before, 0, ids, mask)
        done = _append(tokenizer, done, after, int(message["role"] == "assistant"), ids, mask)
    if tokenizer.eos_token_id is not None and (not ids or ids[-1] != tokenizer.eos_token_id):
        ids.append(tokenizer.eos_token_id)
        mask.append(int(bool(messages) and messages[-1]["role"] == "assistant"))
    return ids, mask


def _render(tokenizer: Any, messages: Conversation, *, prompt: bool) -> str:
    if not messages and not prompt:
        return ""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def _append(tokenizer: Any, done: str, text: str, trained: int, ids: list[int], mask: list[int]) -> str:
    """Tokenises what `text` adds to `done`; turns are cut at their borders, so that labels never split a token."""
    if not text.startswith(done):
        raise UsageError(
            "data.chat: the chat template rewrites earlier turns when a later one is added, so the assistant's words"
            " cannot be found; use a template that only appends"
        )
    added = tokenizer(text[len(done) :], add_special_tokens=False, verbose=False)["input_ids"]
    ids.extend(added)
    mask.extend([trained] * len(added))
    return text
