"""`/v1/embeddings`, `/v1/score` and `/v1/rerank` of a live server."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from forerun import LLM
from tests.embedding_models import (
    embedding_folder,
    embeddings,
    reranker_folder,
    yes_probabilities,
)
from tests.server.support import PROMPT, LiveServer, flags
from tests.server.test_bad_input import refused

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
TEXTS = ["Hello world", PROMPT, "x", "one two three four " * 12]
ENGINE = {"dtype": "float32", "device": "cpu", "max_running_requests": 4}
QUERY = "Which function adds?"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reranker_folder(tmp_path_factory.mktemp("models") / "reranker")


@pytest.fixture(scope="module")
def ranking(reranker: Path) -> Iterator[LiveServer]:
    with LiveServer(*flags(**ENGINE, model_path=str(reranker))) as live:
        yield live


def post(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


# --- embeddings ---------------------------------------------------------------------------------


def test_the_openai_client(server: LiveServer, llm: LLM) -> None:
    """It asks for base64, and decodes it; equal to the Python API, bit for bit."""
    want = llm.embed(TEXTS)
    made = server.client().embeddings.create(model="bundled", input=TEXTS)
    assert made.model == "bundled" and made.object == "list"
    assert [each.index for each in made.data] == [0, 1, 2, 3]
    assert [each.embedding for each in made.data] == [out.embedding for out in want]
    tokens = sum(len(out.prompt_token_ids) for out in want)
    assert made.usage.prompt_tokens == made.usage.total_tokens == tokens
    for given in (TEXTS[0], want[0].prompt_token_ids, [want[0].prompt_token_ids]):
        made = server.client().embeddings.create(
            model="bundled", input=given, encoding_format="float"
        )
        assert [each.embedding for each in made.data] == [want[0].embedding]


def test_encodings(server: LiveServer) -> None:
    plain = post(server, EMBEDDINGS, input="a b c")["data"][0]["embedding"]
    coded = post(server, EMBEDDINGS, input="a b c", encoding_format="base64")["data"][0]
    assert np.frombuffer(b64decode(coded["embedding"]), "<f4").tolist() == plain


def test_parameters(server: LiveServer, llm: LLM) -> None:
    asked = {"dimensions": 9, "normalize": False, "truncate_prompt_tokens": 2, "user": "me"}
    answer = post(server, EMBEDDINGS, input="a b c d", priority=1, **asked)
    want = llm.embed("a b c d", {"dimensions": 9, "normalize": False}, truncate_prompt_tokens=2)
    assert answer["data"][0]["embedding"] == want.embedding and len(want.embedding) == 9
    assert answer["usage"]["prompt_tokens"] == 2
    ids = post(server, EMBEDDINGS, input=[[5, 6, 7], [8]], truncate_prompt_tokens=2)
    assert ids["usage"]["prompt_tokens"] == 3


def test_many_inputs_are_one_batch_and_cached_prefixes_count(server: LiveServer) -> None:
    stem = "In the same way, " * 40
    texts = [f"{stem}{i}" for i in range(40)]
    first = post(server, EMBEDDINGS, input=texts[:1])
    answer = post(server, EMBEDDINGS, input=texts)
    assert answer["data"][0]["embedding"] == first["data"][0]["embedding"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.5 * answer["usage"]["prompt_tokens"]


@pytest.mark.exhaustive
def test_text_beside_embeddings_stays_the_same(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0.8, "seed": 5}
    want = post(server, "/v1/completions", **body)["choices"][0]["text"]
    vectors = post(server, EMBEDDINGS, input=TEXTS)["data"]
    texts: list[str] = []

    def complete() -> None:
        texts.append(post(server, "/v1/completions", **body)["choices"][0]["text"])

    threads = [threading.Thread(target=complete) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert post(server, EMBEDDINGS, input=TEXTS)["data"] == vectors
    assert texts == [want] * 3


@pytest.mark.exhaustive
def test_an_embedding_model(tmp_path: Path) -> None:
    """Without an LM head: text is refused, embeddings and scores are made."""
    folder = embedding_folder(tmp_path / "model")
    a, b, *_ = embeddings(folder, TEXTS)
    with LiveServer(*flags(**ENGINE, model_path=str(folder))) as live:
        answer = post(live, EMBEDDINGS, input=TEXTS[:1])
        assert answer["data"][0]["embedding"] == pytest.approx(list(a), abs=1e-5)
        score = post(live, SCORE, text_1=TEXTS[0], text_2=TEXTS[1])["data"][0]["score"]
        assert score == pytest.approx(float(a @ b), abs=1e-5)
        assert "no LM head" in refused(live.http.post("/v1/completions", json={"prompt": "x"}))
        labels = {"query": "x", "items": ["y"], "label_token_ids": [1]}
        assert "no LM head" in refused(live.http.post(SCORE, json=labels))
        info = live.http.get("/get_server_info").json()
        assert info["explain"]["embeddings"] == "last, normalized (sentence-transformers)"
        assert info["explain"]["scores"] == "cosine of embeddings"


def test_a_client_that_leaves_takes_its_inputs_along(server: LiveServer) -> None:
    texts = ["word " * 2000 + str(i) for i in range(100)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + EMBEDDINGS, json={"input": texts}, timeout=0.5)
    server.wait_idle()


@pytest.mark.exhaustive
def test_batches_without_a_server(tmp_path: Path, llm: LLM) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"input": TEXTS[:2], "encoding_format": "float"}, {"input": ""}]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": EMBEDDINGS, "body": body}
        for i, body in enumerate(bodies)
    ]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = ["batch", str(source), "--output", str(output), *flags(**ENGINE)]
    done = subprocess.run([sys.executable, "-m", "forerun", *command], capture_output=True)
    assert done.returncode == 1, done.stderr
    results = [json.loads(line) for line in output.read_text().splitlines()]
    answers = {each["custom_id"]: each["response"] for each in results}
    assert answers["1"]["status_code"] == 400
    assert "input is empty" in answers["1"]["body"]["error"]["message"]
    got = [each["embedding"] for each in answers["0"]["body"]["data"]]
    assert got == [out.embedding for out in llm.embed(TEXTS[:2])]


# --- scores: `tests/llm/test_embeddings.py` has those of the Python API -------------------------


@pytest.mark.exhaustive
def test_rerank(ranking: LiveServer, reranker: Path) -> None:
    want = yes_probabilities(reranker, QUERY, TEXTS)
    for path in (RERANK, "/v2/rerank", "/rerank"):
        answer = post(ranking, path, query=QUERY, documents=[*TEXTS[:3], {"text": TEXTS[3]}])
        results = answer["results"]
        assert [each["index"] for each in results] == sorted(range(4), key=lambda i: -want[i])
        for each in results:
            assert each["relevance_score"] == pytest.approx(want[each["index"]], abs=1e-5)
            assert each["document"] == {"text": TEXTS[each["index"]]}
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
    few = post(ranking, RERANK, query=QUERY, documents=TEXTS, top_n=2, return_documents=False)
    assert few["results"] == [{k: r[k] for k in ("index", "relevance_score")} for r in results[:2]]
    info = ranking.http.get("/get_server_info").json()
    assert info["explain"]["scores"] == "probability of yes against no"
    every = post(ranking, RERANK, query=QUERY, documents=TEXTS, top_n=0)
    assert len(every["results"]) == 4
    (other,) = yes_probabilities(reranker, QUERY, TEXTS[:1], "Find code")
    asked = post(ranking, RERANK, query=QUERY, documents=TEXTS[:1], instruct="Find code")
    assert asked["results"][0]["relevance_score"] == pytest.approx(other, abs=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")]
)
def test_score_of_pairs(ranking: LiveServer, reranker: Path, names: tuple[str, str]) -> None:
    want = yes_probabilities(reranker, QUERY, TEXTS)
    first, second = names
    answer = post(ranking, SCORE, **{first: QUERY, second: TEXTS})
    assert answer["object"] == "list" and answer["id"].startswith("score-")
    assert [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    assert [each["score"] for each in answer["data"]] == pytest.approx(want, abs=1e-5)
    both = post(ranking, "/score", **{first: [QUERY] * 4, second: TEXTS})
    assert both["data"] == answer["data"]
    one = post(ranking, SCORE, **{first: QUERY, second: TEXTS[1]})
    assert one["data"] == [{**answer["data"][1], "index": 0}]


@pytest.mark.parametrize("item_first", [False, True])
def test_score_of_labels(server: LiveServer, llm: LLM, item_first: bool) -> None:
    """The probabilities of SGLang: of the labels after each prompt, or among themselves."""
    query, items, labels = "Is this code? ", ["def f():", "Once upon"], [43, 92, 280]
    texts = [item + query if item_first else query + item for item in items]
    outs = llm.generate(
        texts, {"max_new_tokens": 1, "temperature": 0.0},
        return_logprob=True, token_ids_logprob=[labels, labels],
    )  # fmt: skip
    values = [[each[0] for each in out.meta_info["output_token_ids_logprobs"][0]] for out in outs]
    body = {"query": query, "items": items, "label_token_ids": labels, "item_first": item_first}
    answer = post(server, SCORE, **body)
    assert answer["object"] == "scoring" and answer["model"] == "bundled"
    for got, logprobs in zip(answer["scores"], values, strict=True):
        assert got == pytest.approx([math.exp(each) for each in logprobs], abs=1e-9)
    softmax = post(server, SCORE, **body, apply_softmax=True)
    for got, plain in zip(softmax["scores"], answer["scores"], strict=True):
        assert got == pytest.approx([each / sum(plain) for each in plain], abs=1e-9)
    ids = [llm.tokenizer(text)["input_ids"] for text in texts]
    cut = len(ids[0]) - 1, len(ids[1]) - 1
    if not item_first:
        one = post(server, SCORE, query=ids[0][: cut[0]], items=[ids[0][cut[0] :]],
                   label_token_ids=labels)  # fmt: skip
        assert one["scores"] == answer["scores"][:1]


# --- what is refused ----------------------------------------------------------------------------

BODIES: list[tuple[str, dict[str, Any], str]] = [
    (EMBEDDINGS, {}, "input is missing"),
    (EMBEDDINGS, {"input": ""}, "input is empty"),
    (EMBEDDINGS, {"input": []}, "input is empty"),
    (EMBEDDINGS, {"input": [[]]}, "The prompt is empty"),
    (EMBEDDINGS, {"input": ["a", ""]}, "an empty text"),
    (EMBEDDINGS, {"input": ["a", 1]}, "input"),
    (EMBEDDINGS, {"input": 5}, "input"),
    (EMBEDDINGS, {"input": {"text": "a"}}, "input"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input has 2049 items; a request takes 2048"),
    (EMBEDDINGS, {"input": [[1]] * 2049}, "input has 2049 items; a request takes 2048"),
    (EMBEDDINGS, {"input": [1] * 5000}, "length is 4096 tokens, and the prompt has 5000"),
    (EMBEDDINGS, {"input": "word " * 5000}, "and the input has 5001; shorten it, or set"),
    (EMBEDDINGS, {"input": "x" * 10**6}, "and the prompt has 1000000 characters, at least"),
    (EMBEDDINGS, {"input": [10**9]}, "outside the vocabulary"),
    (EMBEDDINGS, {"input": [-1]}, "outside the vocabulary"),
    (EMBEDDINGS, {"input": "x", "dimensions": 257}, "at most the model's hidden size 256, got 257"),
    (EMBEDDINGS, {"input": "x", "dimensions": 0}, "dimensions must be >= 1"),
    (EMBEDDINGS, {"input": "x", "dimensions": 1.5}, "dimensions"),
    (EMBEDDINGS, {"input": "x", "encoding_format": "int8"}, "'float' or 'base64', got 'int8'"),
    (EMBEDDINGS, {"input": "x", "truncate_prompt_tokens": 0}, "must be in [1, 4096]"),
    (EMBEDDINGS, {"input": "x", "dimension": 3}, "Did you mean 'dimensions'"),
    (EMBEDDINGS, {"input": "x", "add_special_tokens": False}, "send token ids"),
    (EMBEDDINGS, {"input": "x", "priority": 2**40}, "32 bits"),
    (RERANK, {"documents": ["a"]}, "query is missing"),
    (RERANK, {"query": "a"}, "documents is missing"),
    (RERANK, {"query": "a", "documents": []}, "documents is empty"),
    (RERANK, {"query": "", "documents": ["a"]}, "an empty text"),
    (RERANK, {"query": "a", "documents": ["a", ""]}, "an empty text"),
    (RERANK, {"query": "a", "documents": ["a", 5]}, "documents.1"),
    (RERANK, {"query": "a", "documents": [{"image": "a"}]}, "documents.0"),
    (RERANK, {"query": "a", "documents": ["a"] * 2049}, "documents has 2049 items"),
    (RERANK, {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    (RERANK, {"query": "a", "documents": ["a"], "instruct": "b"}, "instruct is for scores of"),
    (SCORE, {}, "Give either text_1 and text_2, or query, items"),
    (SCORE, {"text_1": "a"}, "Give both text_1 and text_2"),
    (SCORE, {"text_1": "a", "text_2": "b", "data_1": "c"}, "Give both text_1 and text_2, once"),
    (SCORE, {"text_1": "a", "text_2": []}, "text_2 is empty"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "2 queries for 1 documents"),
    (SCORE, {"text_1": "a", "text_2": ["b"] * 2049}, "text_2 has 2049 items"),
    (SCORE, {"text_1": "a", "text_2": "b", "query": "c", "items": "d"}, "Give either text_1"),
    (SCORE, {"query": "a", "items": ["b"]}, "label_token_ids is missing"),
    (SCORE, {"query": "a", "items": [], "label_token_ids": [1]}, "items is empty"),
    (SCORE, {"items": ["a"], "label_token_ids": [1]}, "Give both query and items"),
    (SCORE, {"query": "a", "items": [[1]], "label_token_ids": [1]}, "both be text, or both be tok"),
    (SCORE, {"query": [1], "items": "b", "label_token_ids": [1]}, "both be text, or both be token"),
    (SCORE, {"query": "a", "items": "b", "label_token_ids": [10**9]}, "label_token_ids: token id"),
    (SCORE, {"query": "a", "items": "b", "label_token_ids": [1] * 200}, "at most 128 ids"),
    (
        SCORE,
        {"query": "a", "items": "b", "label_token_ids": [1], "instruct": "c"},
        "for text_1",
    ),
]


@pytest.mark.parametrize(("path", "body", "words"), BODIES)
def test_bad_input(server: LiveServer, path: str, body: Any, words: str) -> None:
    assert words in refused(server.http.post(path, json=body))


def test_another_model_is_not_found(server: LiveServer) -> None:
    for path, body in (
        (EMBEDDINGS, {"input": "x"}),
        (RERANK, {"query": "a", "documents": ["b"]}),
        (SCORE, {"text_1": "a", "text_2": "b"}),
    ):
        message = refused(server.http.post(path, json={**body, "model": "bundle"}), 404)
        assert "Did you mean 'bundled'" in message
    with pytest.raises(openai.NotFoundError):
        server.client().embeddings.create(model="bundle", input="x")


@pytest.mark.exhaustive
def test_a_document_that_does_not_fit(ranking: LiveServer) -> None:
    body = {"query": QUERY, "documents": ["word " * 600]}
    assert "maximum context length is 512 tokens" in refused(ranking.http.post(RERANK, json=body))
    shortened = post(ranking, RERANK, **body, truncate_prompt_tokens=-1)
    assert 500 < shortened["usage"]["prompt_tokens"] <= 512
