"""`openai`: chains of responses, conversations, background, batches, embeddings.

Prints what it got, as JSON. Arguments: the server's URL.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from openai import OpenAI

QUESTION = "How warm is it in Paris?"
SETTINGS: Any = {"model": "bundled", "temperature": 0, "max_output_tokens": 60}


def until(done: Callable[[], Any]) -> Any:
    """Its first true value, within a minute."""
    for _ in range(300):
        if value := done():
            return value
        time.sleep(0.2)
    raise TimeoutError("not done within a minute")


def responses(client: OpenAI) -> dict[str, Any]:
    first = client.responses.create(**SETTINGS, input=QUESTION, store=True)
    second = client.responses.create(**SETTINGS, input="And Rome?", previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc").data
    talk = client.conversations.create(items=[{"role": "user", "content": QUESTION}])
    client.responses.create(**SETTINGS, input="Well?", conversation=talk.id)
    with client.responses.stream(**SETTINGS, input=QUESTION, store=False) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    begun = client.responses.create(**SETTINGS, input=QUESTION, background=True)

    def ended() -> Any:
        got = client.responses.retrieve(begun.id)
        return got if got.status not in ("queued", "in_progress") else None

    background = until(ended)
    client.responses.delete(first.id)
    return {
        "responses": first.output_text,
        "responses stream": "".join(deltas),
        "background": background.output_text,
        "roles": [item.role for item in items],  # type: ignore[union-attr]
        "conversation": len(client.conversations.items.list(talk.id).data),
    }


def batch(client: OpenAI) -> Any:
    body = {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"temperature": 0, "max_tokens": 60, "seed": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    text = io.BytesIO(json.dumps(line).encode())
    file = client.files.create(file=("requests.jsonl", text), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = until(lambda: client.batches.retrieve(made.id).output_file_id)
    answer = json.loads(client.files.content(done).text)["response"]["body"]
    return answer["choices"][0]["message"]["content"]


def main(url: str) -> dict[str, Any]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    embedded = client.embeddings.create(model="bundled", input=[QUESTION, "And Rome?", QUESTION])
    return {
        **responses(client),
        "batch": batch(client),
        "embeddings": [each.embedding for each in embedded.data],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
