"""The draft for SmolLM2-135M-Instruct, from prompts to the folder that ships, on all GPUs.

    python training/recipes/smollm2.py                     # every stage
    python training/recipes/smollm2.py evaluate pack       # some of them
    python training/recipes/smollm2.py --drafts dspark --train-minutes 20 --work runs/longer

Stages: `prompts` makes them; `regenerate` has the target answer them, in several processes on each
GPU; `train` trains drafts, one on each GPU; `evaluate` prints their accept lengths; `pack` writes
the best one as it ships. Each runs `forerun train` and keeps everything in `--work`: ended in any
way, the same command goes on where it was. A draft learns the answers that are there when training
first begins (`data.jsonl`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jobs import Job, run_jobs
from packing import Scores, mean, pack, read_scores, table

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
PRUNED = "--draft-vocab-size 16384"
DRAFTS = {  # name: kind, flags, and why
    # The first run: three heads on the same data for the same time, all small enough to ship.
    "dspark": ("dspark", f"{PRUNED} --head-rank 32", "A third of the LM head's work; 17 MB."),
    "dflash": (
        "dflash",
        f"{PRUNED} --ce-weight 0.5 --kl-weight 0.5",
        "The target's distribution is half of its loss: DSpark's has it by itself.",
    ),
    "dflash2": (
        "dflash2",
        "--head-rank 24 --ce-weight 0.5 --kl-weight 0.5",
        "Its head cannot be pruned, so it has a smaller rank; 18 MB.",
    ),
    # Later runs, of the best kind of the first, with more answers.
    "dspark-init": (
        "dspark",
        "--head-rank 32 --learning-rate 2e-3",
        "Goes on with --initial-draft, whose vocabulary it keeps: what ships was made so.",
    ),
    "dspark-deep": (
        "dspark",
        f"{PRUNED} --head-rank 32 --num-layers 3 --intermediate-size 1024",
        "More data may be too much for two layers; a third one makes every step slower.",
    ),
    "dspark-wide": (
        "dspark",
        f"{PRUNED} --head-rank 32 --intermediate-size 1536",
        "The MLPs as wide as the target's: more parameters in as many layers.",
    ),
}
FIRST_RUN = "dspark,dflash,dflash2"
# Two narrow layers: beside a target this small, a larger draft costs what it gains.
TRAIN = (
    "--preset small --num-layers 2 --intermediate-size 768 --block-size 8 --seq-len 1024"
    " --batch-size 16 --anchors 512 --max-steps 1000000 --learning-rate 3e-3"
    " --final-learning-rate 0.01 --warmup 0.03 --validation-share 0.01 --validate-every 500"
    " --save-every 2000 --log-every 50"
)
TEMPERATURES = ("0", "0.8", "0", "1")  # of the shards in turn: half of the answers are greedy
REGENERATE = (
    "--max-new-tokens 384 --in-flight 160 --max-running-requests 128 --max-total-tokens 100000"
    " --context-length 2048 --disable-radix-cache"
)
EVALUATE = (
    "--accept-only --json --data dialogue,code,maths,summary --temperatures 0,1 --num-prompts 32"
    " --max-new-tokens 192 --max-running-requests 32 --max-total-tokens 65536"
    " --context-length 2048"
)


def make_prompts(given: argparse.Namespace) -> None:
    """Writes shards of shuffled prompts to `prompts/`: topics are mixed at any time."""
    folder, source = given.work / "prompts", given.prompts
    if folder.exists():
        return
    if source is None:
        source = given.work / "prompts.jsonl"
        command = ["prompts", "--output", source, "--count", str(given.count)]
        run_jobs([Job("prompts", command, given.work / "prompts.txt")], [None])
    lines = [line for line in source.read_bytes().split(b"\n") if line.strip()]
    random.Random(0).shuffle(lines)
    made = given.work / "prompts.part"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    count = max(1, min(len(lines), given.per_gpu * len(given.gpus)))
    for i in range(count):
        (made / f"{i:03}.jsonl").write_bytes(b"\n".join(lines[i::count]) + b"\n")
    made.rename(folder)


def regenerate(given: argparse.Namespace) -> None:
    """The target answers the shards, in `answers/`, until the time is up."""
    if (given.work / "data.jsonl").exists():
        print("regenerate: training has begun, so the answers stay as they are")
        return
    shards = sorted((given.work / "prompts").glob("*.jsonl"))
    if not shards:
        sys.exit(f"{given.work} has no prompts; run the stage prompts first.")
    jobs = []
    for i, shard in enumerate(shards):
        output = given.work / "answers" / shard.name
        command = ["regenerate", "--target", given.target, "--data", shard, "--output", output]
        command += ["--temperature", TEMPERATURES[i % len(TEMPERATURES)], *REGENERATE.split()]
        command += given.regenerate_flags.split()
        jobs.append(Job(f"regenerate {shard.stem}", command, output.with_suffix(".txt")))
    places = [gpu for gpu in given.gpus for _ in range(given.per_gpu)]
    run_jobs(jobs, places, given.regenerate_minutes)


def join_answers(work: Path) -> None:
    """Writes the answers to `data.jsonl`, but for empty ones and half a line of a killed process;
    and how many there are at each temperature to `data.json`."""
    from forerun_train.data.records import DataError, parse_record

    counts: Counter[str] = Counter()
    with (work / "data.part").open("wb") as data:
        for file in sorted((work / "answers").glob("*.jsonl")):
            made = json.loads(file.with_name(f"{file.name}.json").read_text(encoding="utf-8"))
            for line in file.read_bytes().split(b"\n"):
                with suppress(DataError):
                    parse_record(line, file.name)
                    data.write(line + b"\n")
                    counts[f"{made['sampling']['temperature']:g}"] += 1
    if not counts:
        sys.exit(f"{work} has no answers; run the stages prompts and regenerate first.")
    (work / "data.json").write_text(json.dumps(counts), encoding="utf-8")
    (work / "data.part").rename(work / "data.jsonl")


def answers(work: Path) -> str:
    """Says how many answers the drafts learn."""
    counts = json.loads((work / "data.json").read_text(encoding="utf-8"))
    return ", ".join(f"{count:,} at temperature {t}" for t, count in counts.items())


def train(given: argparse.Namespace) -> None:
    """Trains the drafts, each in a folder of `runs/`."""
    data = given.work / "data.jsonl"
    if not data.exists():
        given.work.mkdir(parents=True, exist_ok=True)
        join_answers(given.work)
    print(f"train: answers: {answers(given.work)}", flush=True)
    jobs = []
    for name in given.drafts:
        (kind, flags, _), folder = DRAFTS[name], given.work / "runs" / name
        command = [kind, "--target", given.target, "--data", data, "--output", folder, "--resume"]
        command += ["--max-minutes", str(given.train_minutes), *TRAIN.split(), *flags.split()]
        if name == "dspark-init":
            command += ["--initial-draft", given.initial_draft]
        command += given.train_flags.split()
        jobs.append(Job(f"train {name}", command, folder / "ended.txt"))
    run_jobs(jobs, given.gpus)


def evaluate(given: argparse.Namespace) -> None:
    """Prints a table of the accept lengths, which are kept in the runs' folders."""
    jobs = []
    for name in given.drafts:
        folder = given.work / "runs" / name
        command = ["evaluate", "--target", given.target, "--draft", folder / "draft"]
        command += [*EVALUATE.split(), *given.evaluate_flags.split()]
        jobs.append(Job(f"evaluate {name}", command, folder / "evaluation.json"))
    run_jobs(jobs, given.gpus)
    print(table(evaluated(given)))


