"""`LLM.embed` and `LLM.score` against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from forerun import LLM, PoolingParams
from forerun.core.errors import RequestError
from tests.embedding_models import (
    EOS,
    INSTRUCT,
    embedding_folder,
    embeddings,
    reranker_folder,
    yes_probabilities,
)

TEXTS = ["Hello world", "def add(a, b):\n    return a + b", "x", "one two three four " * 12]
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "chunked_prefill_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_folder(tmp_path_factory.mktemp("models") / "embedding")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(reranker_folder(tmp_path_factory.mktemp("models") / "reranker"), **ENGINE) as llm:
        yield llm


def path_of(llm: LLM) -> Path:
    return Path(str(llm.config.model_path))


def test_embeddings_are_those_of_transformers(folder: Path, embedder: LLM) -> None:
    """The tokenizer ends texts with EOS, whose hidden state is the embedding."""
    want = embeddings(folder, TEXTS)
    eos = embedder.tokenizer.convert_tokens_to_ids(EOS)
    for _ in range(2):  # the second time with a cached prefix
        outs = embedder.embed(TEXTS)
        for at, (out, each) in enumerate(zip(outs, want, strict=True)):
            assert out.embedding == pytest.approx(list(each), abs=1e-5)
            assert out.prompt_index == at and out.prompt_token_ids[-1] == eos
            assert np.linalg.norm(out.embedding) == pytest.approx(1.0, abs=1e-6)
    assert outs[3].meta_info["cached_tokens"] > 0
    alone = embedder.encode(TEXTS[0])
    assert alone.embedding == outs[0].embedding
    ids = embedder.embed(input_ids=alone.prompt_token_ids)
    assert ids.embedding == alone.embedding
    without_eos = embedder.embed(input_ids=[alone.prompt_token_ids[:-1]])[0]
    assert without_eos.embedding != pytest.approx(alone.embedding, abs=1e-3)
    embedder.engine.check()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_folder_says_what_is_pooled(tmp_path: Path, pooling: str) -> None:
    folder = embedding_folder(tmp_path / "model", pooling)
    with LLM(folder, **ENGINE) as llm:
        for out, want in zip(llm.embed(TEXTS), embeddings(folder, TEXTS, pooling), strict=True):
            assert out.embedding == pytest.approx(list(want), abs=1e-5)
        (last,) = embeddings(folder, TEXTS[:1])
        params = PoolingParams(pooling_type="LAST")  # type: ignore[arg-type]
        assert llm.embed(TEXTS[0], params).embedding == pytest.approx(list(last), abs=1e-5)


def test_the_setting_goes_before_the_folder(folder: Path) -> None:
    with LLM(folder, pooling_type="mean", **ENGINE) as llm:
        (want,) = embeddings(folder, TEXTS[1:2], "mean")
        assert llm.embed(TEXTS[1]).embedding == pytest.approx(list(want), abs=1e-5)


def test_a_folder_without_normalize(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path / "model", normalize=False)
    with LLM(folder, **ENGINE) as llm:
        raw, unit = llm.embed(TEXTS[0]), llm.embed(TEXTS[0], {"normalize": True})
        length = float(np.linalg.norm(raw.embedding))
        assert abs(length - 1) > 0.1
        assert [each * length for each in unit.embedding] == pytest.approx(raw.embedding, abs=1e-5)


def test_fewer_dimensions_are_normalized_again(folder: Path, embedder: LLM) -> None:
    (want,) = embeddings(folder, TEXTS[:1])
    out = embedder.embed(TEXTS[0], {"dimensions": 7})
    assert out.embedding == pytest.approx(list(want[:7] / np.linalg.norm(want[:7])), abs=1e-5)
    raw = embedder.embed(TEXTS[0], {"dimensions": 7, "normalize": False})
    assert np.linalg.norm(raw.embedding) != pytest.approx(1.0, abs=1e-2)


def test_truncation_keeps_the_special_tokens(folder: Path, embedder: LLM) -> None:
    """As transformers does it: the text loses tokens at its end, EOS stays."""
    for at_most in (1, 2, 9, 40, 500):
        outs = embedder.embed(TEXTS, truncate_prompt_tokens=at_most)
        for out, want in zip(outs, embeddings(folder, TEXTS, at_most=at_most), strict=True):
            assert len(out.prompt_token_ids) <= at_most
            assert out.embedding == pytest.approx(list(want), abs=1e-5)
    long = embedder.embed("word " * 5000, truncate_prompt_tokens=-1)
    assert len(long.prompt_token_ids) == 512
    assert long.prompt_token_ids[-1] == embedder.tokenizer.convert_tokens_to_ids(EOS)
    assert embedder.embed(input_ids=[[5, 6, 7]], truncate_prompt_tokens=2)[0].prompt_token_ids == [
        5, 6,
    ]  # fmt: skip


def test_eos_that_the_tokenizer_leaves_to_others(tmp_path: Path, folder: Path) -> None:
    """`add_eos_token`, of a tokenizer that does not do it itself."""
    made = embedding_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer._tokenizer.post_processor = None
    written = json.loads(tokenizer._tokenizer.to_str())
    written["post_processor"] = None
    (made / "tokenizer.json").write_text(json.dumps(written))
    said = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps({**said, "add_eos_token": True}))
    with LLM(made, **ENGINE) as llm:
        (want,) = embeddings(folder, TEXTS[:1])
        assert llm.embed(TEXTS[0]).embedding == pytest.approx(list(want), abs=1e-5)


def test_scores_of_embedding_models_are_cosines(folder: Path, embedder: LLM) -> None:
    a, b, c, d = embeddings(folder, TEXTS)
    assert embedder.score(TEXTS[0], TEXTS[1]) == pytest.approx(float(a @ b), abs=1e-5)
    got = embedder.score(TEXTS[0], TEXTS[1:])
    assert got == pytest.approx([float(a @ x) for x in (b, c, d)], abs=1e-5)
    got = embedder.score(TEXTS[:2], TEXTS[2:])
    assert got == pytest.approx([float(a @ c), float(b @ d)], abs=1e-5)
    with pytest.raises(RequestError, match="instruct is for scores of score_type yes_no"):
        embedder.score("a", "b", instruct="c")


def test_scores_of_rerankers_are_those_of_the_model_card(reranker: LLM) -> None:
    folder, query = path_of(reranker), "Which function adds?"
    want = yes_probabilities(folder, query, TEXTS)
    for _ in range(2):
        assert reranker.score(query, TEXTS) == pytest.approx(want, abs=1e-5)
    (want_other,) = yes_probabilities(folder, query, TEXTS[:1], "Find code")
    assert reranker.score(query, TEXTS[0], instruct="Find code") == pytest.approx(
        want_other, abs=1e-5
    )
    assert len({round(each, 4) for each in want}) == len(want)
    reranker.engine.check()


def test_a_long_document_is_shortened_within_its_prompt(reranker: LLM) -> None:
    query = "Which function adds?"
    short, long = "one two three", "one two three " * 200
    with pytest.raises(RequestError, match="maximum context length is 512 tokens"):
        reranker.score(query, long)
    scorer_ids: list[int] = []
    make = reranker.engine.make_request

    def watched(ids: list[int], *rest: Any, **more: Any) -> Any:
        scorer_ids.append(len(ids))
        return make(ids, *rest, **more)

    reranker.engine.make_request = watched  # type: ignore[method-assign]
    try:
        reranker.score(query, long, truncate_prompt_tokens=200)
        reranker.score(query, short, truncate_prompt_tokens=200)
    finally:
        reranker.engine.make_request = make  # type: ignore[method-assign]
    assert 190 <= scorer_ids[0] <= 200 and scorer_ids[1] < 190
    assert reranker.score(query, short) == reranker.score(query, short, truncate_prompt_tokens=200)
    with pytest.raises(RequestError, match="truncate_prompt_tokens 20 leaves no room"):
        reranker.score(query, long, truncate_prompt_tokens=20)


def test_a_prompt_that_the_client_has_formatted(reranker: LLM) -> None:
    """As vLLM's examples for Qwen3-Reranker do it: nothing is added."""
    query = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {INSTRUCT}\n<Query>: Which function adds?\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    documents = [f"<Document>: {text}{suffix}" for text in TEXTS]
    assert reranker.score(query, documents) == reranker.score("Which function adds?", TEXTS)
    with pytest.raises(RequestError, match="over truncate_prompt_tokens 50; shorten"):
        reranker.score(query, documents, truncate_prompt_tokens=50)


