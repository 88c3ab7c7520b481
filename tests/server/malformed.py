"""Requests that no client should send, many and always the same.

    python -m tests.server.malformed --count 5000

Each is sent on a connection of its own to an idle server. There must be no 5xx, an answer within
100 ms if it is a refusal, and afterwards as many free pages, slots, open files and as little memory
as before. Exit code 1 if not. Times mean something on an idle machine only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from forerun import SamplingParams
from tests.server.processes import held, slope
from tests.server.support import ENGINE, LiveServer, flags
from tests.server.wire import Answer, Wire, request

ANSWER_SECONDS = 15.0  # after which a request counts as one without an answer
CUT_SECONDS = 0.05  # that a connection with an incomplete request stays open
REFUSAL_SECONDS = 0.1

# Of JSON, or nearly.
VALUES = (
    "null", "true", "0", "-1", "1.5", "1e400", "-1e400", "NaN", "-Infinity", "9" * 25, "9" * 5000,
    '""', '"x"', '"\\ud800"', '"\\u0000"', '"' + "x" * 20_000 + '"', "[]", "[[]]", "[null]",
    '["x"]', "[1e99]", "{}", '{"a": 1}', '{"": null}', '{"\\ud800": 1}', '{"type": "x"}',
    "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500, "[" * 100_000, "tru", "01", "'x'", "",
)  # fmt: skip
BASES = {
    "/v1/completions": {"prompt": '"x"', "max_tokens": "2", "temperature": "0"},
    "/v1/chat/completions": {
        "messages": '[{"role": "user", "content": "x"}]',
        "max_tokens": "2",
        "temperature": "0",
    },
    "/v1/responses": {"input": '"x"', "max_output_tokens": "2", "temperature": "0"},
    "/generate": {"text": '"x"', "sampling_params": '{"max_new_tokens": 2, "temperature": 0}'},
    "/tokenize": {"prompt": '"x"'},
    "/abort_request": {"rid": '"nobody"'},
    "/v1/messages": {
        "model": '"bundled"',
        "messages": '[{"role": "user", "content": "x"}]',
        "max_tokens": "2",
        "temperature": "0",
    },
    "/v1/embeddings": {"input": '"x"'},
    "/v1/rerank": {"query": '"x"', "documents": '["x"]'},
    "/v1/score": {"text_1": '"x"', "text_2": '"x"'},
    "/v1/conversations": {"items": '[{"role": "user", "content": "x"}]'},
}
# Places inside fields: (path, field, text with a value's place).
_MESSAGES = (
    "[%s]",
    '[{"role": %s, "content": "x"}]',
    '[{"role": "user", "content": %s}]',
    '[{"role": "user", "content": [%s]}]',
    '[{"role": "user", "content": [{"type": "text", "text": %s}]}]',
    '[{"role": "assistant", "content": null, "tool_calls": %s}]',
    '[{"role": "assistant", "tool_calls": [{"type": "function", "function": %s}]}]',
    '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}]',
    '[{"role": "tool", "content": "x", "tool_call_id": %s}]',
    '[{"role": "user", "content": "x", "name": %s}]',
)
_FORMATS = (
    '{"type": %s}',
    '{"type": "json_schema", "json_schema": %s}',
    '{"type": "json_schema", "json_schema": {"name": "x", "schema": %s}}',
    '{"type": "structural_tag", "format": %s}',
    '{"type": "structural_tag", "structures": %s, "triggers": ["x"]}',
)
_TOOLS = (
    "[%s]",
    '[{"type": %s, "function": {"name": "f"}}]',
    '[{"type": "function", "function": %s}]',
    '[{"type": "function", "function": {"name": %s}}]',
    '[{"type": "function", "function": {"name": "f", "parameters": %s}}]',
)
_ITEMS = (
    "[%s]",
    '[{"role": %s, "content": "x"}]',
    '[{"role": "user", "content": [{"type": "input_text", "text": %s}]}]',
    '[{"type": "function_call", "call_id": "a", "name": "b", "arguments": %s}]',
    '[{"type": "function_call_output", "call_id": "a", "output": %s}]',
    '[{"type": "reasoning", "content": %s}]',
)
_BLOCKS = (
    "[%s]",
    '[{"role": %s, "content": "x"}]',
    '[{"role": "user", "content": [%s]}]',
    '[{"role": "user", "content": [{"type": %s, "text": "x"}]}]',
    '[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": %s}]}]',
    '[{"role": "assistant", "content": [{"type": "thinking", "thinking": %s}]}]',
    '[{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": %s}]}'
    ', {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]',
    '[{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}'
    ', {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": %s}]}]',
)
_COMPLETION, _CHAT, _RESPONSE, _GENERATE = list(BASES)[:4]
_MESSAGE, _EMBEDDING, _RERANK, _SCORE, _CONVERSATION = list(BASES)[-5:]
PLACES: list[tuple[str, str, str]] = [
    *((_CHAT, "messages", text) for text in _MESSAGES),
    *((_CHAT, "response_format", text) for text in _FORMATS),
    *((_CHAT, "tools", text) for text in _TOOLS),
    (_CHAT, "tool_choice", '{"type": "function", "function": {"name": %s}}'),
    (_CHAT, "stream_options", '{"include_usage": %s}'),
    (_CHAT, "chat_template_kwargs", '{"enable_thinking": %s}'),
    (_CHAT, "chat_template_kwargs", '{"chat_template": %s}'),
    (_COMPLETION, "prompt", "[%s]"),
    (_COMPLETION, "prompt", "[[%s]]"),
    (_COMPLETION, "prompt", '["x", %s]'),
    (_COMPLETION, "stop", "[%s]"),
    (_COMPLETION, "stop_token_ids", "[%s]"),
    (_COMPLETION, "logit_bias", '{"1": %s}'),
    *((_RESPONSE, "input", text) for text in _ITEMS),
    (_RESPONSE, "reasoning", '{"effort": %s}'),
    (_RESPONSE, "text", '{"format": %s}'),
    (_RESPONSE, "metadata", '{"a": %s}'),
    (_RESPONSE, "conversation", '{"id": %s}'),
    *((_MESSAGE, "messages", text) for text in _BLOCKS),
    (_MESSAGE, "system", "[%s]"),
    (_EMBEDDING, "input", "[%s]"),
    (_EMBEDDING, "input", "[[%s]]"),
    (_EMBEDDING, "input", '["x", %s]'),
    (_RERANK, "documents", "[%s]"),
    (_RERANK, "documents", '[{"text": %s}]'),
    (_SCORE, "text_2", "[%s]"),
    (_MESSAGE, "tools", "[%s]"),
    (_MESSAGE, "tools", '[{"name": "a", "input_schema": %s}]'),
    (_MESSAGE, "tool_choice", '{"type": "tool", "name": %s}'),
    (_MESSAGE, "thinking", '{"type": "enabled", "budget_tokens": %s}'),
    (_MESSAGE, "output_config", '{"format": {"type": "json_schema", "schema": %s}}'),
    (_CONVERSATION, "items", '[{"role": "user", "content": %s}]'),
    (_CONVERSATION, "metadata", '{"a": %s}'),
    (_GENERATE, "input_ids", "[%s]"),
    (_GENERATE, "rid", "[%s]"),
    (_GENERATE, "sampling_params", "[%s]"),
    (_GENERATE, "token_ids_logprob", "[%s]"),
    *(
        (_GENERATE, "sampling_params", f'{{"max_new_tokens": 2, "{spec.name}": %s}}')
        for spec in fields(SamplingParams)
    ),
]
JSON_TYPE = "application/json"
CONTENT_TYPES = (
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "/",
    "application/json; charset=utf-16", "application/jsonx", "application/xml", "\xff", "a" * 3000,
)  # fmt: skip
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "BREW", "post")
PATHS = (
    *BASES, "/", "/health", "/metrics", "/v1/models", "/v1/loads", "/server_info", "/openapi.json",
    "/flush_cache", "/v1", "//", "/%00", "/%ff%fe", "/v1/models/x", "/..%2f..%2fetc/passwd",
    "/page.css/..", "/?" + "x=1&" * 500, "/" + "x" * 5000, "/%0a%0dX: y", "/\xff", "*",
    "http://x/v1/models",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """Bytes for one connection. `cut`: incomplete, so there may be no answer."""

    kind: str
    raw: bytes
    cut: bool = False


def requests(seed: int) -> Iterator[Request]:
    """Without end, the kinds mixed; wrong types come at every field before they repeat."""
    rng = random.Random(seed)
    typed = list(_wrong_types())
    rng.shuffle(typed)
    for at in range(10**9):
        yield typed[at % len(typed)]
        yield rng.choice(_OTHERS)(rng)


def _post(path: str, body: bytes, content_type: str = JSON_TYPE) -> bytes:
    return request("POST", path, body, Content_Type=content_type)


def _text(body: Mapping[str, str]) -> bytes:
    """JSON of fields that are JSON already."""
    return ("{" + ", ".join(f'"{k}": {v}' for k, v in body.items()) + "}").encode()


def _wrong_types() -> Iterator[Request]:
    from forerun.server.native import generate as native
    from forerun.server.openai import protocol as openai_protocol
    from forerun.server.openai import responses_protocol, tokenize
    from forerun.server.pooling import embeddings, rerank, score

    models: dict[str, Any] = {
        _COMPLETION: openai_protocol.CompletionRequest,
        _CHAT: openai_protocol.ChatRequest,
        _RESPONSE: responses_protocol.ResponsesRequest,
        _GENERATE: native.GenerateRequest,
        "/tokenize": tokenize.TokenizeRequest,
        _EMBEDDING: embeddings.EmbeddingRequest,
        _RERANK: rerank.RerankRequest,
        _SCORE: score.ScoreRequest,
    }
    places = [
        (path, name, "%s")
        for path, model in models.items()
        for name in (*model.model_fields, *model.unsupported, "unknown")
    ]
    places += [("/abort_request", name, "%s") for name in ("rid", "abort_all", "unknown")]
    for path, name, text in places + PLACES:
        for value in VALUES:
            if value == "null" and name.startswith("max_"):
                continue  # allowed, and as long as the context
            body = {**BASES[path], name: text.replace("%s", value)}
            if name == "input_ids":
                del body["text"]
            yield Request("a wrong type", _post(path, _text(body)))


def _malformed_json(rng: random.Random) -> Request:
    path = rng.choice(list(BASES))
    data = bytearray(_text(BASES[path]))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at:]
                data += b'"'
            case 2:
                data[at:at] = rng.choice(
                    (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"{[")
                )
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 20)]
    return Request("malformed JSON", _post(path, bytes(data)))


def _long_names(rng: random.Random) -> Request:
    """Unknown fields, models and paths for which the nearest known one is looked for."""
    long = rng.choice("xm_é") * rng.choice((300, 30_000, 300_000))
    path = rng.choice(list(BASES))
    match rng.randrange(3):
        case 0:
            body: dict[str, Any] = {"prompt": "x", long: 1}
        case 1:
            body = {"prompt": "x", "model": long}
        case 2:
            body = {"text": "x", "sampling_params": {long: 1}}
    return Request("long names", _post(path, json.dumps(body).encode()))


def _any_json(rng: random.Random, depth: int = 0) -> Any:
    simple = (None, True, 0, -7, 1e300, "", "x", "integer", "#/nope", "[a-", "^a$", 2**70)
    kind = rng.randrange(8) if depth < 4 else 0
    if kind < 5:
        return rng.choice(simple)
    if kind == 5:
        return [_any_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(_KEYWORDS): _any_json(rng, depth + 1) for _ in range(rng.randrange(4))}


_KEYWORDS = (
    "type", "properties", "items", "$ref", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if",
    "required", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "minItems",
    "maxItems", "prefixItems", "additionalProperties", "patternProperties", "multipleOf", "$defs",
    "begin", "end", "content", "triggers", "tags", "structures", "json_schema", "x",
)  # fmt: skip
_GRAMMAR_PIECES = (
    "root", "::=", '"a"', "|", "(", ")", "[", "]", "*", "+", "?", "{", "}", ",", "1", "99999", "\\",
    "\n", "-", "^", "\\d", "\\p{L}", "(?=", "(?P<x>", ".", "a-z", "\\1", "é", "\\u{110000}", '"',
)  # fmt: skip


def _grammars(rng: random.Random) -> Request:
    pieces = "".join(rng.choice(_GRAMMAR_PIECES) for _ in range(rng.randint(1, 12)))
    kind = rng.choice(("json_schema", "structural_tag", "regex", "ebnf"))
    if kind == "json_schema":
        value: Any = {rng.choice(_KEYWORDS): _any_json(rng) for _ in range(rng.randint(1, 4))}
    elif kind == "structural_tag":
        value = {"type": kind, "format": {"type": "tag", "begin": "x", "content": _any_json(rng)}}
    else:
        value = f"root ::= {pieces}" if kind == "ebnf" and rng.random() < 0.5 else pieces
    params = {"max_new_tokens": 2, kind: value}
    body = {"text": "x", "sampling_params": params}
    return Request("grammars", _post("/generate", json.dumps(body).encode()))


def _headers(rng: random.Random) -> Request:
    path = rng.choice(list(BASES))
    body = _text(BASES[path])
    size = rng.choice((1000, 20_000, 70_000, 500_000))
    match rng.randrange(5):
        case 0:
            raw = request("POST", path, body, X_Long="x" * size)
        case 1:
            many = {f"X-{i}": "x" for i in range(size // 10)}
            raw = request("POST", path, body, **many)
        case 2:
            raw = request("POST", path + "?" + "x" * size, body)
        case 3:
            raw = request("POST", path, body, **{"X" * size: "x"})
        case 4:
            odd = rng.choice(("\xff", "a\x00b", "\x7f", "", "a\tb", ";" * 100))
            name = rng.choice(("X-Request-Id", "traceparent", "Authorization", "Host", "Accept"))
            raw = request("POST", path, body, **{"Content-Type": JSON_TYPE, name: odd})
    return Request("headers", raw)


def _content_type(rng: random.Random) -> Request:
    path = rng.choice(list(BASES))
    return Request("content types", _post(path, _text(BASES[path]), rng.choice(CONTENT_TYPES)))


def _method(rng: random.Random) -> Request:
    raw = request(rng.choice(METHODS), rng.choice(PATHS), rng.choice((b"", b"{}", b"x" * 500)))
    return Request("methods and paths", raw, cut=raw.startswith((b"HEAD", b"CONNECT")))


def _framing(rng: random.Random) -> Request:
    """Bodies whose length is wrong, or said twice."""
    path = rng.choice(list(BASES))
    body = _text(BASES[path])
    length = rng.choice(("-1", "x", "1e3", "+5", "99999999999999999999", "5, 6", "", " 5", "0x10"))
    match rng.randrange(7):
        case 0:
            return Request("framing", request("POST", path, body, Content_Length=length), cut=True)
        case 1:
            twice = {"Content-Length": str(len(body)), "content-length": "3"}
            return Request("framing", request("POST", path, body, **twice), cut=True)
        case 2:
            both = {"Content-Length": "5", "Transfer-Encoding": "chunked"}
            return Request("framing", request("POST", path, body, **both), cut=True)
        case 3:
            coding = rng.choice(("gzip", "identity, chunked", "chunked, chunked", "x"))
            raw = request("POST", path, body, Transfer_Encoding=coding)
            return Request("framing", raw, cut=True)
        case 4:
            size = rng.choice((b"zz", b"-1", b"f" * 30, b"5;x=" + b"y" * 9000, b""))
            raw = request("POST", path, size + b"\r\n" + body, Transfer_Encoding="chunked")
            return Request("framing", raw, cut=True)
        case 5:
            short = str(len(body) - rng.randint(1, len(body)))
            raw = request("POST", path, body, Content_Type=JSON_TYPE, Content_Length=short)
            return Request("framing", raw)
        case _:
            long = str(len(body) + rng.randint(1, 10**9))
            return Request("framing", request("POST", path, body, Content_Length=long), cut=True)


def _cut(rng: random.Random) -> Request:
    path = rng.choice(list(BASES))
    raw = _post(path, _text(BASES[path]))
    return Request("cut in the middle", raw[: rng.randrange(1, len(raw))], cut=True)


_GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 300,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET  /  HTTP/1.1\r\n\r\n",
    b"\r\n" * 500,
    b"POST /generate HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
    b"GET / HTTP/1.1\r\nNo colon here\r\n\r\n",
    b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x85xxxx",
    b"POST /generate HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
)


def _garbage(rng: random.Random) -> Request:
    if rng.random() < 0.4:
        return Request("garbage", rng.randbytes(rng.randint(1, 3000)), cut=True)
    return Request("garbage", rng.choice(_GARBAGE), cut=True)


def _pipelined(rng: random.Random) -> Request:
    """More bytes behind a request that is answered."""
    path = rng.choice(list(BASES))
    first = _post(path, _text(BASES[path]))
    more = rng.choice((*_GARBAGE, first * 20, b"x" * 200_000, first[: len(first) // 2]))
    return Request("pipelined", first + more)


_OTHERS = (
    _malformed_json, _malformed_json, _grammars, _long_names, _headers, _content_type, _method,
    _framing, _cut, _garbage, _pipelined,
)  # fmt: skip


@dataclass
class Seen:
    """What a server answered."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind
    refusals: list[float] = field(default_factory=list)  # seconds
    slow: list[tuple[float, Request]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, sent: Request, answer: Answer | None, closed: bool) -> None:
        status = "closed" if closed else "none" if answer is None else str(answer.status)
        self.statuses[sent.kind, status] += 1
        if answer is None:
            if not (closed or sent.cut):
                self.problems.append(f"no answer to {shown(sent)}")
            return
        if answer.status >= 500:
            self.problems.append(f"{answer.status} {answer.body!r} to {shown(sent)}")
        if answer.status >= 400:
            self.refusals.append(answer.seconds)
            if answer.seconds > REFUSAL_SECONDS:
                self.slow.append((answer.seconds, sent))

    def marks(self) -> str:
        """Of the refusals' times."""
        times = sorted(self.refusals)
        marks = [f"p{p} {times[len(times) * p // 100] * 1e3:.1f}" for p in (50, 99)]
        return f"{', '.join(marks)}, max {times[-1] * 1e3:.1f} ms"


