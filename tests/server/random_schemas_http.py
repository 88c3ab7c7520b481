"""The random schemas of `tests/grammar/random_schemas.py` over HTTP, through all endpoints.

`python -m tests.server.random_schemas_http --requests 1000` starts a server with the bundled pair,
and sends requests from several threads until that many outputs have ended.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from openai import OpenAI

from tests.grammar.random_schemas import check_text, params
from tests.server.support import ENGINE, LiveServer, flags

CLIENTS = 12
NAMES = {"sampling_seed": "seed", "min_new_tokens": "min_tokens"}


class Answer(NamedTuple):
    text: str
    ids: list[int]  # empty: the endpoint does not return them
    reason: str


def completion(client: OpenAI, prompt: str, asked: dict[str, Any], stream: bool) -> Answer:
    schema = {"name": "x", "schema": asked["json_schema"]}
    got: Any = client.completions.create(
        model="bundled",
        prompt=prompt,
        max_tokens=asked["max_new_tokens"],
        stream=stream,
        extra_body={
            **others(asked),
            "response_format": {"type": "json_schema", "json_schema": schema},
            "return_token_ids": True,
        },
    )
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    ids = [token for choice in choices for token in choice.token_ids]
    return Answer("".join(c.text for c in choices), ids, choices[-1].finish_reason)


def chat(client: OpenAI, prompt: str, asked: dict[str, Any], stream: bool) -> Answer:
    got: Any = client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=asked["max_new_tokens"],
        stream=stream,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": asked["json_schema"], "strict": True},
        },
        extra_body={**others(asked), "return_token_ids": True},
    )
    if not stream:
        (choice,) = got.choices
        return Answer(choice.message.content, choice.token_ids, choice.finish_reason)
    choices = [chunk.choices[0] for chunk in got][1:]
    ids = [token for choice in choices for token in choice.token_ids]
    text = "".join(choice.delta.content or "" for choice in choices)
    return Answer(text, ids, choices[-1].finish_reason)


def response(client: OpenAI, prompt: str, asked: dict[str, Any], stream: bool) -> Answer:
    form = {"type": "json_schema", "name": "x", "schema": asked["json_schema"]}
    got: Any = client.responses.create(
        model="bundled",
        input=prompt,
        max_output_tokens=asked["max_new_tokens"],
        stream=stream,
        text={"format": form},  # type: ignore[typeddict-item]
        extra_body=others(asked),
    )
    if stream:
        events = list(got)
        got = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == got.output_text
    reason = "stop" if got.status == "completed" else "length"
    return Answer(got.output_text, [], reason)


ENDPOINTS: list[Callable[[OpenAI, str, dict[str, Any], bool], Answer]] = [
    completion,
    chat,
    response,
]


def others(asked: dict[str, Any]) -> dict[str, Any]:
    """Parameters under the names of the OpenAI API."""
    skipped = ("json_schema", "max_new_tokens")
    return {NAMES.get(name, name): value for name, value in asked.items() if name not in skipped}


def run(server: LiveServer, seed: int) -> bool:
    """Whether the output of request `seed` ended by itself."""
    rng = random.Random(seed)
    asked = params(rng)
    prompt = rng.choice(["JSON:", "Once upon a time", "def f(x):"])
    ask, stream = ENDPOINTS[seed % len(ENDPOINTS)], rng.random() < 0.5
    text, ids, reason = ask(server.client(), prompt, asked, stream)
    return check_text(text, ids, reason, asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    begin, done, ended = time.monotonic(), 0, 0
    settings = {**ENGINE, "device": options.device}
    with LiveServer(*flags(**settings)) as server, ThreadPoolExecutor(CLIENTS) as pool:
        seeds = itertools.count(options.first_seed)
        while ended < options.requests:
            batch = list(itertools.islice(seeds, 8 * CLIENTS))
            ended += sum(pool.map(lambda seed: run(server, seed), batch))
            done += len(batch)
            print(f"{done} requests, {ended} ended, {time.monotonic() - begin:.0f} s", flush=True)
        server.wait_idle()


if __name__ == "__main__":
    main()
