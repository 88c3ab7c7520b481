"""Throughput of Ray Serve on this machine's CPUs: one replica and two, in turns.

    pip install 'forerun[ray]'
    python benchmarks/ray_scaling.py                       # 4 cores a replica, and 4 for the rest
    python benchmarks/ray_scaling.py --at-least 1.7        # exit code 1 if the ratio is lower

A replica is a whole server with the bundled target, which decodes plainly. `--clients` per replica
send one request after the other over HTTP, each with another prompt; what counts are the tokens of
the answers that arrive within `--seconds`. The ratio of a round is two replicas' tokens/s over
one's, and the median over the rounds is printed. The ingress, Serve's proxy and the clients need
cores of their own, so fewer cores than replicas and these need are an error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

import ray
from forerun.platform.cpu_threads import logical_cores
from forerun.ray import deployment
from ray import serve

REST = 4  # cores besides the replicas'
WARM_UP_SECONDS = 2.0
NEW_TOKENS = 64
SETTINGS = {"device": "cpu", "speculative_algorithm": "NONE", "max_running_requests": 16}


def main() -> int:
    args = arguments()
    needed = 2 * args.threads + REST
    if logical_cores() < needed:
        print(f"{needed} idle cores are needed, here are {logical_cores()}.", file=sys.stderr)
        return 2
    ray.init(
        num_cpus=2 * args.threads,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(args.threads)}},
    )
    serve.start(http_options={"port": args.port})
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for _, replicas in itertools.product(range(args.rounds), speeds):
        settings = {**SETTINGS, "num_replicas": replicas, "num_cpus": args.threads}
        serve.run(deployment(settings), name="forerun", route_prefix="/")
        speeds[replicas].append(tokens_per_second(replicas * args.clients, args))
    serve.shutdown()
    ray.shutdown()
    return report(speeds, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=4, help="cores of a replica")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time, per replica")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--at-least", type=float, default=0.0, help="the ratio that is demanded")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def tokens_per_second(clients: int, args: argparse.Namespace) -> float:
    """Of all answers that arrive in time.

    Raises:
        OSError: a request failed.
    """
    begin = time.perf_counter() + WARM_UP_SECONDS
    end = begin + args.seconds

    def ask(client: int) -> int:
        tokens = 0
        for number in itertools.count():
            answer = generate(args.port, f"def f_{client}_{number}(a, b):")
            now = time.perf_counter()
            if now >= end:
                break
            if now >= begin:
                tokens += answer["meta_info"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(clients) as threads:
        return sum(threads.map(ask, range(clients))) / args.seconds


def generate(port: int, text: str) -> dict[str, Any]:
    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0}
    body = json.dumps({"text": text, "sampling_params": params}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def report(speeds: dict[int, list[float]], args: argparse.Namespace) -> int:
    """Prints the result. Returns the exit code."""
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    ratio = statistics.median(ratios)
    if args.json:
        print(json.dumps({"tokens_per_second": speeds, "ratios": ratios, "ratio": ratio}))
    else:
        table = Table("replicas", "tokens/s, by round")
        for replicas, each in speeds.items():
            table.add_row(str(replicas), ", ".join(f"{speed:.0f}" for speed in each))
        console = Console()
        console.print(table)
        console.print(f"two over one: {ratio:.2f} ({args.threads} cores a replica)")
    return 0 if ratio >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
