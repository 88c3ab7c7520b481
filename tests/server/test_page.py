"""The files of the page at `/`, and the endpoints that it brought."""

from __future__ import annotations

import re

import httpx
import pytest

from forerun.server.http.page import FILES, FOLDER
from tests.server.support import PROMPT, QUESTION, LiveServer

MAX_BYTES = 60_000  # of all files


@pytest.mark.parametrize("path", FILES)
def test_files_have_types_policy_and_etags(server: LiveServer, path: str) -> None:
    name, media_type = FILES[path]
    answer = server.http.get(path)
    assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == media_type
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'self'"
    assert not any("unsafe" in part or "http" in part or "data:" in part for part in policy)
    tag = answer.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = server.http.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert server.http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    head = server.http.head(path)
    assert head.status_code == 200 and head.content == b""


def test_files_are_small_and_need_nothing_from_elsewhere() -> None:
    files = sorted(FOLDER.iterdir())
    assert [file.name for file in files] == sorted(name for name, _ in FILES.values())
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
    for file in files:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//\w+\.|@import|url\(", text), file.name
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|localStorage", script)


@pytest.mark.parametrize("stop", [[], ["magnets"], ["7 magnets", " hours"]])
def test_token_texts_are_the_text(server: LiveServer, stop: list[str]) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 60, "stop": stop}
    chat = server.http.post(
        "/tokenize", json={"messages": [{"role": "user", "content": QUESTION}]}
    ).json()
    body = {
        "input_ids": chat["tokens"],
        "sampling_params": params,
        "return_token_texts": True,
    }
    whole = server.generate(**body)
    assert len(whole["token_texts"]) == len(whole["output_ids"]) > 1
    assert "".join(whole["token_texts"]) == whole["text"]
    with server.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        data = [line[6:] for line in response.iter_lines() if line and "[DONE]" not in line]
    events = [httpx.Response(200, content=one).json() for one in data]
    for event in events:
        assert len(event["token_texts"]) == len(event["output_ids"])
        if event["output_ids"]:
            assert "".join(event["token_texts"]) == event["text"]
    assert events[-1]["token_texts"] == whole["token_texts"]
    assert "token_texts" not in server.generate(text=PROMPT, sampling_params={"max_new_tokens": 2})


def test_tokenize_gives_the_ids_that_completions_start_from(server: LiveServer) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"max_tokens": 1, "return_token_ids": True}
    cases = [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": messages}),
    ]
    for path, body in cases:
        answer = server.http.post(path, json={**body, **asked}).raise_for_status().json()
        ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        got = server.http.post("/tokenize", json=body).raise_for_status().json()
        assert got == {"count": len(ids), "max_model_len": 4096, "tokens": ids}
    for bad in ({}, {"prompt": PROMPT, "messages": messages}, {"prompt": "x" * 10**6}):
        refused = server.http.post("/tokenize", json=bad)
        assert refused.status_code == 400 and refused.json()["error"]["message"]
    assert server.get("/model_info")["has_chat_template"] is True
