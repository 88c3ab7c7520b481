"""The recipe of the draft for SmolLM2-135M-Instruct, in tiny sizes with the bundled target."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from safetensors import safe_open

from forerun import LLM, SamplingParams
from forerun.evals.acceptance import Acceptance
from forerun_train.cli.draft import option_flags
from tests.cli.support import PAIR, needs_pair

FOLDER = Path(__file__).resolve().parents[2] / "training" / "recipes"
TINY = {
    "--target": str(PAIR / "target"),
    "--gpus": "0",
    "--per-gpu": "2",
    "--count": "30",
    "--regenerate-flags": "--max-new-tokens 16 --in-flight 4 --max-running-requests 4"
    " --max-total-tokens 6000 --device cpu",
    "--train-flags": "--max-steps 3 --seq-len 128 --batch-size 2 --anchors 8 --validation-share 0.3"
    " --validation-batches 1 --intermediate-size 64 --num-layers 1"
    " --draft-vocab-size 1024 --device cpu",
    "--evaluate-flags": "--num-prompts 1 --max-new-tokens 6 --max-total-tokens 6000"
    " --data dialogue,maths --max-running-requests 4 --device cpu",
}


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import smollm2

        yield smollm2


def run(work: Path, *more: str) -> subprocess.CompletedProcess[str]:
    flags = [word for item in TINY.items() for word in item]
    command = [sys.executable, str(FOLDER / "smollm2.py"), "--work", str(work), *flags, *more]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=paths)


@needs_pair
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_it_makes_a_draft_that_serves(tmp_path: Path) -> None:
    """Every stage; a second time nothing is trained, answered or scored again."""
    work, output = tmp_path / "work", tmp_path / "ships"
    more = ("--drafts", "dspark", "--output", str(output))
    done = run(work, *more)
    assert done.returncode == 0, done.stderr
    assert len((work / "data.jsonl").read_bytes().splitlines()) > 20
    assert set(json.loads((work / "data.json").read_text())) == {"0", "0.8"}
    rows = [line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("|")]
    assert rows == ["| draft", "|---|---|---|---|---|", "| dspark", "| dspark"]
    assert {file.name for file in output.iterdir()} == {
        "README.md", "config.json", "model.safetensors",
    }  # fmt: skip
    with safe_open(output / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "d2t" in names and not {"lm_head.weight", "t2d"} & names
    assert '"draft_vocab_size": 1024' in (output / "README.md").read_text()
    drafts = {"speculative_draft_model_path": str(output), "speculative_algorithm": "DFLASH"}
    with LLM(device="cpu", dtype="float32", max_total_tokens=1024, **drafts) as llm:
        answer = llm.generate("One and", SamplingParams(temperature=0, max_new_tokens=8))
    assert Acceptance.of(answer.meta_info).accept_length is not None

    again = run(work, *more)
    assert again.returncode == 0, again.stderr
    assert "has ended" in done.stdout and "has ended" not in again.stdout
    assert [line for line in again.stdout.splitlines() if line.startswith("|")] == [
        line for line in done.stdout.splitlines() if line.startswith("|")
    ]


@pytest.mark.parametrize(
    "more, message",
    [
        (["trian"], "stage 'trian' is not known; one of: prompts, regenerate, train"),
        (["--drafts", "dspark,eagle"], "draft 'eagle' is not known; one of: dspark, dflash"),
        (["--drafts", "dspark-init"], "name its folder with --initial-draft"),
        (["--per-gpu", "0"], "--per-gpu must be at least 1, got 0"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["regenerate"], "has no prompts; run the stage prompts first."),
        (["train"], "has no answers; run the stages prompts and regenerate first."),
        (["pack"], "has no draft with scores; run the stage evaluate first."),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    recipe: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--work", str(tmp_path / "w"), *more])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            recipe.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert message in str(ended.value.code)
    assert "\n" not in str(ended.value.code)


def test_the_settings_are_those_of_the_commands(recipe: ModuleType) -> None:
    """`forerun train KIND` has the flags, and a draft says why it is tried."""
    known = {f"--{flag.name.replace('_', '-')}" for flag in option_flags()} | {"--preset"}
    for kind, flags, why in recipe.DRAFTS.values():
        used = {word for word in f"{recipe.TRAIN} {flags}".split() if word.startswith("--")}
        assert used <= known
        assert kind in ("dspark", "dflash", "dflash2")
        assert why.endswith((".", "?"))
    assert set(recipe.FIRST_RUN.split(",")) <= set(recipe.DRAFTS)


def test_prompts_are_divided(recipe: ModuleType, tmp_path: Path) -> None:
    """Each line goes into one shard, whatever it says; made shards stay."""
    lines = [json.dumps({"prompt": f"{i}\u2028b"}, ensure_ascii=False) for i in range(10)]
    source = tmp_path / "mine.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    given = argparse.Namespace(work=tmp_path, prompts=source, per_gpu=3, gpus=["0"])
    recipe.make_prompts(given)
    source.unlink()
    recipe.make_prompts(given)
    shards = sorted((tmp_path / "prompts").iterdir())
    assert [shard.name for shard in shards] == ["000.jsonl", "001.jsonl", "002.jsonl"]
    found = [line for shard in shards for line in shard.read_text("utf-8").strip().split("\n")]
    assert sorted(found) == sorted(lines) and found != lines


def test_answers_that_cannot_be_learnt_are_left_out(recipe: ModuleType, tmp_path: Path) -> None:
    def line(answer: str) -> str:
        turns = [("user", "a"), ("assistant", answer)]
        return json.dumps({"messages": [{"role": r, "content": text} for r, text in turns]})

    (tmp_path / "answers").mkdir()
    for name, temperature in (("000", 0.0), ("001", 1.0)):
        file = tmp_path / "answers" / f"{name}.jsonl"
        file.write_text(f"{line('b')}\n{line('')}\n{line('c' + name)}\n{line('half')[:-9]}")
        sidecar = file.with_name(f"{name}.jsonl.json")
        sidecar.write_text(json.dumps({"sampling": {"temperature": temperature}}))
    recipe.join_answers(tmp_path)
    kept = (tmp_path / "data.jsonl").read_text().splitlines()
    assert kept == [line("b"), line("c000"), line("b"), line("c001")]
    assert recipe.answers(tmp_path) == "2 at temperature 0, 2 at temperature 1"


def test_the_best_draft_is_that_of_the_highest_mean(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"dspark": (2.0, 1.5), "dflash": (2.5, 1.25), "dflash2": (1.0, 1.0)}
    for name, (greedy, sampled) in lengths.items():
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        scores = [
            {"dataset": "maths", "temperature": t, "accept_length": length}
            for t, length in ((0.0, greedy), (1.0, sampled))
        ]
        (folder / "evaluation.json").write_text(json.dumps({"scores": scores}))
    packed: list[Path] = []

    def pack(run: Path, output: Path, *said: str) -> None:
        packed.append(run)
        output.mkdir()

    (tmp_path / "data.json").write_text("{}")
    monkeypatch.setattr(recipe, "pack", pack)
    given = argparse.Namespace(work=tmp_path, output=None, drafts=list(lengths))
    recipe.pack_best(given)
    assert packed == [tmp_path / "runs" / "dflash"]
    assert recipe.table(recipe.evaluated(given)).splitlines()[:3] == [
        "| draft | T | maths | mean |", "|---|---|---|---|", "| dspark | 0 | 2.00 | 2.00 |",
    ]  # fmt: skip


@pytest.fixture
def commands(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs Python code in place of `forerun train`."""
    import jobs

    started = subprocess.Popen

    def instead(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        return started([sys.executable, "-c", command[-1]], **more)  # type: ignore[call-overload]

    monkeypatch.setattr(jobs.subprocess, "Popen", instead)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    return jobs.run_jobs


def test_a_job_that_fails_lets_the_others_end(recipe: ModuleType, tmp_path: Path, commands) -> None:
    codes = ["print(1)", "import sys; sys.exit('what is wrong')", "import sys; sys.exit(3)"]
    codes.append("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    jobs = [recipe.Job(f"job {i}", [code], tmp_path / f"{i}.txt") for i, code in enumerate(codes)]
    with pytest.raises(SystemExit) as ended:
        commands(jobs, ["5"])
    log = tmp_path / "1.log"
    assert ended.value.code == f"job 1: what is wrong (see {log}); 1 more failed"
    assert (tmp_path / "0.txt").read_text() == "1\n"
    assert (tmp_path / "3.txt").read_text() == "5\n"
    assert not (tmp_path / "1.txt").exists()


def test_when_time_is_up_jobs_are_interrupted(
    recipe: ModuleType, tmp_path: Path, commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they run; what has not begun waits for another time."""
    mark = tmp_path / "runs"
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    pathlib.Path({str(mark)!r}).touch()
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path({str(mark)!r}).write_text("interrupted")
"""
    clock = SimpleNamespace(monotonic=lambda: 61.0 * mark.exists(), sleep=time.sleep)
    monkeypatch.setattr("jobs.time", clock)
    jobs = [recipe.Job(name, [code], tmp_path / f"{name}.txt") for name in ("first", "second")]
    commands(jobs, [None], minutes=1)
    assert mark.read_text() == "interrupted"
    assert not list(tmp_path.glob("*.txt")) and not (tmp_path / "second.log").exists()
