"""Lines of a batch: what is asked, and what came of it, in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from forerun.core.errors import nearest, shown

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_CUSTOM_ID = 512  # characters
PREFIX = "batch_req_"  # of results' ids; the number of the line in the input follows


class BadLine(Exception):
    """A line that asks for nothing that could be done."""


@dataclass(frozen=True)
class Line:
    """One line of the input; `error`: why it is not a request."""

    number: int  # from 1 on
    custom_id: str | None
    url: str = ""
    body: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def ident(self) -> str:
        return f"{PREFIX}{self.number}"


def read_lines(file: BinaryIO, max_bytes: int, endpoint: str | None = None) -> Iterator[Line]:
    """The lines of an input that are not empty, one at a time.

    Args:
        max_bytes: of a line.
        endpoint: that all lines must be for; None: each has one of `ENDPOINTS`.
    """
    seen: set[str] = set()
    for number, raw in _raw_lines(file, max_bytes):
        custom_id = None
        try:
            if raw is None:
                raise BadLine(f"it has more than {max_bytes} bytes, the --max-body-bytes.")
            value = _object(raw)
            custom_id = _custom_id(value, seen)
            yield Line(number, custom_id, _url(value, endpoint), _body(value))
        except BadLine as error:
            yield Line(number, custom_id, error=f"Line {number} is not a request: {error}")


def _raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers; None: it is too long."""
    number = 0
    while raw := file.readline(max_bytes + 1):
        number += 1
        if len(raw) > max_bytes and not raw.endswith(b"\n"):
            while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif raw.strip():
            yield number, raw


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"it is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadLine("it is not a JSON object.")
    return value


def _custom_id(value: Mapping[str, Any], seen: set[str]) -> str:
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise BadLine(f"its custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters.")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise BadLine("its custom_id has a lone surrogate.") from None
    if custom_id in seen:
        raise BadLine(f"the custom_id {shown(custom_id)} is that of an earlier line.")
    seen.add(custom_id)
    return custom_id


def _url(value: Mapping[str, Any], endpoint: str | None) -> str:
    if value.get("method", "POST") != "POST":
        raise BadLine(f"its method must be POST, got {shown(value['method'])}.")
    url = value.get("url")
    if url not in ENDPOINTS:
        near = nearest(url, ENDPOINTS) if isinstance(url, str) else ""
        raise BadLine(f"its url must be one of {', '.join(ENDPOINTS)}, got {shown(url)}.{near}")
    if endpoint not in (None, url):
        raise BadLine(f"its url is {url}, and the batch is for {endpoint}.")
    return str(url)


def _body(value: Mapping[str, Any]) -> dict[str, Any]:
    body = value.get("body")
    if not isinstance(body, dict):
        raise BadLine(f"its body must be an object, got {shown(body)}.")
    for name in ("stream", "background"):
        if body.get(name):
            raise BadLine(f"{name} is set, which does not go with batches.")
    return body


def result(line: Line, status: int, body: bytes, request_id: str) -> bytes:
    """The line of the output for a request that was answered.

    Args:
        body: JSON.
    """
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _written(line, response, None)


def failure(line: Line, code: str, message: str) -> bytes:
    """The line of the output for one that was not."""
    return _written(line, None, {"code": code, "message": message})


def _written(line: Line, response: Any, error: Any) -> bytes:
    values = {
        "id": line.ident,
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(values) + b"\n"
