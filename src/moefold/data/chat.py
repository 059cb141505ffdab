"""Conversations into tokens and loss masks, by the tokenizer's own chat template.

A template that marks what the model generates (`{% generation %}`) says itself which tokens count: transformers renders
it, and its mask is taken as it is. Most templates do not mark anything; transformers then returns a mask of zeros. Here
the turns are found by rendering the conversation up to each of them:

    before  the messages before the turn, with the generation prompt     <user>Hi</s><assistant>
    last    the same with the turn as the last message                   <user>Hi</s><assistant>Hello</s>
    whole   the whole conversation                                       <user>Hi</s><assistant>Hello</s><user>Bye</s>

The turn begins where `before` ends, if `whole` begins with `before`, and ends where `last` ends, if `whole` begins with
`last`. Text after the turn's last special token, such as a line break, is not generated and does not count. Some
templates render a turn differently where others follow it (no reasoning, another end token). The message's content is
then replaced by a marker in both renderings: what follows the marker in `last`, up to the end token, must follow it in
`whole`. Wherever one of these conditions does not hold, the conversation is refused: a mask is exact or not made.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moefold.errors import BackendError, DataError
from moefold.ops.engines import load_engine

ASSISTANT = "assistant"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A message, a tool: JSON objects.
Message = dict[str, object]
Span = tuple[int, int]


class Encoded(NamedTuple):
    """Tokens of a document, and which of them count in the loss."""

    ids: np.ndarray
    loss_mask: np.ndarray


class Conversation(NamedTuple):
    """``first_counted``: messages before this one never count, as those of a preference pair's prompt."""

    messages: list[Message]
    tools: list[Message] | None = None
    first_counted: int = 0


