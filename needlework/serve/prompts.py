"""What a request is to go on from: its prompts or its conversation, as tokens."""

from typing import Any

from needlework.serve.refused import RefusedError
from needlework.serve.sent import Fields, is_text, is_whole
from needlework.serve.text import Text

ROLES = ("system", "developer", "user", "assistant")
PROMPTS = 64


def prompts(fields: Fields, text: Text, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """A text, or tokens, or a list of either."""
    given = fields.take("prompt")
    several = isinstance(given, list) and not (given and all(map(is_whole, given)))
    listed = given if several else [given]
    if several and not 1 <= len(listed) <= PROMPTS:
        raise RefusedError(f"prompt: got {len(listed)} prompts, expected 1 to {PROMPTS}", "prompt")
    return tuple(_prompt(fields, prompt, text, vocabulary) for prompt in listed)


def _prompt(fields: Fields, given: Any, text: Text, vocabulary: int) -> tuple[int, ...]:
    if is_text(given):
        tokens = text.encode(given)
    elif isinstance(given, list) and all(is_whole(token) and 0 <= token < vocabulary for token in given):
        tokens = tuple(given)
    else:
        raise fields.refuse(
            "prompt", given, f"a text, token ids from 0 to {vocabulary - 1}, or a list of texts or of lists of ids"
        )
    if not tokens:
        raise RefusedError("prompt: has no token, expected at least one to go on from", "prompt")
    return tokens


def conversation(fields: Fields, text: Text) -> tuple[int, ...]:
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise fields.refuse("messages", given, "a list of at least one message")
    messages = [_message(fields, f"messages[{i}]", message) for i, message in enumerate(given)]
    try:
        tokens = text.conversation(messages)
    except ValueError as error:
        raise RefusedError(f"messages: {error}", "messages") from None
    if not tokens:
        raise RefusedError("messages: the chat template makes no token of them, expected at least one", "messages")
    return tokens


def _message(fields: Fields, where: str, given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise fields.refuse(where, given, "an object with role and content")
    message = Fields(given, f"{where}.")
    role, name, content = message.string("role"), message.string("name"), message.take("content")
    if role not in ROLES:
        raise message.refuse("role", role, f"one of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        parts = [part.get("text") for part in content]
        content = "".join(map(str, parts)) if all(map(is_text, parts)) else content
    if not is_text(content):
        raise message.refuse("content", content, 'a text, or a list of {"type": "text", "text": …}')
    message.close(frozenset({"refusal", "annotations"}))  # an answer of ours sent back may have them
    said = {"role": "system" if role == "developer" else role, "content": content}
    return said if name is None else said | {"name": name}