def shown(sent: Request) -> str:
    return f"{sent.kind}: {sent.raw[:400]!r} ({len(sent.raw)} bytes)"


async def send(url: str, sent: Request) -> tuple[Answer | None, bool]:
    """The first answer, if any, and whether the server closed the connection instead."""
    seconds = CUT_SECONDS if sent.cut else ANSWER_SECONDS
    try:
        async with asyncio.timeout(ANSWER_SECONDS), Wire(url) as wire:
            await wire.send(sent.raw)
            async with asyncio.timeout(seconds):
                return await wire.answer(), False
    except (EOFError, ConnectionError):
        return None, True
    except TimeoutError:
        return None, False


async def send_all(url: str, sent: Sequence[Request], seen: Seen) -> None:
    for one in sent:
        seen.add(one, *await send(url, one))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.malformed", description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    source = requests(options.seed)
    seen = Seen()
    with LiveServer(*flags(**ENGINE)) as server:
        pids = {
            "API process": server.process.pid,
            "engine process": server.get("/server_info")["engine_pid"],
        }
        # The first grammar reads the vocabulary.
        server.generate(text="x", sampling_params={"regex": "a", "max_new_tokens": 2})
        rounds = 10
        points: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        files: dict[str, list[int]] = {name: [] for name in pids}
        for at in range(rounds):
            some = [next(source) for _ in range(options.count // rounds)]
            asyncio.run(send_all(server.url, some, seen))
            server.wait_idle()
            for name, pid in pids.items():
                points[name].append((at * len(some) / 1000, held(pid).rss))
                files[name].append(held(pid).files)
        server.http.post("/flush_cache").raise_for_status()
        loads = server.get("/v1/loads")
        if loads["num_free_pages"] != loads["num_pages"]:
            seen.problems.append(f"pages are not free: {loads}")
        if server.get("/server_info")["engine_restarts"]:
            seen.problems.append("the engine died")
        if "Traceback" in server.output:
            start = server.output.index("Traceback")
            seen.problems.append("a traceback in the log:\n" + server.output[start:][:5000])
    print(f"{sum(seen.statuses.values())} requests; {len(seen.refusals)} refusals: {seen.marks()}")
    for kind in sorted({kind for kind, _ in seen.statuses}):
        counts = sorted((s, n) for (k, s), n in seen.statuses.items() if k == kind)
        print(f"  {kind:20}", ", ".join(f"{n} × {status}" for status, n in counts))
    for name, line in points.items():
        rate = slope(line[2:])
        sizes = ", ".join(f"{rss:.0f}" for _, rss in line)
        print(f"{name}: RSS {sizes} MiB, {rate:+.2f} MiB per 1000 requests; files {files[name]}")
        if files[name][-1] > files[name][1]:
            seen.problems.append(f"{name} has more open files than before: {files[name]}")
    for seconds, one in sorted(seen.slow, key=lambda each: -each[0])[:20]:
        print(f"SLOW {seconds * 1e3:.0f} ms: {shown(one)[:200]}")
    for problem in seen.problems[:40]:
        print("FAILED", problem[:5000])
    print(f"{len(seen.slow)} slow, {len(seen.problems)} problems")
    return 1 if seen.slow or seen.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
