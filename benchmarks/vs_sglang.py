"""Forerun and SGLang as servers of one GPU, in turns: same weights, same client, same loads.

    python -m venv sgl && sgl/bin/pip install sglang
    python benchmarks/vs_sglang.py --model-path Qwen/Qwen3-8B --sglang-python sgl/bin/python
    python benchmarks/vs_sglang.py ... --load-format dummy                 # random weights
    python benchmarks/vs_sglang.py ... -- --speculative-algorithm DFLASH   # flags of both servers

Four loads of requests with `--input-len` + `--output-len` tokens: `--burst` of them at once, 16 at
a time, 1 at a time, and Poisson arrivals at `--request-rate`, by default 80 % of the lower one of
both rates at which the burst was served (for which both start again). The client is `forerun bench
serving --backend sglang` for both. Prints a table, and with `--output-file` appends every run as
JSON.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 1800.0
STOP_SECONDS = 60.0
LOAD = 0.8  # of the lower saturation
NAMES = ("Forerun", "SGLang")
COLUMNS = (
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
)
MISSING = (
    "SGLang is not installed for {python}, so there is nothing to compare with. It wants an"
    " environment of its own: python -m venv sgl && sgl/bin/pip install sglang, then"
    " --sglang-python sgl/bin/python. --only-forerun runs the loads on Forerun alone."
)

Result = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """What `forerun bench serving` is told."""

    name: str
    requests: int
    flags: tuple[str, ...] = ()


def loads(given: argparse.Namespace) -> list[Load]:
    """Those that need no other figures."""
    return [
        Load(f"{given.burst} at once", given.burst),
        Load("16 at a time", 16 * given.waves, ("--max-concurrency", "16")),
        Load("1 at a time", 3 * given.waves, ("--max-concurrency", "1")),
    ]


def server_command(name: str, given: argparse.Namespace, port: int) -> list[str]:
    """The command line of a server. Both have these flags."""
    start = [sys.executable, "-m", "forerun", "serve"]
    if name == "SGLang":
        start = [given.sglang_python, "-m", "sglang.launch_server"]
    shared = {
        "--model-path": given.model_path,
        "--load-format": given.load_format,
        "--port": str(port),
        "--chunked-prefill-size": str(given.chunked_prefill_size),
        "--max-running-requests": str(given.max_running_requests),
    }
    flags = [part for item in shared.items() for part in item]
    own = given.forerun_flags if name == "Forerun" else given.sglang_flags
    return [*start, *flags, *own.split(), *given.flags]


@contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[str]:
    """Runs a server; gives its URL once it generates.

    Raises:
        RuntimeError: it ends before, with the end of its output.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + START_SECONDS
            while not _answers(f"{url}/health_generate"):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError("".join(log.readlines()[-20:]) or "The server said nothing.")
                time.sleep(1.0)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def client_command(url: str, load: Load, given: argparse.Namespace) -> list[str]:
    """The command line of the client."""
    command = [sys.executable, "-m", "forerun", "bench", "serving", "--backend", "sglang"]
    command += ["--base-url", url, "--num-prompts", str(load.requests), "--json"]
    command += ["--dataset-name", "random", "--random-range-ratio", "1", "--flush-cache"]
    command += ["--random-input-len", str(given.input_len)]
    command += ["--random-output-len", str(given.output_len), "--seed", str(given.seed)]
    tokenizer = given.tokenizer_path or given.model_path
    return [*command, "--tokenizer", tokenizer, *load.flags]


def measure(url: str, name: str, load: Load, given: argparse.Namespace) -> Result:
    """One run; it is printed, and appended to the file."""
    command = client_command(url, load, given)
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(out)
    (result,) = report["results"]
    print(f"{name}, {load.name}: {result['output_throughput']:.0f} tok/s", file=sys.stderr)
    if given.output_file is not None:
        with given.output_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"server_name": name, "load": load.name, **report}) + "\n")
    return dict(result)


def compare(given: argparse.Namespace) -> dict[str, dict[str, Result]]:
    """Results by load and server."""
    names = NAMES[:1] if given.only_forerun else NAMES
    results: dict[str, dict[str, Result]] = {}

    def run(chosen: Sequence[Load]) -> None:
        for name in names:
            port = free_port()
            with serving(server_command(name, given, port), port) as url:
                for load in chosen:
                    results.setdefault(load.name, {})[name] = measure(url, name, load, given)

    def poisson(rate: float) -> Load:
        flags = ("--request-rate", f"{rate:.2f}")
        return Load(f"Poisson, {rate:.1f} req/s", given.poisson, flags)

    first = loads(given)
    if given.request_rate is not None:
        run([*first, poisson(given.request_rate)])
        return results
    run(first)
    rate = LOAD * min(each["request_throughput"] for each in results[first[0].name].values())
    run([poisson(rate)])
    return results


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def table(results: dict[str, dict[str, Result]]) -> str:
    """Markdown: Forerun / SGLang."""
    lines = ["| load | output tok/s | TTFT p50, p99 ms | ITL p50, p99 ms |", "|---|---|---|---|"]
    for load, by_name in results.items():
        rows = [[result[column] for column in COLUMNS] for result in by_name.values()]
        speed = " / ".join(f"{row[0]:,.0f}" for row in rows)
        ttft = " / ".join(f"{row[1]:.1f}, {row[2]:.0f}" for row in rows)
        itl = " / ".join(f"{row[3]:.1f}, {row[4]:.1f}" for row in rows)
        lines.append(f"| {load} | {speed} | {ttft} | {itl} |")
    return "\n".join(lines)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tokenizer-path", help="for the client; default: the model's")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--only-forerun", action="store_true")
    parser.add_argument("--forerun-flags", default="", help="more, for Forerun alone, in quotes")
    parser.add_argument("--sglang-flags", default="", help="more, for SGLang alone, in quotes")
    parser.add_argument("--chunked-prefill-size", type=int, default=8192)
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--burst", type=int, default=256)
    parser.add_argument("--waves", type=int, default=6)
    parser.add_argument("--poisson", type=int, default=512, help="requests of that load")
    parser.add_argument("--request-rate", type=float, help="of that load, requests/s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("flags", nargs="*", help="after --: for both servers")
    return parser.parse_args(given)


def is_installed(python: str) -> bool:
    found = subprocess.run([python, "-c", "import sglang"], capture_output=True)
    return found.returncode == 0


def main() -> None:
    given = arguments()
    if not given.only_forerun and not is_installed(given.sglang_python):
        sys.exit(MISSING.format(python=given.sglang_python))
    print(table(compare(given)))


if __name__ == "__main__":
    main()