class ChatTokenizer:
    """A folder with a tokenizer and its chat template, or with a template given beside it."""

    def __init__(self, folder: str, loss_on: Sequence[str] = (ASSISTANT,), chat_template: str | None = None) -> None:
        try:
            library = load_engine("transformers")
        except BackendError as error:
            raise DataError(f"{folder}: a chat template needs {error}") from error
        if not (Path(folder) / "tokenizer.json").is_file():
            raise DataError(
                f"{folder}: is no folder with a tokenizer.json, which chat data needs; give a model's folder"
            )
        try:
            self._loaded = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises plain exceptions
            raise DataError(f"{folder}: is not a tokenizer: {error}") from error
        if chat_template is not None:
            self._loaded.chat_template = chat_template
        template = self._loaded.chat_template
        if not template:
            raise DataError(f"{folder}: its tokenizer has no chat template; give one with --chat-template FILE")
        if not self._loaded.is_fast:
            raise DataError(f"{folder}: its tokenizer does not say where tokens lie in the text, which masks need")
        templates = list(template.values()) if isinstance(template, dict) else [template]
        self.template_sha256 = hashlib.sha256(json.dumps(templates).encode()).hexdigest()
        self._marks_generation = all(GENERATION.search(each) for each in templates)
        self._loss_on = tuple(loss_on)
        self.vocab_size = max(self._loaded.get_vocab().values(), default=-1) + 1
        added = self._loaded.added_tokens_decoder.values()
        special = sorted((str(token) for token in added if token.special), key=len, reverse=True)
        self._special = "|".join(map(re.escape, special)) or r"(?!)"
        end = self._loaded.eos_token_id
        self.end: int | None = None if end is None else int(end)

    def encode_text(self, text: str) -> np.ndarray:
        return np.asarray(self._loaded(text, add_special_tokens=False)["input_ids"], np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._loaded.decode(list(ids), clean_up_tokenization_spaces=False))

    def encode_chat(self, chat: Conversation) -> Encoded:
        """Raises a DataError without the place in the file, which the caller knows."""
        if self._marks_generation and self._loss_on == (ASSISTANT,) and not chat.first_counted:
            found = self._rendered(chat.messages, chat.tools, tokenize=True)
            return Encoded(np.asarray(found["input_ids"], np.int64), np.asarray(found["assistant_masks"], bool))
        whole = self._text(chat.messages, chat.tools)
        found = self._loaded(whole, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), bool)
        for start, end in self.spans(chat, whole):
            mask |= (starts < end) & (ends > start)
        return Encoded(np.asarray(found["input_ids"], np.int64), mask)

    def spans(self, chat: Conversation, whole: str) -> list[Span]:
        """Where the messages that count lie in the rendered conversation."""
        found = []
        for number, message in enumerate(chat.messages):
            if number >= chat.first_counted and message.get("role") in self._loss_on:
                find = self._turn if message.get("role") == ASSISTANT else self._content
                found.append(find(chat, number, whole))
        return found

    def _turn(self, chat: Conversation, number: int, whole: str) -> Span:
        """What the model generates: from the generation prompt to the token that ends the turn."""
        messages, tools = chat.messages, chat.tools
        if not number:
            raise DataError("message 0 is the assistant's; there must be a message that it answers")
        before = self._text(messages[:number], tools, generation_prompt=True)
        last = self._text(messages[: number + 1], tools)
        if not whole.startswith(before) or not last.startswith(before):
            raise inexact(number, "the messages before it are rendered differently in the whole conversation")
        turn = self._generated(last[len(before) :])
        if whole.startswith(before + turn):
            return len(before), len(before) + len(turn)
        marked, (_, after) = self._marked(chat, number)
        _, after_last = self._split(self._text([*messages[:number], marked], tools), number)
        ending = self._generated(after_last)
        swapped = re.compile(re.escape(re.sub(f"({self._special})$", "", ending)) + f"({self._special})").match(after)
        length = len(ending) if after.startswith(ending) else swapped.end() if swapped else None
        if length is None or not whole.endswith(after[length:]):
            raise inexact(number, "it is rendered differently where other messages follow it")
        return len(before), len(whole) - len(after) + length

    def _content(self, chat: Conversation, number: int, whole: str) -> Span:
        """Of another role: its content, and the special token after it if one follows at once."""
        _, (before, after) = self._marked(chat, number)
        if not whole.startswith(before) or not whole.endswith(after) or len(before) + len(after) > len(whole):
            raise inexact(number, "its content changes how other messages are rendered")
        special = re.compile(self._special).match(after)
        return len(before), len(whole) - len(after) + (special.end() if special else 0)

    def _marked(self, chat: Conversation, number: int) -> tuple[Message, tuple[str, str]]:
        """A message whose content is a marker, and the whole conversation before and after the marker."""
        message = chat.messages[number]
        parts = isinstance(message.get("content"), list)
        marked = {**message, "content": [{"type": "text", "text": _MARKER}] if parts else _MARKER}
        messages = [*chat.messages[:number], marked, *chat.messages[number + 1 :]]
        return marked, self._split(self._text(messages, chat.tools), number)

    def _split(self, text: str, number: int) -> tuple[str, str]:
        before, *after = text.split(_MARKER)
        if len(after) != 1:
            raise inexact(number, f"its content appears {len(after)} times in the rendered conversation")
        return before, after[0]

    def _generated(self, turn: str) -> str:
        """Up to its last special token, if only white space follows."""
        *_, last = [None, *re.finditer(self._special, turn)]
        return turn if last is None or turn[last.end() :].strip() else turn[: last.end()]

    def _text(self, messages: list[Message], tools: list[Message] | None, generation_prompt: bool = False) -> str:
        return self._rendered(messages, tools, tokenize=False, add_generation_prompt=generation_prompt)

    def _rendered(self, messages: list[Message], tools: list[Message] | None, tokenize: bool, **options: bool):  # type: ignore[no-untyped-def]
        if tokenize:
            options |= {"return_dict": True, "return_assistant_tokens_mask": True}
        try:
            return self._loaded.apply_chat_template(messages, tools=tools, tokenize=tokenize, **options)
        except Exception as error:  # templates raise their own
            raise DataError(f"the chat template refuses {len(messages)} messages: {error}") from error


# No template knows these characters, and no text has them by chance.
_MARKER = "\u2983moefold marks a message\u2984"


def inexact(number: int, why: str) -> DataError:
    return DataError(
        f"message {number}: which tokens are its own cannot be told exactly: {why}; use a template with "
        "{% generation %} (--chat-template FILE), or end the conversation with this message"
    )