def test_a_template_that_is_not_chatml(reranker: LLM) -> None:
    """The words are the same, in the model's own template."""
    tokenizer = AutoTokenizer.from_pretrained(path_of(reranker))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[A]"
    from forerun.llm.scoring import Pair, YesNoScorer

    scorer = YesNoScorer(tokenizer, (1, 2), 512)
    scorer._is_chatml = False
    (prompt,) = scorer.run([Pair("q {document}", "d {query}")], None, "i").prompts
    text = tokenizer.decode(prompt.ids)
    assert text.startswith("[system]Judge whether")
    assert text.endswith("[user]<Instruct>: i\n<Query>: q {document}\n<Document>: d {query}[A]")
    assert prompt.logprobs is not None and prompt.logprobs.token_ids == (1, 2)


def test_score_type(folder: Path, reranker: LLM) -> None:
    with LLM(path_of(reranker), score_type="cosine", **ENGINE) as llm:
        assert llm.score("a b", "a b") == pytest.approx(1.0, abs=1e-5)
    no_token = pytest.raises(RequestError, match="no single token for yes or no; use cosine")
    with LLM(score_type="yes_no", **ENGINE) as llm, no_token:  # the bundled one has no such token
        llm.score("a", "b")
    with LLM(**ENGINE) as llm:
        assert llm.score("a b", "a b") == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.embed(""), "an empty text"),
        (lambda llm: llm.embed(input_ids=[[]]), "The prompt is empty"),
        (lambda llm: llm.embed(5), "must be text or a list of texts"),
        (lambda llm: llm.embed(), "Give either prompts"),
        (lambda llm: llm.embed("a", input_ids=[1]), "Give either prompts"),
        (lambda llm: llm.embed("a", {"dimensions": 33}), "at most the model's hidden size 32"),
        (lambda llm: llm.embed("a", {"dimensions": 0}), "dimensions must be >= 1"),
        (lambda llm: llm.embed("a", {"dimensions": 1.5}), "dimensions must be an integer"),
        (lambda llm: llm.embed("a", {"normalize": 1}), "normalize must be true or false"),
        (lambda llm: llm.embed("a", {"pooling_type": "max"}), "one of last, mean, cls, got 'max'"),
        (lambda llm: llm.embed("a", {"dimension": 3}), "Did you mean 'dimensions'"),
        (lambda llm: llm.embed("a", priorty=3), "Did you mean 'priority'"),
        (lambda llm: llm.embed("a", truncate_prompt_tokens=0), r"must be in \[1, 512\]"),
        (lambda llm: llm.embed("a", truncate_prompt_tokens=513), r"must be in \[1, 512\]"),
        (lambda llm: llm.embed("word " * 600), "length is 512 tokens, and the input has"),
        (lambda llm: llm.embed("\ud800"), "lone surrogate"),
        (lambda llm: llm.embed(input_ids=[10**6]), "outside the vocabulary"),
        (lambda llm: llm.score(["a", "b"], ["c"]), "2 queries for 1 documents"),
        (lambda llm: llm.score("a", ""), "an empty text"),
        (lambda llm: llm.score("a", "b", top_n=3), "score has no keyword 'top_n'"),
    ],
)
def test_bad_input(embedder: LLM, call: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        call(embedder)
    assert not embedder.engine.has_work


def test_no_inputs_no_outputs(embedder: LLM) -> None:
    assert embedder.embed([]) == [] and embedder.score("a", []) == []


def test_a_folder_whose_way_is_not_supported(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path / "model", "max")
    with LLM(folder, **ENGINE) as llm:
        with pytest.raises(RequestError, match=r"asks for pooling by max; .* set pooling_type"):
            llm.embed("a")
        assert len(llm.embed("a", {"pooling_type": "mean"}).embedding) == 32


def test_without_a_tokenizer(folder: Path) -> None:
    with LLM(folder, skip_tokenizer_init=True, **ENGINE) as llm:
        assert len(llm.embed(input_ids=[5, 6]).embedding) == 32
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.embed("a")
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.score("a", "b")
