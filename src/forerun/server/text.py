"""Tokenization in threads, so that a long prompt does not hold up everybody's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from forerun.core.errors import ContextLengthError, RequestError, shown
from forerun.llm.prompts import AT_ANSWER, Ending, chat_ids, text_ids
from forerun.llm.text import detokenize, text_ends
from forerun.llm.token_bytes import TokenBytes

T = TypeVar("T")
THREADS = 4


class TextService:
    """A tokenizer behind a thread pool."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: None with `skip_tokenizer_init`; then only token ids are served."""
        self.tokenizer = tokenizer
        self._token_bytes: TokenBytes | None = None  # made when it is asked for
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="forerun-text")
        longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
        self._longest_token = longest  # characters

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, texts: Sequence[str], max_tokens: int, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text.

        Args:
            max_tokens: texts that are certainly longer are refused without being tokenized.

        Raises:
            RequestError: a text is too long or not valid, or there is no tokenizer.
        """
        tokenizer = self._need("text prompts")
        for text in texts:
            self._check_length(len(text), max_tokens)
        ids, _ = await self.run(partial(text_ids, tokenizer, list(texts), add_special_tokens))
        return ids

    async def convert(
        self, texts: Sequence[str], at_most: int | None, max_tokens: int, function: Callable[[], T]
    ) -> T:
        """Runs what makes token ids of texts, in one of the threads.

        Args:
            at_most: tokens that longer texts are shortened to; None: those that are certainly over
                `max_tokens` are refused.

        Raises:
            RequestError: a text is too long, or there is no tokenizer; and what `function` raises.
        """
        self._need("texts")
        for text in texts if at_most is None else ():
            self._check_length(len(text), max_tokens)
        return await self.run(function)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        max_tokens: int,
        tools: Sequence[Mapping[str, Any]] = (),
        ending: Ending = AT_ANSWER,
    ) -> list[int]:
        """Token ids of a conversation in the chat template.

        Args:
            tools: functions that may be called.

        Raises:
            RequestError: as `encode`; or the template refuses the messages.
        """
        tokenizer = self._need("chat")
        length = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
        self._check_length(length, max_tokens)

        def check(text: str) -> None:
            self._check_length(len(text), max_tokens)

        convert = partial(chat_ids, tokenizer, messages, variables, tools, check, ending)
        ids, _ = await self.run(convert)
        return ids[0]

    def info(self) -> dict[str, Any]:
        """The tokenizer's class, special tokens and chat template, as in tokenizer_config.json.

        Raises:
            RequestError: there is no tokenizer.
        """
        tokenizer = self._need("texts")
        special = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens = tokenizer.special_tokens_map
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": tokenizer.chat_template,
            **{name: tokens.get(name) for name in special},
        }

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them. There is a tokenizer."""
        return await self.run(partial(self.tokenizer.convert_ids_to_tokens, list(ids)))

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of any ids.

        Raises:
            RequestError: there is no tokenizer, or an id is outside of its vocabulary.
        """
        tokenizer = self._need("texts")
        for token in ids:
            if not 0 <= token < len(tokenizer):
                raise RequestError(
                    f"Token id {shown(token)} is outside the vocabulary of {len(tokenizer)}."
                )
        return await self.run(partial(detokenize, tokenizer, ids, skip_special_tokens))

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return await self.run(partial(detokenize, self.tokenizer, ids, skip_special_tokens=False))

    async def ends(self, ids: Sequence[int]) -> list[int]:
        """Characters of a prompt's text after each token. There is a tokenizer."""
        return await self.run(partial(text_ends, self.tokenizer, ids))

    def token_bytes(self) -> TokenBytes:
        """
        Raises:
            RequestError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError(
                "The server runs with --skip-tokenizer-init, so log-probabilities have no texts;"
                " use /generate, which returns token ids."
            )
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(self.tokenizer)
        return self._token_bytes

    async def run(self, function: Callable[[], T]) -> T:
        """Runs `function` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def _check_length(self, characters: int, max_tokens: int) -> None:
        least = characters // self._longest_token
        if least > max_tokens:
            how = f", and the prompt has {characters} characters, at least {least} tokens"
            raise ContextLengthError.of(max_tokens, f"{how}; shorten it.")

    def _need(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"The server runs with --skip-tokenizer-init, so {what} cannot be used; send token"
                " ids."
            )
        return self.tokenizer