def evaluated(given: argparse.Namespace) -> dict[str, Scores]:
    """The accept lengths of the drafts that have been evaluated."""
    files = {name: given.work / "runs" / name / "evaluation.json" for name in given.drafts}
    return {name: read_scores(file) for name, file in files.items() if file.exists()}


def pack_best(given: argparse.Namespace) -> None:
    """Writes the draft with the highest mean accept length as it ships."""
    drafts = evaluated(given)
    if not drafts:
        sys.exit(f"{given.work} has no draft with scores; run the stage evaluate first.")
    best = max(drafts, key=lambda name: mean(list(drafts[name].values())))
    output = given.output or given.work / "packed"
    pack(given.work / "runs" / best, output, answers(given.work), table({best: drafts[best]}))
    size = sum(file.stat().st_size for file in output.iterdir())
    print(f"pack: {best} is in {output}, {size / 1e6:.1f} MB")


STAGES = {
    "prompts": make_prompts,
    "regenerate": regenerate,
    "train": train,
    "evaluate": evaluate,
    "pack": pack_best,
}


def visible_gpus() -> list[str | None]:
    """The GPUs' numbers; [None]: there is none."""
    import torch

    numbers = [str(i) for i in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [*(named if numbers and named != [""] else numbers)] or [None]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """
    Raises:
        SystemExit: one of them is wrong.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", help=f"default: {' '.join(STAGES)}")
    parser.add_argument("--work", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--output", type=Path, help="for the packed draft (default: WORK/packed)")
    parser.add_argument("--target", default=TARGET, help="folder, GGUF file or org/name")
    parser.add_argument("--drafts", default=FIRST_RUN, help=f"of {', '.join(DRAFTS)}")
    parser.add_argument("--initial-draft", help="an earlier draft, for dspark-init")
    parser.add_argument("--prompts", type=Path, help="JSONL file (default: they are made)")
    parser.add_argument("--count", type=int, default=150_000, help="prompts that are made")
    parser.add_argument("--gpus", help="numbers, with commas (default: all)")
    parser.add_argument("--per-gpu", type=int, default=8, help="processes that regenerate")
    parser.add_argument("--regenerate-minutes", type=float, default=30.0)
    parser.add_argument("--train-minutes", type=float, default=10.0, help="compiling not counted")
    for stage in ("regenerate", "train", "evaluate"):
        parser.add_argument(f"--{stage}-flags", default="", help="more, in quotes; they win")
    found = parser.parse_args(given)
    found.stages, found.drafts = found.stages or list(STAGES), found.drafts.split(",")
    for what, names, known in (("stage", found.stages, STAGES), ("draft", found.drafts, DRAFTS)):
        for name in names:
            if name not in known:
                sys.exit(f"{what} {name!r} is not known; one of: {', '.join(known)}")
    if "dspark-init" in found.drafts and "train" in found.stages and found.initial_draft is None:
        sys.exit("dspark-init goes on with an earlier draft: name its folder with --initial-draft")
    if found.per_gpu < 1:
        sys.exit(f"--per-gpu must be at least 1, got {found.per_gpu}")
    found.gpus = found.gpus.split(",") if found.gpus else visible_gpus()
    return found


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    given = arguments()
    try:
        for stage in given.stages:
            STAGES[stage](given)
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on.")
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
