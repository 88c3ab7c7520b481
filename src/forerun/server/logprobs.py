"""Log-probabilities in answers: OpenAI's shapes, and texts in SGLang's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from forerun.core.logprobs import TokenLogprobs
from forerun.llm.token_bytes import TokenBytes
from forerun.server.generation import Generation, ScoredToken
from forerun.server.parsers.events import Text

_SUFFIX = "_logprobs"  # of the entries of `meta_info` that hold (value, id, text)


def chat_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_entry(token, token_bytes) for token in tokens], "refusal": None}


class MessageLogprobs:
    """`logprobs` of the messages of a response: of the tokens whose text is in them."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._tokens: deque[ScoredToken] = deque()  # whose text was not read yet

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        self._tokens += tokens

    def of(self, text: Text) -> list[dict[str, Any]]:
        """Returns those of the tokens that begin in `text`; texts come in their order."""
        entries = []
        while self._tokens and self._tokens[0].offset < text.start + len(text.text):
            token = self._tokens.popleft()
            if token.offset >= text.start:
                entries.append(_chat_entry(token, self._token_bytes))
        return entries


def _chat_entry(scored: ScoredToken, token_bytes: TokenBytes) -> dict[str, Any]:
    token, _, logprobs = scored
    assert logprobs is not None
    entry = _chat_token(token, logprobs.logprob, token_bytes)
    entry["top_logprobs"] = [_chat_token(i, value, token_bytes) for value, i in logprobs.top]
    return entry


def _chat_token(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes.of(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def completion_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """`logprobs` of a completion's choice.

    `top_logprobs` hold the token itself, too, if it is not among the most probable.
    """
    return {
        "tokens": [_completion_text(token, token_bytes) for token, _, _ in tokens],
        "token_logprobs": [None if each is None else each.logprob for _, _, each in tokens],
        "top_logprobs": [_completion_top(token, each, token_bytes) for token, _, each in tokens],
        "text_offset": [offset for _, offset, _ in tokens],
    }


def _completion_top(
    token: int, logprobs: TokenLogprobs | None, token_bytes: TokenBytes
) -> dict[str, float] | None:
    if logprobs is None:
        return None
    top: dict[str, float] = {}
    for value, candidate in logprobs.top:  # the most probable first, should two have one text
        top.setdefault(_completion_text(candidate, token_bytes), value)
    top.setdefault(_completion_text(token, token_bytes), logprobs.logprob)
    return top


def _completion_text(token: int, token_bytes: TokenBytes) -> str:
    """Writes it as OpenAI does: bytes that are not text as such."""
    data = token_bytes.of(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_tokens(generation: Generation, ends: Sequence[int], text: str) -> list[ScoredToken]:
    """The tokens of an echoed prompt.

    Args:
        ends: characters of the decoded prompt after each token.
        text: the prompt as it is echoed.
    """
    record = generation.record
    known = [None, *record.prompt_logprobs]  # fewer than tokens, if the request was aborted
    # Decoded, a prompt may begin with a token that its text has not (BOS).
    surplus = max(ends[-1] - len(text), 0)
    offsets = [min(max(end - surplus, 0), len(text)) for end in (0, *ends)]
    return [ScoredToken(*each) for each in zip(record.prompt, offsets, known, strict=False)]


def with_texts(info: dict[str, Any], token_bytes: TokenBytes) -> dict[str, Any]:
    """`meta_info` whose log-probabilities have texts: (value, token id, text)."""
    return {
        name: [_with_text(each, token_bytes) for each in value] if name.endswith(_SUFFIX) else value
        for name, value in info.items()
    }


def _with_text(entry: Any, token_bytes: TokenBytes) -> Any:
    """Adds text to an entry, or to a list of them; the first of a prompt is None."""
    if isinstance(entry, list):
        return [_with_text(each, token_bytes) for each in entry]
    if entry is None:
        return None
    value, token, _ = entry
    return value, token, token_bytes.text(token)
