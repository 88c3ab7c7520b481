"""Scores of pairs of texts: similarity of embeddings, or the probability of the answer "yes"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from forerun.core.errors import RequestError
from forerun.core.executor import ExecutorInfo
from forerun.core.logprobs import LogprobParams
from forerun.core.pooling import Pooling
from forerun.core.request import RequestRecord
from forerun.core.sampling_params import SamplingParams
from forerun.llm.pooling import NO_TEXT, Embedder, PoolingParams
from forerun.llm.prompts import chat_text, encode

COSINE, YES_NO, AUTO = "cosine", "yes_no", "auto"  # of the setting `score_type`
# One token, of which the log-probabilities are asked.
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)
# Qwen3-Reranker's prompt, word by word; other words score worse.
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".'
)
_USER = "<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
_CHATML = (
    f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


class Pair(NamedTuple):
    """A query and a document, or any two texts."""

    query: str
    document: str


def paired(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """One query with every document, or as many of both.

    Raises:
        RequestError: there are others numbers of them.
    """
    if len(queries) == 1:
        queries = list(queries) * len(documents)
    if len(queries) != len(documents):
        raise RequestError(
            f"{len(queries)} queries for {len(documents)} documents; give one, or one per document."
        )
    return list(zip(queries, documents, strict=True))


class ScorePrompt(NamedTuple):
    """What the engine has to run for a score."""

    ids: list[int]
    params: SamplingParams
    logprobs: LogprobParams | None = None
    pooling: Pooling | None = None


class ScoreRun(Protocol):
    """The scores of some pairs."""

    prompts: list[ScorePrompt]

    def scores(self, records: Sequence[RequestRecord]) -> list[float]:
        """One per pair, of requests that have ended, one per prompt."""


class Scorer(Protocol):
    """How pairs are scored."""

    explain: str

    def run(self, pairs: Sequence[Pair], at_most: int | None, instruct: str | None) -> ScoreRun:
        """
        Args:
            at_most: tokens of a prompt; documents of longer ones are shortened.
            instruct: what documents are looked for; None: for answers to a web search.

        Raises:
            RequestError: a text is empty or cannot be encoded, or `instruct` is of no use.
        """


def make_scorer(score_type: str, embedder: Embedder, tokenizer: Any, info: ExecutorInfo) -> Scorer:
    """
    Args:
        score_type: the setting.

    Raises:
        RequestError: there is no tokenizer, or "yes" and "no" are not tokens.
    """
    if tokenizer is None:
        raise RequestError("skip_tokenizer_init is set, so texts cannot be scored.")
    answers = [encode(tokenizer, each, add_special_tokens=False) for each in ("no", "yes")]
    can_answer = all(len(ids) == 1 for ids in answers)
    if score_type == AUTO:
        score_type = COSINE if embedder.layout.is_embedding or not can_answer else YES_NO
    if score_type == COSINE:
        return CosineScorer(embedder, info)
    if not can_answer:
        raise RequestError(
            "score_type yes_no: the tokenizer has no single token for yes or no; use cosine."
        )
    (no,), (yes,) = answers
    return YesNoScorer(tokenizer, (no, yes), info.limits.context_length)


class CosineScorer:
    """The cosine of the angle between the embeddings of the two texts."""

    explain = "cosine of embeddings"

    def __init__(self, embedder: Embedder, info: ExecutorInfo) -> None:
        self._embedder, self._info = embedder, info

    def run(self, pairs: Sequence[Pair], at_most: int | None, instruct: str | None) -> ScoreRun:
        if instruct is not None:
            raise RequestError("instruct is for scores of score_type yes_no; leave it out.")
        return _Cosines(self._embedder, self._info, pairs, at_most)


class _Cosines:
    def __init__(
        self, embedder: Embedder, info: ExecutorInfo, pairs: Sequence[Pair], at_most: int | None
    ) -> None:
        self._pooling = embedder.resolve(PoolingParams(normalize=True), info)
        places: dict[str, int] = {}  # each text once
        self._pairs = [
            (places.setdefault(a, len(places)), places.setdefault(b, len(places))) for a, b in pairs
        ]
        self.prompts = [
            ScorePrompt(ids, NO_TEXT, pooling=self._pooling.pooling)
            for ids in embedder.text_ids(list(places), at_most)
        ]

    def scores(self, records: Sequence[RequestRecord]) -> list[float]:
        vectors = [self._pooling.vector(record).astype(np.float64) for record in records]
        return [float(vectors[a] @ vectors[b]) for a, b in self._pairs]


class YesNoScorer:
    """The probability that the model answers "yes", if it may answer "yes" or "no"."""

    explain = "probability of yes against no"

    def __init__(self, tokenizer: Any, answers: tuple[int, int], context_length: int) -> None:
        """`answers`: the token ids of no and yes."""
        self._tokenizer = tokenizer
        self._asked = LogprobParams(token_ids=answers)
        self._longest = context_length - ONE_TOKEN.max_new_tokens
        known = tokenizer.get_vocab()
        self._is_chatml = all(each in known for each in _CHATML_TOKENS)

    def run(self, pairs: Sequence[Pair], at_most: int | None, instruct: str | None) -> ScoreRun:
        wanted = INSTRUCT if instruct is None else instruct
        at_most = None if at_most is None else min(at_most, self._longest)
        return _Answers([self._prompt(pair, at_most, wanted) for pair in pairs])

    def _prompt(self, pair: Pair, at_most: int | None, instruct: str) -> ScorePrompt:
        if not (pair.query and pair.document):
            raise RequestError("A query or document is an empty text; give at least one character.")
        if self._is_chatml and pair.query.startswith(_CHATML_TOKENS[0]):
            return self._formatted(pair, at_most)
        ids = self._ids(pair, instruct)
        surplus = 0 if at_most is None else len(ids) - at_most
        document = self._encode(pair.document) if surplus > 0 else []
        # A shorter document may be encoded in other tokens, so once may not be enough.
        while at_most is not None and len(ids) > at_most:
            if surplus >= len(document):
                raise RequestError(
                    f"truncate_prompt_tokens {at_most} leaves no room for the document; the query"
                    " and the instructions are longer."
                )
            kept = self._tokenizer.decode(document[: len(document) - surplus])
            ids = self._ids(Pair(pair.query, kept), instruct)
            surplus += max(len(ids) - at_most, 0)
        return ScorePrompt(ids, ONE_TOKEN, self._asked)

    def _formatted(self, pair: Pair, at_most: int | None) -> ScorePrompt:
        """The prompt that a client has written in two parts, as vLLM's examples do."""
        ids = self._encode(pair.query + pair.document)
        if at_most is not None and len(ids) > at_most:
            raise RequestError(
                f"The prompt, as the client formatted it, has {len(ids)} tokens, over"
                f" truncate_prompt_tokens {at_most}; shorten the document in it."
            )
        return ScorePrompt(ids, ONE_TOKEN, self._asked)

    def _ids(self, pair: Pair, instruct: str) -> list[int]:
        text = _USER.format(instruct=instruct, query=pair.query, document=pair.document)
        if self._is_chatml:
            return self._encode(_CHATML % text)
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
        return self._encode(chat_text(self._tokenizer, messages, {"enable_thinking": False}))

    def _encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, text, add_special_tokens=False)


class _Answers:
    def __init__(self, prompts: list[ScorePrompt]) -> None:
        self.prompts = prompts

    def scores(self, records: Sequence[RequestRecord]) -> list[float]:
        return [_probability(*record.output_logprobs[0].of_ids) for record in records]


def _probability(no: float, yes: float) -> float:
    """Returns that of "yes", from two log-probabilities."""
    return 0.5 * (1.0 + math.tanh((yes - no) / 2))
