"""Conversations as training data: the chat template's text, and which of its tokens the assistant wrote."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ...base.errors import DataError, UsageError
from .conversations import Conversation

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NEEDS_NO_TEXT = {"tool_call_id", "role", "content"}
_BEGIN, _END = "\ue000", "\ue001"
"""Put around what a message says to see where a template puts it: characters that no text has, of a private area."""
_PROBED = 64
"""Runs of words of a message that are changed to see whether a template that says it in other words leaves them out."""


@dataclass(frozen=True)
class Rendering:
    """What a template makes of a conversation, or of its beginning.

    Attributes:
        text: the rendered text.
        messages: how many messages it holds.
        numbers: which of them are trained in it.
        spans: (start, stop) in characters of what the assistant wrote in each of these.
        ends: (start, stop) of the end tokens that the template puts behind such words only before what comes next.
    """

    text: str
    messages: int
    numbers: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    ends: tuple[tuple[int, int], ...] = ()


def render_chat(
    conversation: Conversation, tokenizer: Any, *, refuse_special_tokens: bool = False
) -> list[tuple[list[int], list[int]]]:
    """Sequences of token ids and, for each id, 1 where the assistant wrote it (its end-of-turn token included).

    An assistant's message is trained in what the template renders when that message is the last one, which is what it
    was written after. Where a template changes earlier turns when later ones come (it drops their reasoning), such a
    conversation gives a sequence for each state of its history, and each message is a target in exactly one of them.

    Raises:
        DataError: the template refuses the conversation, or leaves out something of it.
        UsageError: no chat template, or one that does not tell where the assistant begins.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("data.chat: the tokenizer has no chat template; use one that has it, or train on text")
    if refuse_special_tokens:
        _refuse_special_tokens(conversation, tokenizer)
    template = _Template(conversation, tokenizer)
    renderings = _renderings(template)
    template.refuse_left_out()
    encoded = [_encode(rendering, template) for rendering in renderings]
    return [_ended(ids, mask, rendering, template) for (ids, mask), rendering in zip(encoded, renderings, strict=True)]


class _Template:
    """A tokenizer's chat template over beginnings of one conversation."""

    def __init__(self, conversation: Conversation, tokenizer: Any) -> None:
        self.conversation = conversation
        self.tokenizer = tokenizer
        try:
            self.source = tokenizer.get_chat_template(tools=conversation.tools)
        except ValueError as error:
            names = ", ".join(sorted(tokenizer.chat_template))
            raise UsageError(
                f"data.chat: the tokenizer has the chat templates {names}, none of them named default, so none can be "
                "chosen; give the right one that name, or save it as chat_template.jinja"
            ) from error
        self.marks = _GENERATION.search(self.source) is not None
        self._known: dict[tuple[int, bool], str] = {}
        self._found: dict[int, dict[int, str]] = {}

    def __call__(self, count: int, *, prompt: bool = False) -> str:
        """The text of the first `count` messages, with what the assistant's next words are put after if `prompt`."""
        if (count, prompt) not in self._known:
            self._known[count, prompt] = self.apply(self.conversation.messages[:count], prompt=prompt)
        return self._known[count, prompt]

    def apply(self, messages: list[dict[str, Any]], *, prompt: bool = False, tools: bool = True, **options: Any) -> Any:
        asked = {**self.conversation.options, "tokenize": False, "add_generation_prompt": prompt, **options}
        asked["chat_template"] = self.source  # chosen once: a tokenizer may have another for conversations with tools
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.conversation.tools if tools else None, **asked
            )
        except Exception as error:  # a template is a program: it raises what it likes
            reason = str(error).partition("\n")[0] or type(error).__name__
            where = self.conversation.where
            raise DataError(f"{where}: the chat template refuses the conversation ({reason}); correct it") from error

    def refuse_left_out(self) -> None:
        """Refuses what makes no difference to the text: it would be trained on as if it were not there."""
        conversation = self.conversation
        if conversation.tools and self.apply(conversation.messages, tools=False) == self(len(conversation.messages)):
            self._refuse("the tools")
        for name in conversation.options:
            if not re.search(rf"\b{re.escape(name)}\b", self.source):
                self._refuse(f"the option {name}")
        whole = len(conversation.messages)
        for number, message in enumerate(conversation.messages):
            own = message["role"] == "assistant" and not self(whole).startswith(self(number + 1))
            count = number + 1 if own else whole
            content = message["content"].strip()
            place = self._places(count).get(number)
            if content and (place is None or not _says(place, content)):  # escaped in an unknown way, or left out
                if place is not None or not _says(self(count), content):
                    for changed in (f"? {content}", *_with_other_words(content)):
                        self._compare(number, count, "content", {**message, "content": changed})
                self._compare(number, count, "content", {**message, "content": f"{content} ?"})
            needless = _NEEDS_NO_TEXT | ({"name"} if message["role"] == "tool" else set())
            for key in message.keys() - needless:
                self._compare(number, count, key, {k: item for k, item in message.items() if k != key})

    def _places(self, count: int) -> dict[int, str]:
        """Where what each of the first `count` messages says ends in the text, and the text from its beginning, or from
        the end of what stands before it where its beginning is not to be seen. Empty if the template heeds the marks.
        """
        if count not in self._found:
            messages = self.conversation.messages[:count]
            marked = [{**message, "content": _marked(message["content"], n)} for n, message in enumerate(messages)]
            try:
                text = self.apply(marked)
            except DataError:
                text = ""
            parts = re.split(f"{_END}(\\d+){_END}", text)  # text, number, text, number, ..., text
            ends = zip(parts[:-1:2], map(int, parts[1::2]), strict=True)
            found = {n: part.rpartition(f"{_BEGIN}{n}{_BEGIN}")[2] for part, n in ends}
            plain = re.sub(f"([{_BEGIN}{_END}])\\d+\\1", "", text)
            self._found[count] = found if plain == self(count) else {}
        return self._found[count]

    def _compare(self, number: int, count: int, key: str, changed: dict[str, Any]) -> None:
        messages = [*self.conversation.messages[:number], changed, *self.conversation.messages[number + 1 : count]]
        try:
            same = self.apply(messages) == self(count)
        except DataError:
            return  # the template asks for it
        if same:
            self._refuse(f"{key} of message {number + 1} ({changed['role']})")

    def _refuse(self, what: str) -> None:
        raise DataError(
            f"{self.conversation.where}: the chat template leaves out {what}; remove it, or use a template that has it"
        )


