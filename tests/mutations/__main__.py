"""`python -m tests.mutations --count 500 --seed 0`: each case in a process with a deadline.

Exits with 1 if a case ends in anything but a refusal in one line or the right text, or takes over
`--seconds`.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import pkgutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import transformers
import transformers.models.auto.tokenization_auto

import forerun
from forerun.llm.bundled import bundled
from tests.mutations.damage import Damage, damaged
from tests.mutations.outcome import Outcome, completion, outcome, transformers_ids

FORK = multiprocessing.get_context("fork")
ORACLE_SECONDS = 60  # for transformers, which is not what is tested


def preload() -> None:
    """Imports what every case needs, so that each fork has it."""
    transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast  # noqa: B018  lazy
    for package in ("executor", "engine", "models", "speculative", "llm", "kernels", "grammar"):
        path = [str(Path(forerun.__file__).parent / package)]
        for module in pkgutil.walk_packages(path, f"forerun.{package}."):
            with suppress(ImportError):  # optional dependencies
                importlib.import_module(module.name)


def child(pipe: Connection, damage: Damage, reference: tuple[int, ...]) -> None:
    """Sends "compare" when only transformers is left to be asked, then the outcome."""
    sys.stdin = open(os.devnull)  # noqa: SIM115  nobody answers questions here
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def compare(folder: Path, prompt: list[int]) -> list[int]:
        pipe.send("compare")
        return transformers_ids(folder, prompt)

    try:
        got = outcome(damage, reference, compare)
        pipe.send(replace(got, cpu_seconds=time.process_time()))
    except BaseException:  # noqa: BLE001  the finding
        pipe.send(Outcome("wrong", traceback.format_exc()))
    os._exit(0)


def run(seed: int, seconds: float, reference: tuple[int, ...]) -> tuple[Damage, Outcome, float]:
    with tempfile.TemporaryDirectory() as folder:
        damage = damaged(bundled("target").parent, Path(folder), seed)
        begin = time.perf_counter()
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=child, args=(sender, damage, reference))
        process.start()
        sender.close()
        try:
            got = receiver.recv() if receiver.poll(seconds) else Outcome("wrong", "takes too long")
            took = time.perf_counter() - begin
            if got == "compare":
                late = Outcome("wrong", "transformers takes too long")
                got = receiver.recv() if receiver.poll(ORACLE_SECONDS) else late
        except EOFError:
            process.join()
            got, took = Outcome("wrong", f"exit code {process.exitcode}"), 0.0
        process.kill()
        process.join()
    return damage, got, took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; others follow")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--verbose", action="store_true", help="every case, not the wrong ones only"
    )
    args = parser.parse_args()
    preload()
    with FORK.Pool(1) as pool:  # threads of an engine would not survive the forks below
        reference = pool.apply(reference_ids)
    kinds, slowest, cpu = Counter[str](), 0.0, [0.0]
    seeds = range(args.seed, args.seed + args.count)
    with ThreadPoolExecutor(args.jobs) as threads:
        for seed, (damage, got, took) in zip(
            seeds, threads.map(lambda seed: run(seed, args.seconds, reference), seeds), strict=True
        ):
            kinds[got.kind] += 1
            slowest = max(slowest, took)
            cpu.append(got.cpu_seconds)
            if args.verbose or got.kind == "wrong":
                name = f"{damage.part}/{damage.file}, {damage.what}"
                print(f"{seed:5} {took:5.1f} s {got.kind:16} {name}: {got.detail}", flush=True)
    print(f"{dict(kinds)}, slowest {slowest:.1f} s; {max(cpu):.1f} s of CPU, all {sum(cpu):.0f} s")
    sys.exit(kinds["wrong"] > 0)


def reference_ids() -> tuple[int, ...]:
    return completion(bundled("target"), bundled("draft"))[1]


if __name__ == "__main__":
    main()
