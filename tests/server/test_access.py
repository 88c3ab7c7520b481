"""Hosts, origins and API keys: who may use a server, and how much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from forerun.core.errors import ConfigError
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.server.app import build_app
from forerun.server.engines.metrics import ServerMetrics
from forerun.server.generation import Call, Generation, Place
from forerun.server.http.api_keys import ApiKey, ApiKeys, TooMany, Usage, read_keys
from forerun.server.http.auth import CheckAccess
from forerun.server.http.errors import json_response
from forerun.server.service import Service
from forerun.server.settings import ServerSettings
from tests.server import templates
from tests.server.scripted import Scripted, tokenizer

PORT = 30000
EVIL = "http://evil.example.com"


class Engine:
    """What control routes ask; `calls` are in flight."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics()
        self.flushed = 0
        self.calls: list[Call] = []
        self.aborted: list[str] = []

    async def flush_cache(self) -> None:
        self.flushed += 1

    def abort_all(self) -> None:
        self.aborted.append("all")

    def abort_group(self, group: str, belongs: Callable[[Call], bool]) -> None:
        self.aborted += [g.rid for c in self.calls if belongs(c) for g in c.generations]


class Text:
    tokenizer = None
    has_chat_template = False


def serve(engine: Engine, **settings: Any) -> Any:
    """The application of a server without a model."""
    service = Service(ServerSettings(**settings), engine, Text())  # type: ignore[arg-type]
    with patch.object(FastAPI, "openapi"):  # most of the time
        return build_app(service)


def statuses(app: Any, *requests: tuple[str, str, list[tuple[str, str]]]) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            answers = []
            for method, path, headers in requests:
                made = client.build_request(method, f"http://x{path}", headers=headers)
                if not any(name.lower() == "host" for name, _ in headers):
                    del made.headers["host"]
                answers.append(await client.send(made))
            return answers

    return asyncio.run(ask())


