"""`forerun bench serving` as a user runs it, against a stand-in server in real time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.main import run
from forerun_bench.serving.load import Load
from forerun_bench.serving.metrics import Run
from forerun_bench.serving.plot import draw
from tests.bench.serving.stand_in import StandIn, in_a_thread
from tests.bench.serving.test_metrics import FAST, SLOW

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command on a server; exit code, standard output and standard error."""

    def call(server: StandIn, *args: str) -> tuple[int, str, str]:
        with in_a_thread(server):
            small = ("--num-prompts", "5", "--output-len", "4", "--base-url", server.url)
            code = run(["bench", "serving", *small, *args])
        return code, *capfd.readouterr()

    return call


def fast(**settings: Any) -> StandIn:
    return StandIn(first=0.002, gap=0.001, **settings)


def test_the_table(bench: Call) -> None:
    code, out, err = bench(fast(per_chunk=2), "--goodput", "ttft:5000", "e2e:9000")
    assert (code, err) == (0, "")
    assert "stand-in, python, 5 requests, all at once" in out
    assert "5 completed, 0 failed" in out
    assert "requests/s within ttft 5000 ms, e2e 9000 ms" in out
    for label in ("TTFT", "TPOT", "ITL per token", "ITL per chunk", "end to end", "p99"):
        assert label in out


def test_json_is_one_object_without_the_key(bench: Call) -> None:
    server = fast(verify_ct=True)
    code, out, err = bench(server, "--json", "--api-key", "secret", "--request-rate", "500")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert "secret" not in out
    assert b"Bearer secret" in server.headers[0]
    assert report["settings"]["request_rate"] == 500
    assert report["settings"]["base_url"] == server.url
    (result,) = report["results"]
    assert result["completed"] == 5
    assert result["total_output_tokens"] == 20
    assert result["accept_length_source"] == "requests"
    # The server's own times are bounds that hold on any machine: a request is sent before it
    # arrives, and a chunk arrives after it is written.
    mean = sum(w[0] - a for w, a in zip(server.written[1:], server.arrived[1:], strict=True)) / 5
    assert result["mean_ttft_ms"] >= 1000 * mean
    assert report["server"]["model"] == "stand-in"
    assert set(report["environment"]) >= {"forerun", "commit", "python", "client"}


def test_the_output_file_grows_by_a_line_for_every_run(bench: Call, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        args = ("--sweep", "50", "90", "--output-file", str(path), "--output-details")
        code, out, _ = bench(fast(), *args)
        assert code == 0
        assert "saturation: all at once" in out and "90 % of saturation: " in out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 6
    assert lines[0]["request_rate"] == "inf" and lines[1]["request_rate"] > 0
    for line in lines:
        assert line["backend"] == "sglang" and line["completed"] == 5
        assert len(line["ttfts"]) == len(line["itls"]) == 5


def test_a_failed_request_is_exit_code_one(bench: Call) -> None:
    code, out, _ = bench(fast(faults={3: "503"}))
    assert code == 1
    assert "4 completed, 1 failed" in out
    assert "1 failed: HTTP 503" in out
    assert "The first: HTTP 503: no\n" in out


def test_a_failed_warm_up_is_exit_code_one(bench: Call) -> None:
    code, out, err = bench(fast(faults={0: "400"}))
    assert (code, out) == (1, "")
    assert err.startswith("forerun: error: the warm-up request failed: HTTP 400")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--backend", "vlm"), "Unknown --backend 'vlm'"),
        (("--plot", "no/such/folder/x.svg"), "There is no folder"),
        (("--request-rat", "1"), "No such option"),
        (("--extra-request-body", "{"), "is not JSON"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    bench: Call, args: tuple[str, ...], message: str
) -> None:
    code, out, err = bench(fast(), *args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and message in err


def test_chunks_without_counts_get_a_remark(bench: Call) -> None:
    code, out, _ = bench(fast(say_tokens=False), "--backend", "openai")
    assert code == 0
    assert "ITL per token is not known" in out
    assert "return_token_ids" in out


def test_without_streaming(bench: Call) -> None:
    code, out, _ = bench(fast(), "--disable-stream", "--json")
    assert code == 0
    (result,) = json.loads(out)["results"]
    assert result["mean_e2e_latency_ms"] > 0
    assert "mean_ttft_ms" not in result


def test_the_plot(bench: Call, tmp_path: Path) -> None:
    path = tmp_path / "cdf.svg"
    code, _, _ = bench(fast(), "--plot", str(path), "--sweep", "80")
    assert code == 0
    text = "".join(ET.fromstring(path.read_text(encoding="utf-8")).itertext())
    for part in ("TTFT, ms", "ITL per token, ms", "end to end, ms", "all at once", "requests/s"):
        assert part in text


def test_the_curves_are_the_distribution() -> None:
    """Of two end-to-end times, 5 and 7 s: none before 5 s, half from there on, all at 7 s."""
    load = Load([FAST, SLOW], started=0.0, ended=10.0, peak=2, lags=[])
    *_, axes = draw([Run(2.0, load, True, {})], "x").axes
    assert axes.get_xlim() == (0, 7000)
    (curve,) = axes.get_lines()
    steps = [(float(x), float(y)) for x, y in curve.get_xydata()]
    assert steps == [(5000, 0), (5000, 0.5), (7000, 1)]
    assert curve.get_drawstyle() == "steps-post"


def test_a_curve_keeps_its_colour_where_another_is_not_known() -> None:
    """The legend names every run, also one of which the first panel knows nothing."""
    loads = [Load([each], started=0.0, ended=10.0, peak=1, lags=[]) for each in (FAST, SLOW)]
    figure = draw([Run(2.0, loads[0], False, {}), Run(math.inf, loads[1], True, {})], "x")
    ttft, *_, e2e = figure.axes
    colours = [line.get_color() for line in e2e.get_lines()]
    assert [line.get_color() for line in ttft.get_lines()] == colours[1:]
    (legend,) = figure.legends
    assert [line.get_color() for line in legend.get_lines()] == colours
    assert [text.get_text() for text in legend.get_texts()] == ["2 requests/s", "all at once"]


def test_a_plot_of_nothing_says_so() -> None:
    load = Load([], started=0.0, ended=0.0, peak=0, lags=[])
    panels = draw([Run(2.0, load, True, {})], "x").axes
    said = [[text.get_text() for text in axes.texts] for axes in panels]
    assert said == [["not known"]] * 4


def test_it_imports_neither_torch_nor_matplotlib() -> None:
    check = (
        "import sys; from forerun.main import run;"
        "code = run(['bench', 'serving', '--base-url', 'http://127.0.0.1:9']);"
        "sys.exit(10 * code + any(name in sys.modules for name in ('torch', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 20, done.stderr