def _marked(content: str, number: int) -> str:
    """What a message says between marks with its number; the space around it, which templates trim, stays outside."""
    said = content.strip()
    begin, end = f"{_BEGIN}{number}{_BEGIN}", f"{_END}{number}{_END}"
    return content.replace(said, f"{begin}{said}{end}", 1) if said else content


def _says(text: str, content: str) -> bool:
    """Whether a text says a message word by word: as it is, or escaped for HTML or JSON."""
    words = content.split()
    in_json = [json.dumps(word, ensure_ascii=False)[1:-1] for word in words]
    return _in_order(words, text) or _in_order(words, html.unescape(text)) or _in_order(in_json, text)


def _with_other_words(content: str) -> Iterator[str]:
    """The message with a run of its words replaced by other characters, as many, for each of at most `_PROBED` runs:
    what makes no difference to a text is not in it."""
    words = list(re.finditer(r"\S+", content))
    most = -(-len(words) // _PROBED)
    for first in range(0, len(words), most):
        start, stop = words[first].start(), words[min(first + most, len(words)) - 1].end()
        other = re.sub(r"\S", lambda found: "!" if found[0] == "?" else "?", content[start:stop])
        yield content[:start] + other + content[stop:]


def _in_order(words: list[str], text: str) -> bool:
    place = 0
    for word in words:
        place = text.find(word, place)
        if place < 0:
            return False
        place += len(word)
    return True


def _renderings(template: _Template) -> list[Rendering]:
    """As few renderings as hold each assistant's message after the history that it was written after."""
    messages, untrained = template.conversation.messages, template.conversation.untrained
    found: list[Rendering] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number in untrained:
            continue
        text = template(number + 1)
        span = (_start(template, number, text), len(text))
        if found and text.startswith(found[-1].text):
            found[-1] = Rendering(text, number + 1, (*found[-1].numbers, number), (*found[-1].spans, span))
        else:
            found.append(Rendering(text, number + 1, (number,), (span,)))
    whole = template(len(messages))
    if not found or whole.startswith(found[-1].text):
        last = found.pop() if found else Rendering(whole, 0, (), ())
        found.append(replace(last, text=whole, messages=len(messages)))
    return [_with_ends(rendering, template.tokenizer.eos_token) for rendering in found]


def _with_ends(rendering: Rendering, end: str | None) -> Rendering:
    """With the end tokens that follow the assistant's words: a template may put one only before what comes next."""
    if not end:
        return rendering
    text, follows = rendering.text, re.compile(rf"\s*{re.escape(end)}")
    open_ends = [stop for start, stop in rendering.spans if not text[start:stop].rstrip().endswith(end)]
    found = [follows.match(text, stop) for stop in open_ends]
    return replace(rendering, ends=tuple(match.span() for match in found if match))


def _start(template: _Template, number: int, text: str) -> int:
    """Where in `text` the words of message `number`, its last, begin."""
    if number == 0 and template.marks:
        return 0
    if number == 0:
        raise DataError(
            f"{template.conversation.where}: begins with the assistant, and the chat template has no "
            "{% generation %} that marks its words; put a message before it"
        )
    before = template(number, prompt=True)
    if not text.startswith(before) and template.marks:
        before = template(number)
    if not text.startswith(before):
        raise UsageError(
            f"data.chat: {template.conversation.where}: the chat template renders message {number + 1} in another way "
            "than it prompts for it, so the assistant's words cannot be found; use a template that marks them with "
            "{% generation %}"
        )
    return len(before)


def _encode(rendering: Rendering, template: _Template) -> tuple[list[int], list[int]]:
    tokenizer = template.tokenizer
    if template.marks:
        return _encode_marked(rendering, template)
    targets = (*rendering.spans, *rendering.ends)
    borders = sorted({0, len(rendering.text), *(border for span in targets for border in span)})
    ids: list[int] = []
    mask: list[int] = []
    for start, stop in pairwise(borders):  # cut, so that no token is half the assistant's
        piece = _call(tokenizer, rendering.text[start:stop])["input_ids"]
        ids += piece
        mask += [int(any(first <= start < last for first, last in targets))] * len(piece)
    whole = _call(tokenizer, rendering.text)["input_ids"]
    if ids != whole and _decode(tokenizer, ids) != _decode(tokenizer, whole):
        # The tokenizer begins each piece with a space: the borders are found in the whole text instead.
        if not tokenizer.is_fast:
            raise UsageError("data.chat: the tokenizer does not tell where its tokens stand; use its fast form")
        found = _call(tokenizer, rendering.text, return_offsets_mapping=True)
        return found["input_ids"], [_inside(offsets, targets) for offsets in found["offset_mapping"]]
    return ids, mask


def _encode_marked(rendering: Rendering, template: _Template) -> tuple[list[int], list[int]]:
    """With the assistant's words as the template itself marks them.

    Raises:
        DataError: the template marks nothing of a message that is to be trained, or not its tool calls.
    """
    messages = template.conversation.messages
    found = _marked_tokens(template, messages[: rendering.messages])
    for number, span in zip(rendering.numbers, rendering.spans, strict=True):
        message = messages[number]
        said = any(message.get(key) for key in ("content", "tool_calls", "reasoning_content"))
        if said and not any(on and _inside(offsets, (span,)) for on, offsets, _ in found):
            _refuse_unmarked(template, number, "")
        if message.get("tool_calls") and message["content"].strip():
            bare = {key: item for key, item in message.items() if key != "tool_calls"}
            both = (_marked_tokens(template, [*messages[:number], one]) for one in (message, bare))
            with_calls, without = ([token for on, _, token in tokens if on] for tokens in both)
            if with_calls == without:
                _refuse_unmarked(template, number, "tool_calls of ")
    mask = [int((on and _inside(at, rendering.spans)) or _inside(at, rendering.ends)) for on, at, _ in found]
    return [token for _, _, token in found], mask


def _marked_tokens(template: _Template, messages: list[dict[str, Any]]) -> list[tuple[int, tuple[int, int], int]]:
    """(whether the template marks it, where it stands, its id) of each token of a conversation."""
    found = template.apply(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "split_special_tokens": False, "verbose": False},
    )
    return list(zip(found["assistant_masks"], found["offset_mapping"], found["input_ids"], strict=True))