class Flushed:
    """An application that counts what reaches it."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.count += 1
        await json_response({})(scope, receive, send)


FLUSHED = Flushed()
LOOPBACK = CheckAccess(FLUSHED, ServerSettings().access())

HOSTS = [  # Host headers, and the status at a server on 127.0.0.1
    *((host, 200) for host in ("localhost", "LOCALHOST", "localhost.", "LocalHost:1")),
    *((host, 200) for host in ("127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:30000")),
    *((host, 403) for host in ("evil.example.com", "127.0.0.1.evil.com", "localhost.evil.com")),
    *((host, 403) for host in ("0.0.0.0", "[::]", "127.0.0.2", "2130706433", "0x7f.1", "[::2]")),
    *((host, 403) for host in ("xlocalhost", "evil-localhost", "[::ffff:127.0.0.1]")),
    *((host, 400) for host in ("localhost:99999", "localhost:", "localhost:x", "user@localhost")),
    *((host, 400) for host in ("[fe80::1%25eth0]", "[::1", "::1", "a b", "localhost/x", "")),
    *((host, 400) for host in ("localhost, evil", "http://localhost", "localhost:80:80", "*")),
]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_hosts_on_loopback(host: str, status: int) -> None:
    answer, probe = statuses(
        LOOPBACK, ("GET", "/page.css", [("Host", host)]), ("GET", "/ping", [("Host", host)])
    )
    assert (answer.status_code, probe.status_code) == (status, 200)
    if status == 403:
        assert "--allowed-hosts" in answer.json()["error"]["message"]


def test_two_hosts_or_none_are_none() -> None:
    two = [("Host", "localhost"), ("Host", "localhost")]
    for app in (serve(Engine()), serve(Engine(), host="0.0.0.0")):
        answers = statuses(app, ("GET", "/page.css", two), ("GET", "/page.css", []))
        assert [answer.status_code for answer in answers] == [400, 400]


def test_hosts_elsewhere_and_as_given() -> None:
    """A probe uses the address of its pod; any name is served there unless some are given."""
    for settings, want in (
        ({"host": "0.0.0.0"}, [200, 200, 200]),
        ({"host": "::"}, [200, 200, 200]),
        ({"host": "127.0.0.5"}, [403, 403, 403]),
        ({"host": "0.0.0.0", "allowed_hosts": "*.Example.com,10.0.0.9"}, [200, 200, 403]),
        ({"allowed_hosts": '["*"]'}, [200, 200, 200]),
    ):
        app = serve(Engine(), **settings)
        hosts = ("chat.example.com", "10.0.0.9:8000", "example.com")
        answers = statuses(app, *(("GET", "/page.css", [("Host", h)]) for h in hosts))
        assert [answer.status_code for answer in answers] == want
        probes = statuses(app, *(("POST", "/health", [("Host", h)]) for h in hosts))
        assert [answer.status_code for answer in probes] == [405, 405, 405]  # not 403


CROSS, SAME = ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Site", "same-site")
ORIGINS = [  # headers, and the status of a flush at localhost:30000
    ([], 200),
    ([("Sec-Fetch-Site", "none")], 200),
    ([("Sec-Fetch-Site", "same-origin")], 200),
    ([CROSS], 403),
    ([SAME], 403),
    ([("Sec-Fetch-Site", "CROSS-SITE")], 403),
    ([("Sec-Fetch-Site", "none, cross-site")], 403),
    ([("Origin", f"http://localhost:{PORT}")], 200),
    ([("Origin", f"HTTP://LocalHost:{PORT}")], 200),
    ([("Origin", f"https://localhost:{PORT}")], 200),  # TLS ends at a proxy
    ([("Origin", "http://localhost")], 403),
    ([("Origin", "http://localhost:3000"), SAME], 403),
    ([("Origin", f"http://localhost:{PORT}.evil.com")], 403),
    ([("Origin", f"http://evil.com#@localhost:{PORT}")], 403),
    ([("Origin", f"http://127.0.0.1:{PORT}")], 403),
    ([("Origin", EVIL), CROSS], 403),
    ([("Origin", "null")], 403),
    ([("Origin", "")], 403),
    ([("Origin", "file://")], 403),
    ([("Origin", f"file://localhost:{PORT}")], 403),
    ([("Origin", f"http://localhost:{PORT}"), ("Origin", EVIL)], 403),
    ([("Origin", EVIL), ("X-Forwarded-Host", "evil.example.com")], 403),
]


@pytest.mark.parametrize(("headers", "status"), ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_origins(method: str, headers: list[tuple[str, str]], status: int) -> None:
    """The type of a body does not matter: text/plain needs no preflight."""
    host, before = ("Host", f"localhost:{PORT}"), FLUSHED.count
    plain = ("Content-Type", "text/plain")
    (answer,) = statuses(LOOPBACK, (method, "/flush_cache", [host, plain, *headers]))
    assert answer.status_code == status
    assert FLUSHED.count - before == (status == 200)
    if status == 403:
        assert "--allowed-origins" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_links_to_the_page_work_and_default_ports_do_not_count() -> None:
    engine = Engine()
    host, origin = ("Host", "localhost"), ("Origin", "http://localhost")
    page, flush = statuses(
        serve(engine),
        ("GET", "/", [host, CROSS]),
        ("POST", "/flush_cache", [("Host", "localhost:80"), origin]),
    )
    assert (page.status_code, flush.status_code, engine.flushed) == (200, 200, 1)


@pytest.mark.parametrize("origins", [EVIL, f'["{EVIL}/"]', '["*"]', "*"])
def test_preflights_and_answers_of_allowed_origins(origins: str) -> None:
    """Before the key: a browser sends none with a preflight."""
    app = serve(Engine(), allowed_origins=origins, api_key="k")
    host, origin = ("Host", "localhost"), ("Origin", EVIL)
    asked = [("Access-Control-Request-Method", "POST")]
    asked.append(("Access-Control-Request-Headers", "authorization,content-type"))
    preflight, refused, flushed, other = statuses(
        app,
        ("OPTIONS", "/v1/chat/completions", [host, origin, *asked]),
        ("POST", "/flush_cache", [host, origin]),
        ("POST", "/flush_cache", [host, origin, ("Authorization", "Bearer k")]),
        ("OPTIONS", "/v1/models", [host, ("Origin", "http://other"), *asked]),
    )
    assert (preflight.status_code, refused.status_code, flushed.status_code) == (200, 401, 200)
    for answer in (preflight, refused, flushed):
        assert answer.headers["access-control-allow-origin"] in (EVIL, "*")
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert other.status_code == (200 if "*" in origins else 403)


def test_without_allowed_origins_nothing_is_wrapped_for_them() -> None:
    seen = []
    original = CORSMiddleware.__init__

    def counted(self: CORSMiddleware, *args: Any, **named: Any) -> None:
        seen.append(named)
        original(self, *args, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CORSMiddleware, "__init__", counted)
        statuses(serve(Engine()), ("GET", "/", [("Host", "localhost")]))
        assert not seen
        statuses(serve(Engine(), allowed_origins="*"), ("GET", "/", [("Host", "localhost")]))
        assert seen


# --- keys -----------------------------------------------------------------------------------------


def bearer(secret: str | None) -> list[tuple[str, str]]:
    given = [] if secret is None else [("Authorization", f"Bearer {secret}")]
    return [("Host", "localhost"), *given]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\nalice  a-key\nbob b-key max_requests=1\n")
    return path


@pytest.mark.parametrize(
    ("given", "want"),
    [  # status of a flush without a key, with the key, the admin key, and the file's key
        ({}, [200, 200, 200, 200]),
        ({"api_key": "k"}, [401, 200, 401, 401]),
        ({"admin_api_key": "adm"}, [403, 403, 200, 403]),
        ({"api_key": "k", "admin_api_key": "adm"}, [401, 403, 200, 401]),
        ({"api_key_file": ""}, [401, 401, 401, 403]),
        ({"api_key_file": "", "api_key": "k"}, [401, 200, 401, 403]),
        ({"api_key_file": "", "admin_api_key": "adm"}, [401, 401, 200, 403]),
    ],
)
def test_who_may_use_control_routes(keys: Path, given: dict[str, str], want: list[int]) -> None:
    settings = {**given, "api_key_file": str(keys)} if "api_key_file" in given else given
    app = serve(Engine(), **settings)
    secrets = (None, "k", "adm", "a-key")
    for path in ("/flush_cache", "/reset_prefix_cache"):
        answers = statuses(app, *(("POST", path, bearer(secret)) for secret in secrets))
        assert [answer.status_code for answer in answers] == want
    for path in ("/start_profile", "/stop_profile"):  # they need a folder too
        answers = statuses(app, *(("POST", path, bearer(secret)) for secret in secrets))
        assert [answer.status_code for answer in answers] == [w if w != 200 else 400 for w in want]
    # Everything else is open to every key, and to all where there is only an admin key.
    others = statuses(app, *(("PUT", "/tokenize", bearer(secret)) for secret in secrets))
    assert [o.status_code for o in others] == [401 if w == 401 else 405 for w in want]
    public = ServerSettings(**settings).public()
    assert not {"api_key", "admin_api_key"} & public.keys() and "a-key" not in repr(public)


def _call(rid: str, key: str | None) -> Call:
    request = Request(rid, (1,), SamplingParams(), seed=0, stop_ids=frozenset())
    return Call(
        [Generation(request, None, Place(rid, 0, 0), False)], False, lambda _: None, key=key
    )


def test_a_key_aborts_its_own_requests_only(keys: Path) -> None:
    engine = Engine()
    engine.calls = [_call("of-alice", "alice"), _call("of-bob", "bob")]
    app = serve(engine, api_key_file=str(keys), admin_api_key="adm")
    for secret, want in (("a-key", ["of-alice"]), ("b-key", ["of-bob"])):
        engine.aborted.clear()
        assert post(app, secret, {"rid": "r"}).status_code == 200
        assert engine.aborted == want
        refused = post(app, secret, {"abort_all": True})
        assert refused.status_code == 403 and "--admin-api-key" in refused.text
        assert engine.aborted == want
    engine.aborted.clear()
    assert post(app, "adm", {"rid": "r"}).status_code == 200
    assert engine.aborted == ["of-alice", "of-bob"]
    assert post(app, "adm", {"abort_all": True}).status_code == 200
    assert engine.aborted[-1] == "all"


@pytest.mark.parametrize(("secret", "status"), [("a-key", 400), ("b-key", 200)])
def test_a_rid_clashes_with_those_of_the_same_key_only(
    keys: Path, secret: str, status: int
) -> None:
    app = Scripted(tokenizer(templates.QWEN3), "Yes.", api_key_file=str(keys))
    with patch.object(app.engine, "is_known", {"alice\tr"}.__contains__):
        body = b'{"text": "x", "rid": "r"}'
        answer = app.post("/generate", body, Authorization=f"Bearer {secret}")
    assert answer.status_code == status, answer.text
    if status == 200:
        assert answer.json()["meta_info"]["id"] == "r"
    else:
        assert "A request with id 'r' is running already" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("secret", "tenant"), [("k", 1), ("a-key", 3), ("b-key", 4), ("adm", 2)], ids=str
)
def test_requests_of_a_key_are_those_of_a_tenant(keys: Path, secret: str, tenant: int) -> None:
    given = {"api_key_file": str(keys), "api_key": "k", "admin_api_key": "adm"}
    app = Scripted(tokenizer(templates.QWEN3), "Yes.", **given)
    answer = app.post("/generate", b'{"text": "x"}', Authorization=f"Bearer {secret}")
    assert answer.status_code == 200, answer.text
    assert app.engine.tenants == [tenant]


def test_no_request_chooses_its_tenant(keys: Path) -> None:
    for path, prompt in (("/generate", "text"), ("/v1/completions", "prompt")):
        app = Scripted(tokenizer(templates.QWEN3), api_key_file=str(keys))
        body = json.dumps({prompt: "x", "tenant": 2}).encode()
        answer = app.post(path, body, Authorization="Bearer a-key")
        assert answer.status_code == 400
        assert "Unknown parameter 'tenant'" in answer.json()["error"]["message"]
    app = Scripted(tokenizer(templates.QWEN3), "Yes.")  # without keys
    assert app.post("/generate", b'{"text": "x"}').status_code == 200
    assert app.engine.tenants == [0]


def test_a_tenant_keeps_its_number_and_none_is_given_twice(keys: Path) -> None:
    all_keys = ApiKeys(None, None, str(keys))

    def tenants(*secrets: bytes) -> list[int]:
        return [key.tenant for secret in secrets if (key := all_keys.find(secret))]

    assert tenants(b"a-key", b"b-key") == [1, 2]
    keys.write_text("carol c-key\nbob b-new-key\n")
    all_keys.reload()
    assert tenants(b"c-key", b"b-new-key", b"a-key") == [3, 2]
    keys.write_text("alice a-key\ndan d-key\n")
    all_keys.reload()
    assert tenants(b"a-key", b"d-key") == [1, 4]


def post(app: Any, secret: str, body: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            return await client.post("http://localhost/abort_request", json=body, headers=headers)

    return asyncio.run(ask())


BAD_LINES = {
    "alice": "line 1: expected NAME KEY",
    "sk-secret=1 x": "line 1: expected NAME KEY",
    "al/ice sk-secret": "letters, digits",
    "alice sk-secr\u00e9t": "printable ASCII",
    "alice sk-secret max=1": "word 3 is none of max_requests",
    "alice sk-secret max_requests=": "max_requests must be given once",
    "alice sk-secret max_requests=1 max_requests=2": "given once",
    "alice sk-secret max_requests=-1": "max_requests must be given once",
    "alice sk-secret requests_per_minute=0": "must be >= 1",
    "alice sk-secret\nalice sk-secret2": "two API keys with the name 'alice'",
    "alice sk-secret\nbob sk-secret": "under another name",
    "# nothing": "has no keys",
    "\x00\xff": "expected NAME KEY",
}


@pytest.mark.parametrize("text", BAD_LINES)
def test_a_wrong_file_is_one_line_without_a_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        ServerSettings(api_key_file=str(path))
    message = str(caught.value)
    assert BAD_LINES[text] in message
    assert "secr" not in message and "\n" not in message


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary"):
        with pytest.raises(ConfigError, match="not a readable text file"):
            ServerSettings(api_key_file=str(path))


def test_settings_that_cannot_be_are_refused() -> None:
    for settings in (
        {"allowed_hosts": "http://a"},
        {"allowed_hosts": "a:80"},
        {"allowed_hosts": '["a", 1]'},
        {"allowed_origins": '["a"'},
        {"allowed_origins": "evil.com"},
        {"admin_api_key": ""},
        {"api_key": "k", "admin_api_key": "k"},
    ):
        with pytest.raises(ConfigError):
            ServerSettings(**settings)


def test_a_reload_takes_new_keys_and_keeps_the_old_ones_of_a_broken_file(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = ApiKeys(None, None, str(keys))
    alice = made.find(b"a-key")
    assert alice is not None and alice.name == "alice"
    used = made.usage(alice)
    used.start(alice)
    keys.write_text("alice new-key max_requests=1\n")
    made.reload()
    assert made.find(b"a-key") is made.find(b"b-key") is None
    new = made.find(b"new-key")
    assert new is not None and made.usage(new) is used
    with pytest.raises(TooMany):  # the one from before still runs
        used.start(new)
    for broken in ("", "alice", "alice other-key max_requests=x"):
        keys.write_text(broken)
        made.reload()
        assert made.find(b"new-key") == new
        assert "stay as they were" in caplog.records[-1].message
    keys.unlink()
    made.reload()
    assert made.find(b"new-key") == new
    assert "-key max" not in caplog.text and "new-key" not in caplog.text


def test_limits_of_a_key() -> None:
    now = [0.0]
    key = ApiKey("a", b"k", max_requests=2, requests_per_minute=3)
    usage = Usage(lambda: now[0])

    def refused() -> int:
        with pytest.raises(TooMany) as caught:
            usage.start(key)
        return caught.value.seconds

    usage.start(key)
    now[0] = 10.0
    usage.start(key)
    assert refused() == 1  # two at once; that does not count as a start
    usage.end()
    usage.start(key)
    usage.end()
    assert refused() == 50
    now[0] = 59.5
    assert refused() == 1
    now[0] = 60.0
    usage.start(key)
    usage.end()
    assert refused() == 10
    lower = ApiKey("a", b"k", requests_per_minute=1)  # after a reload
    with pytest.raises(TooMany) as caught:
        usage.start(lower)
    assert caught.value.seconds == 60
    assert "b'k'" not in repr(key)


def test_refused_requests_of_a_key_say_when_to_come_again(keys: Path) -> None:
    keys.write_text("bob b-key requests_per_minute=1\n")
    app = serve(Engine(), api_key_file=str(keys))
    first, second, look, abort = statuses(
        app,
        ("POST", "/health_generate", bearer("b-key")),
        ("POST", "/health_generate", bearer("b-key")),
        ("GET", "/tokenize", bearer("b-key")),
        ("POST", "/abort_request", bearer("b-key")),
    )
    assert (first.status_code, second.status_code) == (405, 429)
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert 59 <= int(second.headers["retry-after"]) <= 60
    assert (look.status_code, abort.status_code) == (405, 400)
    assert read_keys(keys)[0].requests_per_minute == 1
