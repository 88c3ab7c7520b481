"""The server's life: the engine is killed, the server is stopped, settings are wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from forerun.platform.open_files import OTHERS
from tests.cli.support import Result
from tests.server.support import ENGINE, LONG, PROMPT, LiveServer, flags, wait_for

SMALL = flags(**{**ENGINE, "max_total_tokens": 8192, "max_running_requests": 2})
BODY = {"text": PROMPT, "sampling_params": LONG}


@pytest.fixture
def live() -> Iterator[LiveServer]:
    with LiveServer(*SMALL) as server:
        yield server


def in_background(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.exhaustive
def test_a_killed_engine_is_replaced(live: LiveServer) -> None:
    want = live.generate(text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 9})
    pid = live.get("/server_info")["engine_pid"]
    thread, whole = in_background(lambda: live.http.post("/generate", json=BODY))
    stream = live.client(max_retries=0).completions.create(
        model="bundled",
        prompt=PROMPT,
        max_tokens=3500,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    live.wait_running(2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match=r"ended unexpectedly \(signal 9\)"):
        list(stream)
    thread.join(5)
    assert whole[0].status_code == 503
    assert "signal 9" in whole[0].json()["error"]["message"]
    health = live.http.get("/health")
    assert health.status_code == 503
    refused = live.http.post("/generate", json=BODY)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert live.http.get("/v1/loads").status_code == 503
    assert live.http.get("/v1/models").status_code == 200
    metrics = live.http.get("/metrics").text
    assert 'forerun_engine_up{model_name="bundled"} 0.0' in metrics
    assert 'finished_reason="error",model_name="bundled"} 2.0' in metrics
    assert 'sglang:num_running_reqs{model_name="bundled"} 0.0' in metrics

    wait_for(lambda: live.http.get("/health").status_code == 200, 60)
    again = live.generate(text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 9})
    assert again["output_ids"] == want["output_ids"]
    info = live.get("/server_info")
    assert info["engine_pid"] != pid
    assert info["engine_restarts"] == 1
    metrics = live.http.get("/metrics").text
    assert 'forerun_engine_up{model_name="bundled"} 1.0' in metrics
    assert 'forerun_engine_restarts_total{model_name="bundled"} 1.0' in metrics
    live.wait_idle()
    _sigterm_drains(live)


def _sigterm_drains(live: LiveServer) -> None:
    """What runs is answered in full, what is new is refused; then the server ends."""
    params = {**LONG, "max_new_tokens": 500}
    thread, whole = in_background(
        lambda: live.http.post("/generate", json={"text": PROMPT, "sampling_params": params})
    )
    live.wait_running()
    pid = live.get("/server_info")["engine_pid"]
    live.process.send_signal(signal.SIGTERM)
    wait_for(lambda: live.http.get("/health").status_code == 503, 5)
    refused = live.http.post("/generate", json=BODY)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    thread.join(30)
    assert whole[0].status_code == 200
    assert len(whole[0].json()["output_ids"]) == 500
    assert live.wait_end() == 0
    assert not exists(pid)


@pytest.mark.exhaustive
def test_a_second_signal_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """The engine's process and the folder of the sockets are gone."""
    with LiveServer(*SMALL, TMPDIR=str(tmp_path)) as live:
        assert [(p.stat().st_mode & 0o777) for p in tmp_path.glob("forerun-*")] == [0o700]
        pid = live.get("/server_info")["engine_pid"]
        with live.http.stream("POST", "/generate", json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            live.process.send_signal(signal.SIGINT)
            wait_for(lambda: live.http.get("/health").status_code == 503, 5)
            started = time.monotonic()
            live.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert "shutting down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert live.wait_end() == 1
        assert time.monotonic() - started < 5
        assert "Traceback" not in live.output
    assert not exists(pid)
    assert list(tmp_path.glob("forerun-*")) == []


@pytest.mark.exhaustive
def test_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    server = LiveServer(*SMALL, TMPDIR=str(tmp_path))
    wait_for(lambda: list(tmp_path.glob("forerun-*/*-out")), 30)  # the engine is being built
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end(10) == 130
    assert server.output == ""
    assert list(tmp_path.glob("forerun-*")) == []


@pytest.mark.exhaustive
def test_the_limit_of_open_files_and_the_end_of_a_killed_server(tmp_path: Path) -> None:
    """Each connection is a file, and many systems allow 1,024 at first; the engine ends too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(8192 + 2 + OTHERS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
    try:
        live = LiveServer(*SMALL, TMPDIR=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with live:
        given, _ = resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE)
        assert given == wanted
        pid = live.get("/server_info")["engine_pid"]
        live.process.kill()
        wait_for(lambda: not exists(pid), 10)
    assert list(tmp_path.glob("forerun-*")) == []


@pytest.mark.exhaustive
def test_an_engine_whose_rank_is_killed_is_replaced(tmp_path: Path) -> None:
    """And no rank outlives its engine, nor the server."""
    settings = {**ENGINE, "max_total_tokens": 8192, "max_running_requests": 2, "tp_size": 2}
    with LiveServer(*flags(**settings), TMPDIR=str(tmp_path)) as live:
        want = live.generate(text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 9})
        pid = live.get("/server_info")["engine_pid"]
        ranks = children(pid)
        assert len(ranks) == 2
        thread, whole = in_background(lambda: live.http.post("/generate", json=BODY))
        live.wait_running()
        os.kill(ranks[1], signal.SIGKILL)
        thread.join(20)
        assert whole[0].status_code == 503
        wait_for(lambda: live.http.get("/health").status_code == 200, 60)
        again = live.generate(text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 9})
        assert again["output_ids"] == want["output_ids"]
        wait_for(lambda: not any(map(exists, [pid, *ranks])), 10)
        ranks = children(live.get("/server_info")["engine_pid"])
        live.process.kill()
        wait_for(lambda: not any(map(exists, ranks)), 10)
    assert list(tmp_path.glob("forerun-*")) == []


@pytest.mark.exhaustive
def test_a_node_joins_again_and_ends_with_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {**ENGINE, "max_total_tokens": 8192, "max_running_requests": 2, "tp_size": 2}
    common = flags(**settings, nnodes=2, dist_init_addr=address)
    short = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 9}}
    other = LiveServer(*common, "--node-rank", "1")
    with LiveServer(*common) as live:
        want = live.generate(**short)
        pid = live.get("/server_info")["engine_pid"]
        ranks = [*children(pid), *children(other.process.pid)]
        assert len(ranks) == 2
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(exists, ranks)), 5)
        wait_for(lambda: live.http.get("/health").status_code == 200, 60)
        assert live.generate(**short)["output_ids"] == want["output_ids"]
        assert "This node joins again" in other.output
        live.process.send_signal(signal.SIGTERM)
        assert (live.wait_end(), other.wait_end()) == (0, 0)


def children(pid: int) -> list[int]:
    """Processes that `spawn` has started, without its resource tracker."""
    listed = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in listed}
    return [child for child, line in lines.items() if "spawn_main" in line]


@pytest.mark.exhaustive
def test_an_engine_that_keeps_dying_ends_the_server(tmp_path: Path) -> None:
    """Its model is gone when it is to start again."""
    from forerun.llm.bundled import bundled

    target = tmp_path / "target"
    target.mkdir()
    for path in bundled("target").iterdir():
        (target / path.name).symlink_to(path)
    settings = {**ENGINE, "model_path": str(target), "speculative_algorithm": "NGRAM"}
    with LiveServer(*flags(**settings)) as live:
        (target / "model.safetensors").unlink()
        os.kill(live.get("/server_info")["engine_pid"], signal.SIGKILL)
        assert live.wait_end(120) == 1
        assert "times in a row" in live.output


# --- settings -------------------------------------------------------------------------------------


def test_bad_settings_are_one_line(forerun: Callable[..., Result]) -> None:
    assert "port must be in" in forerun("serve", "--port", "99999").error
    assert "max_n must be >= 1" in forerun("serve", "--max-n", "0").error
    assert "both ssl_keyfile" in forerun("serve", "--ssl-keyfile", __file__).error
    tls = ("--ssl-keyfile", "no", "--ssl-certfile", "no")
    assert "is not a file" in forerun("serve", *tls).error
    assert "request_timeout must be > 0" in forerun("serve", "--request-timeout", "0").error
    assert "Did you mean 'DFLASH'" in forerun("serve", "--speculative-algorithm", "dflahs").error
    assert "Did you mean --host" in forerun("serve", "--hots", "x").error


def refusal(*arguments: str) -> str:
    """The one line that a server ends with."""
    server = LiveServer(*arguments)
    assert server.wait_end(60) == 2, server.output
    assert re.fullmatch("forerun: error: [^\n]*\n", server.output), server.output
    return server.output


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(
    forerun: Callable[..., Result],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "choose another --port" in forerun("serve", "--port", port).error


@pytest.mark.exhaustive
def test_what_the_engine_refuses_is_one_line() -> None:
    """Found in the engine's process, told by the server's."""
    assert "triton" in refusal("--device", "cpu", "--attention-backend", "triton")


@pytest.mark.exhaustive
def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    names = ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *make.split(), *names], check=True, capture_output=True)
    with LiveServer(*SMALL, *flags(ssl_keyfile=key, ssl_certfile=certificate)) as live:
        assert live.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{live.url}/health", verify=trust).json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{live.url}/health")
    wrong = flags(ssl_keyfile=certificate, ssl_certfile=key)
    assert "TLS files cannot be used" in refusal(*wrong)


@pytest.mark.exhaustive
def test_tls_with_certificates_of_clients(tmp_path: Path) -> None:
    """An encrypted key, clients that must be signed, and chosen ciphers."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=tmp_path)

    new = ("req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-addext")
    names = ("subjectAltName=IP:127.0.0.1", "-subj")
    openssl(*new, *names, "/CN=a", "-passout", "pass:x", "-keyout", "key", "-out", "certificate")
    openssl(*new, *names, "/CN=b", "-nodes", "-keyout", "client-key", "-out", "client")
    files = {
        "ssl_keyfile": tmp_path / "key",
        "ssl_certfile": tmp_path / "certificate",
        "ssl_ca_certs": tmp_path / "client",
    }
    assert "TLS files cannot be used" in refusal(*flags(**files, ssl_keyfile_password="y"))
    password = {"ssl_keyfile_password": "x"}
    assert "TLS" in refusal(*flags(**files, **password, ssl_ciphers="no such cipher"))
    cipher = "ECDHE-RSA-AES256-GCM-SHA384"
    settings = flags(**files, **password, ssl_cert_reqs=2, ssl_ciphers=cipher)
    with LiveServer(*SMALL, *settings) as live:
        trust = ssl.create_default_context(cafile=str(tmp_path / "certificate"))
        trust.maximum_version = ssl.TLSVersion.TLSv1_2  # whose ciphers can be chosen
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{live.url}/health", verify=trust)
        trust.load_cert_chain(tmp_path / "client", tmp_path / "client-key")
        assert httpx.get(f"{live.url}/health", verify=trust).json() == {"status": "ok"}
        trust.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{live.url}/health", verify=trust)
        assert "ssl_keyfile_password" not in live.output
