"""`/start_profile` and `/stop_profile` of a real engine: files, limits, refusals."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.core.errors import ConfigError
from forerun.engine.profiling import MAX_STEPS
from forerun.server.native.profile import ProfileFolder
from forerun.server.settings import NOT_EMPTY, ServerSettings
from tests.server.scripted import Scripted
from tests.server.support import ENGINE, PROMPT, LiveServer, flags, wait_for
from tests.server.test_tools import PLAIN

TOKENS = 24
GREEDY = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
MARKS = ("decode step", "mixed step", "prefill step")


def start(server: LiveServer, **body: Any) -> Path:
    """Starts a profile; returns the common beginning of its files' paths."""
    answer = server.http.post("/start_profile", json=body)
    assert answer.status_code == 200, answer.text
    given = answer.json()
    return Path(given["output_dir"]) / given["profile_id"]


def stop(server: LiveServer) -> list[str]:
    answer = server.http.post("/stop_profile")
    assert answer.status_code == 200, answer.text
    files: list[str] = answer.json()["files"]
    return files


def error(answer: httpx.Response) -> str:
    message: str = answer.json()["error"]["message"]
    return message


def events(path: str | Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def steps(path: str | Path) -> Counter[str]:
    return Counter(e["name"] for e in events(path) if e["name"] in MARKS)


def decode_steps(server: LiveServer) -> int:
    count: int = server.get("/server_info")["internal_states"][0]["decode_steps"]
    return count


def test_a_profile_has_every_step_until_it_is_stopped(server: LiveServer) -> None:
    before = decode_steps(server)
    stem = start(server)
    server.generate(text=PROMPT, sampling_params=GREEDY)
    server.wait_idle()
    table, trace = stop(server)
    assert (table, trace) == (f"{stem}-TP-0.kernels.md", f"{stem}-TP-0.trace.json.gz")
    ran = decode_steps(server) - before
    assert steps(trace) == {"prefill step": 1, "decode step": ran}
    assert any(e.get("cat") == "cpu_op" for e in events(trace))
    lines = Path(table).read_text().splitlines()
    assert lines[0] == f"{ran} × decode step, 1 × prefill step, CPU; per step"
    assert any(line.startswith("| `aten::") for line in lines)
    assert sorted(p.name for p in stem.parent.iterdir() if p.name.startswith(".")) == []


def test_a_number_of_steps_ends_it_and_texts_stay(server: LiveServer) -> None:
    want = server.generate(text=PROMPT, sampling_params=GREEDY)["output_ids"]
    stem = start(
        server,
        num_steps="3",  # as SGLang's client sends it
        start_step=2,
        activities=["CPU"],
        record_shapes=True,
        profile_prefix="third",
        profile_id="my.id",
        output_dir="a/b",
    )
    assert stem.name == "third-my.id" and stem.parent.parts[-2:] == ("a", "b")
    assert server.generate(text=PROMPT, sampling_params=GREEDY)["output_ids"] == want
    trace = Path(f"{stem}-TP-0.trace.json.gz")
    wait_for(trace.exists, 20)  # without being stopped
    assert stop(server) == [f"{stem}-TP-0.kernels.md", str(trace)]
    assert steps(trace) == {"decode step": 3}  # without the prompt and the first step after it
    assert any("Input Dims" in e.get("args", {}) for e in events(trace))
    assert "No profile is running" in error(server.http.post("/stop_profile"))


def test_stages_have_files_of_their_own(server: LiveServer) -> None:
    stem = start(server, num_steps=2, profile_by_stage=True)
    for _ in range(2):
        server.generate(text=PROMPT, sampling_params=GREEDY)
    parts = [Path(f"{stem}-TP-0-{stage}.trace.json.gz") for stage in ("DECODE", "EXTEND")]
    assert [f for f in stop(server) if f.endswith(".gz")] == list(map(str, parts))
    assert steps(parts[0]) == {"decode step": 2}
    assert steps(parts[1]) == {"prefill step": 2}
    for part in parts:
        marks = [e for e in events(part) if e["name"] in MARKS]
        inside = [e for e in events(part) if e.get("cat") == "cpu_op"]
        assert inside and all(
            any(m["ts"] <= e["ts"] <= m["ts"] + m["dur"] for m in marks) for e in inside
        )


def test_files_of_others_and_files_that_are_gone(server: LiveServer) -> None:
    for name in ("12", "1"):
        stem = start(server, profile_id=name, output_dir="numbered")
        kinds = ("kernels.md", "trace.json.gz")
        assert stop(server) == [f"{stem}-TP-0.{kind}" for kind in kinds]
    stem = start(server, num_steps=1, output_dir="gone")
    server.generate(text=PROMPT, sampling_params=GREEDY)
    wait_for(Path(f"{stem}-TP-0.kernels.md").exists, 20)
    wait_for(lambda: not any(p.name.startswith(".") for p in stem.parent.iterdir()), 20)
    shutil.rmtree(stem.parent)
    assert stop(server) == []


@pytest.mark.exhaustive
def test_the_end_of_the_server_ends_a_profile(tmp_path: Path) -> None:
    options = flags(**ENGINE, torch_profiler_dir=tmp_path)
    with LiveServer(*options) as live:
        stem = start(live)
        live.generate(text=PROMPT, sampling_params=GREEDY)
        live.process.send_signal(signal.SIGTERM)
        assert live.wait_end() == 0 and "Segfault" not in live.output
    assert steps(f"{stem}-TP-0.trace.json.gz")["prefill step"] == 1


def test_one_at_a_time(server: LiveServer) -> None:
    for method in ("GET", "POST"):
        assert "No profile is running" in error(server.http.request(method, "/stop_profile"))
        start(server)
        again = server.http.request(method, "/start_profile")
        assert again.status_code == 400 and "running already" in error(again)
        assert len(stop(server)) == 2  # of no step: an empty table
    start(server, start_step=10**6)
    early = server.http.post("/stop_profile")
    assert early.status_code == 400 and "before its start_step" in error(early)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"output_dir": "/etc"}, "lies outside of --torch-profiler-dir"),
        ({"output_dir": "../other"}, "lies outside of --torch-profiler-dir"),
        ({"output_dir": "a\0b"}, "cannot be written: embedded null"),
        ({"output_dir": "x" * 300}, "cannot be written: File name too long"),
        ({"output_dir": "file/below"}, "cannot be written: Not a directory"),
        ({"num_steps": 0}, "greater than or equal to 1"),
        ({"num_steps": MAX_STEPS + 1}, f"less than or equal to {MAX_STEPS}"),
        ({"num_steps": "3.5"}, "num_steps"),
        ({"num_steps": 3.5}, "num_steps"),
        ({"profile_id": "a/b"}, "profile_id"),
        ({"start_step": -1}, "greater than or equal to 0"),
        ({"activities": ["CPU", "MEM"]}, "activities are CPU and GPU, got 'MEM'"),
        ({"activities": ["GPU"]}, "runs on a CPU"),
        ({"activities": [], "output_dir": "none"}, "record nothing"),
        ({"merge_profiles": True}, "merge_profiles is not supported yet"),
        ({"profile_prefix": "../x"}, "profile_prefix"),
        ({"profile_by_stages": True}, "Unknown parameter 'profile_by_stages'"),
    ],
)
def test_refusals(server: LiveServer, body: dict[str, Any], message: str) -> None:
    root = Path(server.get("/server_info")["torch_profiler_dir"])
    (root / "file").touch()
    refused = server.http.post("/start_profile", json=body)
    assert refused.status_code == 400 and message in error(refused)
    assert not (root / "none").exists()
    assert "No profile is running" in error(server.http.post("/stop_profile"))


