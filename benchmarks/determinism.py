"""Texts of known models' layers in every way that must not change a bit, on one GPU.

    python benchmarks/determinism.py --output cells.jsonl                # all cases, 4 at a time
    python benchmarks/determinism.py --case qwen3-8b --requests 256      # one, in this process

A case is a preset in some format of its weights. It keeps the preset's widths and vocabulary, with
random weights, and of its layers the first few: every kernel has the shape that it has in the whole
model, and a case takes a minute or two. The reference is plain decoding of one request at a time,
as of `forerun doctor --determinism`. Besides the doctor's ways there are drafters: a block draft
and trees of one, with random weights; MTP layers; and the target as its own draft, whose drafts are
nearly all accepted. A line of JSON is written per way; the sums are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.config.json_files import read_json
from forerun.doctor.determinism import Check, Sizes, Way, reference_settings
from forerun.llm.bundled import preset

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8 = {"quantization": "fp8"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@dataclass(frozen=True)
class Case:
    """A known model in a format of its weights."""

    preset: str
    layers: int = 4
    quantized: dict[str, Any] | None = None  # `quantization_config` of the checkpoint
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "qwen3-8b": Case("qwen3-8b"),
    "qwen3-30b-a3b": Case("qwen3-30b-a3b"),
    "deepseek-v2-lite": Case("deepseek-v2-lite"),
    "qwen3.5-9b": Case("qwen3.5-9b", layers=8),
    "gpt-oss-20b": Case("gpt-oss-20b"),  # MXFP4
    "qwen3-8b fp8": Case("qwen3-8b", settings=FP8),
    "qwen3-8b fp8 blocks": Case("qwen3-8b", quantized=FP8_BLOCKS),
    "qwen3-8b gptq": Case("qwen3-8b", quantized=GPTQ),
    "qwen3-30b-a3b fp8": Case("qwen3-30b-a3b", settings=FP8),
    "qwen3-30b-a3b fp8 blocks": Case("qwen3-30b-a3b", quantized=FP8_BLOCKS),
    "deepseek-v2-lite fp8": Case("deepseek-v2-lite", settings=FP8),
    "qwen3.5-9b fp8": Case("qwen3.5-9b", layers=8, settings=FP8),
}
SUMS = ("requests", "differing_requests", "tokens", "differing_tokens", "other_texts")


def main() -> None:
    args = arguments()
    if args.case is None:
        run_all(args)
        return
    with tempfile.TemporaryDirectory() as folder, open(args.output, "a", encoding="utf-8") as out:
        for line in run(args.case, Path(folder), Sizes(args.requests, args.tokens), args.device):
            print(json.dumps(line), file=out, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--requests", type=int, default=96, help="texts of a case")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of a text")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time, without --case")
    parser.add_argument("--output", default="determinism.jsonl", help="a line per way is added")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def run_all(args: argparse.Namespace) -> None:
    """Runs each case in a process of its own."""
    same = [
        f"--{name}={getattr(args, name)}" for name in ("requests", "tokens", "output", "device")
    ]

    def one(name: str) -> int:
        return subprocess.run([sys.executable, __file__, "--case", name, *same]).returncode

    with ThreadPoolExecutor(args.jobs) as pool:
        failed = [name for name, code in zip(CASES, pool.map(one, CASES), strict=True) if code]
    lines = [json.loads(line) for line in Path(args.output).read_text("utf-8").splitlines()]
    sums = {key: sum(line[key] for line in lines) for key in SUMS}
    print(", ".join(f"{key.replace('_', ' ')}: {value:,}" for key, value in sums.items()))
    if failed:
        sys.exit(f"Not run to their end: {', '.join(failed)}.")
    if sums["differing_requests"]:
        sys.exit("Bits differ.")


def run(name: str, folder: Path, sizes: Sizes, device: str) -> Iterator[dict[str, Any]]:
    """What came of each way of a case, as it is known."""
    case, began = CASES[name], time.monotonic()
    target = write_target(case, folder / "target")
    settings = {
        "model_path": str(target),
        "load_format": "dummy_normal",
        "device": device,
        "dtype": "bfloat16",
        "enable_deterministic_inference": True,
        "max_running_requests": sizes.requests,
        "max_total_tokens": sizes.requests * (sizes.tokens + 128),
        **case.settings,
    }
    check = Check(reference_settings(settings), sizes)
    for way in ways(case, folder, sizes):
        found = check.run(way)
        if not found.equal:
            found.first = check.locate(way)
        yield {"case": name, "seconds": round(time.monotonic() - began)} | asdict(found)


def write_target(case: Case, folder: Path) -> Path:
    """The config of the preset's first layers."""
    config = read_json(preset(case.preset)[0] / "config.json")
    config["num_hidden_layers"] = case.layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: case.layers]
    if case.quantized is not None:
        config["quantization_config"] = case.quantized
    return write_config(config, folder)


def write_config(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def ways(case: Case, folder: Path, sizes: Sizes) -> Iterator[Way]:
    """Batches of any size, then each drafter."""
    few = {"max_total_tokens": 3 * sizes.tokens}
    chunks = {"chunked_prefill_size": 16}
    yield Way("batches")
    yield Way("prompts in chunks of 16", chunks)
    yield Way("prefix hits", {"disable_radix_cache": False}, scores_prompts=False, twice=True)
    yield Way("preemption", few, scores_prompts=False, tight=True)
    yield Way("scoring of whole texts", scores=True)
    yield Way("NGRAM", drafter("NGRAM", speculative_num_draft_tokens=8))
    tight = drafter("NGRAM", **few, **chunks)
    yield Way("NGRAM, preemption, chunks", tight, scores_prompts=False, tight=True)
    target = str(folder / "target")
    itself = drafter(
        "STANDALONE", speculative_draft_model_path=target, speculative_num_draft_tokens=5
    )
    yield Way("the target as its own draft", itself)
    draft = preset(case.preset)[1]
    if draft is not None:
        path = str(write_draft(draft, case.layers, folder / "draft"))
        for name in ("DFLASH", "DDTREE"):
            yield Way(name, drafter(name, speculative_draft_model_path=path))
    config = read_json(folder / "target" / "config.json")
    if config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers"):
        yield Way("NEXTN", drafter("NEXTN", speculative_num_draft_tokens=4))


def drafter(name: str, **settings: Any) -> dict[str, Any]:
    return {"speculative_algorithm": name, "speculative_adaptive": False, **settings}


def write_draft(draft: Path, target_layers: int, folder: Path) -> Path:
    """The config of a block draft, for a target of so many layers."""
    config = read_json(draft / "config.json")
    read = [i % target_layers for i in range(config["num_hidden_layers"])]
    config["num_target_layers"] = target_layers
    config["dflash_config"]["target_layer_ids"] = read
    return write_config(config, folder)


if __name__ == "__main__":
    main()