def _refuse_unmarked(template: _Template, number: int, what: str) -> None:
    where = template.conversation.where
    raise DataError(
        f"{where}: the chat template marks nothing of {what}message {number + 1} (assistant) with "
        "{% generation %}, so it would not be trained; mark it in the template, or give the message weight 0"
    )


def _inside(offsets: tuple[int, int], spans: tuple[tuple[int, int], ...]) -> int:
    return int(any(offsets[1] > start and offsets[0] < stop for start, stop in spans))


def _call(tokenizer: Any, text: str, **options: Any) -> Any:
    return tokenizer(text, add_special_tokens=False, verbose=False, split_special_tokens=False, **options)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _ended(ids: list[int], mask: list[int], rendering: Rendering, template: _Template) -> tuple[list[int], list[int]]:
    """With the end token behind the last turn, unless the template ends it so."""
    end = template.tokenizer.eos_token_id
    tail = _decode(template.tokenizer, ids[-1:]).strip()
    last = ids[-1] if tail else ids[-2] if len(ids) > 1 else None
    if end is None or end in (last, *ids[-1:]):
        return ids, mask
    of_assistant = rendering.spans and rendering.spans[-1][1] == len(rendering.text)
    return [*ids, end], [*mask, int(bool(of_assistant))]


def _refuse_special_tokens(conversation: Conversation, tokenizer: Any) -> None:
    said = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
    for token in tokenizer.all_special_tokens:
        if token in said:
            raise DataError(
                f"{conversation.where}: spells the special token {token}, which in a conversation cannot be kept text; "
                "remove the line, or set data.special_tokens=parse"
            )