def test_a_link_does_not_lead_out(tmp_path: Path) -> None:
    folder = ProfileFolder(tmp_path / "root")
    (folder.root / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="lies outside"):
        folder.make("link/x")
    assert folder.make(str(folder.root / "sub")) == folder.root / "sub"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"torch_profiler_dir .* cannot be written"):
        ProfileFolder(tmp_path / "file")


@pytest.mark.parametrize("name", NOT_EMPTY)
def test_a_name_that_is_empty(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is empty; leave it out"):
        ServerSettings(**{name: ""})


def test_without_a_folder_there_is_none() -> None:
    for path in ("/start_profile", "/stop_profile"):
        refused = Scripted(PLAIN).post(path, b"")
        assert refused.status_code == 400 and "--torch-profiler-dir" in error(refused)


@pytest.mark.exhaustive
def test_every_replica_and_every_rank_writes(tmp_path: Path) -> None:
    small = {**ENGINE, "max_total_tokens": 4096, "max_running_requests": 2}
    for settings, names in (
        ({"dp_size": 2}, ["-DP-0-TP-0", "-DP-1-TP-0"]),
        ({"tp_size": 2}, ["-TP-0", "-TP-1"]),
    ):
        options = flags(**small, **settings, torch_profiler_dir=tmp_path / str(len(names[0])))
        with LiveServer(*options) as live:
            stem = start(live)
            for subject in ("zebra", "tower", "river"):
                live.generate(text=f"{subject} " * 8, sampling_params=GREEDY)
            live.wait_idle()
            traces = [path for path in stop(live) if path.endswith(".gz")]
            assert traces == [f"{stem}{name}.trace.json.gz" for name in names]
            assert all(steps(path)["decode step"] > 0 for path in traces)
            refused = live.http.post("/stop_profile")
            assert "No profile is running" in error(refused)
