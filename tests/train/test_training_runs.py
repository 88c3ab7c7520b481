"""Whole training runs with the bundled target: killed and resumed, refused, and what is learnt."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun.llm.bundled import bundled
from forerun.models.dflash import check_dflash_files
from forerun_train import hidden_store
from forerun_train.files import write_tensors
from forerun_train.toys.word_problems import generate
from forerun_train.trainer import checkpoint as checkpoint_module
from forerun_train.trainer import memory
from forerun_train.trainer import run as trainer_run
from forerun_train.trainer.checkpoint import Checkpoints, read_state
from forerun_train.trainer.loop import Trainer
from forerun_train.trainer.options import TrainOptions
from forerun_train.trainer.run import run
from forerun_train.trainer.view import lines_of, sparkline
from tests.train.packed import word_problems

TARGET = bundled("target")
SMALL: dict[str, Any] = {
    "target": str(TARGET), "data": "-", "device": "cpu", "num_layers": 1, "block_size": 4,
    "seq_len": 64, "batch_size": 2, "anchors": 4, "max_steps": 8, "log_every": 1,
    "save_every": 2, "validate_every": 4, "validation_batches": 1, "intermediate_size": 64,
}  # fmt: skip
PROGRAM = """
import json, sys
from forerun_train.trainer.options import TrainOptions
from forerun_train.trainer import run as trainer_run
from forerun_train.trainer.run import run
from tests.train.packed import word_problems
run(TrainOptions.of(None, json.loads(sys.argv[1])), word_problems)
"""


def options(output: Path, **given: Any) -> TrainOptions:
    return TrainOptions.of(None, {"kind": "dflash", "output": str(output), **SMALL, **given})


def losses(output: Path) -> dict[int, tuple[float, float]]:
    lines = lines_of(output / "log.jsonl")
    return {each["step"]: (each["loss"], each["gradient_norm"]) for each in lines if "loss" in each}


def start(output: Path, ranks: dict[str, str] | None = None, **given: Any) -> Any:
    """A process that runs a training; `ranks`: what torchrun sets."""
    settings = {"kind": "dflash", "output": str(output), **SMALL, **given}
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | (ranks or {})
    return subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(settings)], env=environment)


def start_two(output: Path, **given: Any) -> list[Any]:
    """Two processes of one run, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [start(output, address | {"RANK": str(rank)}, **given) for rank in range(2)]


def kill_in_the_middle(output: Path, processes: list[Any]) -> None:
    """After five of the eight steps."""
    while len(losses(output)) < 5 and all(each.poll() is None for each in processes):
        time.sleep(0.01)
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 5 <= len(losses(output)) < 8, "killed too late to show anything"


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, optimizer: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, optimizer=optimizer).wait(timeout=120) == 0
    kill_in_the_middle(killed, [start(killed, optimizer=optimizer)])
    assert start(killed, optimizer=optimizer, resume=True).wait(timeout=120) == 0
    assert losses(killed) == losses(whole)
    last = Path("checkpoints", "step-00000008")
    for name in (last / "model.safetensors", last / "optimizer.safetensors", "draft/config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, optimizer", [("dflash", "muon"), ("dspark", "adamw")])
def test_two_processes_train_as_one(tmp_path: Path, kind: str, optimizer: str) -> None:
    """FSDP2 over gloo: the same batches, anchors and curve, and one checkpoint of whole tensors."""
    given = {"kind": kind, "optimizer": optimizer, "head_rank": 8}
    alone, divided = tmp_path / "alone", tmp_path / "divided"
    assert [process.wait(timeout=200) for process in start_two(divided, **given)] == [0, 0]
    assert start(alone, **given).wait(timeout=120) == 0
    for step, values in losses(alone).items():
        assert losses(divided)[step] == pytest.approx(values, rel=1e-3), step
    kept = [
        load_file(each / "checkpoints/step-00000008/model.safetensors") for each in (alone, divided)
    ]
    assert kept[0].keys() == kept[1].keys()
    for name, value in kept[0].items():
        torch.testing.assert_close(kept[1][name], value, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.exhaustive
def test_two_processes_that_are_killed_go_on_as_if_they_had_not_been(tmp_path: Path) -> None:
    """Parameters and optimizer state are whole in a checkpoint, and divided again to the bit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert [each.wait(timeout=200) for each in start_two(whole)] == [0, 0]
    kill_in_the_middle(killed, start_two(killed))
    assert [each.wait(timeout=200) for each in start_two(killed, resume=True)] == [0, 0]
    assert losses(killed) == losses(whole)


@pytest.mark.exhaustive
def test_an_end_in_the_middle_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is half written counts for nothing, and the run goes on from the one before."""
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    run(options(whole), word_problems)
    write, written = checkpoint_module.write_tensors, []

    def killed(path: Path, *rest: Any) -> None:
        written.append(path)
        if len(written) == 6:  # the optimizer's state at step 6
            path.write_bytes(b"half")
            raise SystemExit
        write(path, *rest)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(checkpoint_module, "write_tensors", killed)
        run(options(ended), word_problems)
    (ended / "checkpoints" / "step-00000007").mkdir()  # no checkpoint, whoever made it
    (ended / "checkpoints" / "step-backup").mkdir()
    newest = Checkpoints(ended, None).newest()  # type: ignore[arg-type]
    assert newest is not None and newest.name == "step-00000004"
    run(options(ended, resume=True), word_problems)
    assert losses(ended) == losses(whole)
    assert not (ended / "checkpoints" / ".making").exists()
    damaged = ended / "checkpoints" / "step-00000008"
    for name, text in (
        ("model.safetensors", "half"), ("state.json", "{"), ("state.json", '{"step": 8}'),
    ):  # fmt: skip
        (damaged / name).write_text(text)
        with pytest.raises(ConfigError, match=r"Remove .*step-00000008, and --resume goes on"):
            run(options(ended, resume=True), word_problems)


@pytest.mark.exhaustive
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """One line, and the run goes on when there is room; files may grow to 64 KiB here."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot be written or read: .*--resume goes on\.$"):
            run(options(tmp_path / "a"), word_problems)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(losses(tmp_path / "a")) == 2  # up to the first checkpoint
    run(options(tmp_path / "a", resume=True), word_problems)
    assert len(losses(tmp_path / "a")) == 8
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file cannot be written or read: File exists"):
        run(options(tmp_path / "b", hidden_states=str(tmp_path / "file")), word_problems)


@pytest.mark.exhaustive
def test_ctrl_c_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.step

    def stopped(self: Trainer, host: Any, number: int, done: float) -> Any:
        if number == 5:
            raise KeyboardInterrupt
        return step(self, host, number, done)

    monkeypatch.setattr(Trainer, "step", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(options(tmp_path), word_problems)
    assert (
        "Stopped at step 5; step-00000004 is intact. --resume goes on." in capsys.readouterr().out
    )


@pytest.mark.exhaustive
def test_a_resumed_run_finds_the_data_and_the_target_that_it_had(tmp_path: Path) -> None:
    data, target = tmp_path / "data.jsonl", tmp_path / "target"
    lines = [{"prompt": p.question, "response": p.answer_text} for p in generate(3, 40)]
    texts = [json.dumps(line) + "\n" for line in lines]
    data.write_text("".join(texts))
    shutil.copytree(TARGET, target)
    given = {"data": str(data), "target": str(target), "max_steps": 4, "seq_len": 128}
    run(options(tmp_path / "run", **given))
    for changed in (texts[1:], texts[::-1]):
        data.write_text("".join(changed))
        with pytest.raises(ConfigError, match="began with, but the data changed since"):
            run(options(tmp_path / "run", **given, resume=True))
    data.write_text("".join(texts))
    run(options(tmp_path / "run", **given, resume=True, max_errors=3))
    moved = {"data": str(shutil.copy(data, tmp_path / "moved.jsonl"))}
    run(options(tmp_path / "run", **given | moved, resume=True))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    with pytest.raises(ConfigError, match="began with, but the target changed since"):
        run(options(tmp_path / "run", **given, resume=True))


def test_an_output_that_cannot_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the target is loaded, and nothing is left behind."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(trainer_run, "load_frozen_target", None)
    for output, why in (
        ("file", "it is a file"),
        ("file/x", "Not a directory"),
        ("x" * 300, "long"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be the output folder: .*{why}.*another"):
            run(options(tmp_path / output), word_problems)
    with pytest.raises(TypeError):
        run(options(tmp_path / "a" / "b"), word_problems)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_run_refuses(tmp_path: Path) -> None:
    run(options(tmp_path, max_steps=2), word_problems)
    with pytest.raises(ConfigError, match=r"has a run already, at step-00000002; give --resume"):
        run(options(tmp_path, max_steps=2), word_problems)
    with pytest.raises(ConfigError, match=r"learning_rate was 0.0006 and is 0.1"):
        run(options(tmp_path, max_steps=2, learning_rate=0.1, resume=True), word_problems)
    with pytest.raises(ConfigError, match="layout was 'z-lab' and is 'speculators'"):
        run(options(tmp_path, max_steps=2, layout="speculators", resume=True), word_problems)
    with pytest.raises(ConfigError, match=r"target_layer_ids .* must lie between 0 and 11"):
        run(options(tmp_path / "b", target_layer_ids=(3, 12)), word_problems)
    for given, message in (
        ({"mask_token_id": 6144}, "mask_token_id 6144 .* ends at 6143"),
        ({"seq_len": 5000}, "seq_len 5000 is more than the target's context, 4096 tokens"),
        ({"draft_vocab_size": 7000}, "draft_vocab_size 7000 is more than .* 6144 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(options(tmp_path / "b", **given), word_problems)
    newest = Checkpoints(tmp_path, None).newest()  # type: ignore[arg-type]
    assert newest is not None and read_state(newest)["step"] == 2


@pytest.mark.exhaustive
def test_a_smoke_run_makes_a_draft_that_serving_accepts(tmp_path: Path) -> None:
    """The smoke preset, cut down; its measured accept length is that of the engine."""
    given = {"kind": "dflash", "target": str(TARGET), "data": "-", "output": str(tmp_path)}
    cut = {"max_steps": 60, "validate_every": 60, "validation_batches": 4, "device": "cpu"}
    folder = run(TrainOptions.of("smoke", given | cut), word_problems)
    measured = [line for line in lines_of(tmp_path / "log.jsonl") if "accept_length" in line][-1]
    chats = [[{"role": "user", "content": p.question}] for p in generate(900_001, 24)]
    llm = LLM(
        model_path=str(TARGET),
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(folder),
        speculative_adaptive=False,
        dtype="float32",
        device="cpu",
    )
    with llm:
        llm.chat(chats, SamplingParams(temperature=0, max_new_tokens=128))
        length = llm.stats()["spec_accept_length"]
    assert length > 1.5
    assert abs(length - measured["accept_length"]) < 0.05


def test_too_little_memory_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"batch_size": 64, "seq_len": 256, "anchors": 64, "intermediate_size": None}
    monkeypatch.setattr(memory, "memory", lambda device: (400 << 20, 400 << 20))
    expected = r"memory: about .* of 0.4 GiB free: too little. Set --micro-batch (4|8|16); the"
    with pytest.raises(ConfigError, match=expected):
        run(options(tmp_path, **large), word_problems)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_parts_of_a_batch_add_up(tmp_path: Path) -> None:
    """Two sequences at a time or one: the same gradients."""
    given = {"max_steps": 2, "kind": "dspark", "head_rank": 8}
    run(options(tmp_path / "whole", **given), word_problems)
    run(options(tmp_path / "parts", **given, micro_batch=1), word_problems)
    for step, values in losses(tmp_path / "whole").items():
        assert losses(tmp_path / "parts")[step] == pytest.approx(values, rel=1e-4)


def test_a_run_from_a_file(tmp_path: Path) -> None:
    """Records, packing and training together; log, report and draft are written."""
    data = tmp_path / "data.jsonl"
    chats = [
        [{"role": "user", "content": p.question}, {"role": "assistant", "content": p.answer_text}]
        for p in generate(3, 60)
    ]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    given = {"seq_len": 256, "max_steps": 4, "validation_share": 0.2, "draft_vocab_size": 512}
    folder = run(options(tmp_path / "run", data=str(data), **given))
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 512
    check_dflash_files(folder)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "best, exported" in page and "data:image/png;base64," in page
    assert "://" not in page  # nothing is loaded from elsewhere
    again = options(tmp_path / "run", data=str(data), **given | {"max_steps": 6}, resume=True)
    with pytest.raises(ConfigError, match="max_steps was 4 and is 6"):
        run(again)


def test_small_curves() -> None:
    assert sparkline([1.0, 2.0, 3.0]) == "▁▄█"
    assert sparkline([2.0, 2.0]) == sparkline([]) == ""


@pytest.mark.exhaustive
def test_stored_hidden_states_train_the_same_draft(tmp_path: Path) -> None:
    """Stored in one run that is cut short, completed and read by the next."""
    given = {"max_steps": 5, "kind": "dspark", "head_rank": 8}
    run(options(tmp_path / "online", **given), word_problems)
    store = {"hidden_states": str(tmp_path / "states"), **given}
    run(options(tmp_path / "stored", **store), word_problems)
    assert losses(tmp_path / "stored") == losses(tmp_path / "online")
    (tmp_path / "states" / "batch-00000003-rank-0.safetensors").unlink()
    run(options(tmp_path / "again", **store), word_problems)
    assert losses(tmp_path / "again") == losses(tmp_path / "online")
    with pytest.raises(ConfigError, match="hidden states of another run: seed was 0 and is 1"):
        run(options(tmp_path / "other", **store, seed=1), word_problems)


def test_damaged_hidden_states_are_named(tmp_path: Path) -> None:
    store = {"hidden_states": str(tmp_path / "states"), "stored_batches": 2, "max_steps": 2}
    run(options(tmp_path / "a", **store), word_problems)
    shard = tmp_path / "states" / "batch-00000001-rank-0.safetensors"
    shard.write_bytes(b"half")
    with pytest.raises(ConfigError, match=f"{shard} cannot be .* Remove it: the next run makes"):
        run(options(tmp_path / "b", **store), word_problems)
    (tmp_path / "states" / "store.json").write_text("{")
    with pytest.raises(ConfigError, match=r"store\.json is damaged\. Remove it"):
        run(options(tmp_path / "c", **store), word_problems)


def test_others_may_read_what_is_written(tmp_path: Path) -> None:
    """As the umask says: a draft may be served by another user."""
    path = tmp_path / "model.safetensors"
    before = os.umask(0o022)
    try:
        write_tensors(path, {"a": torch.zeros(2)})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_stored_hidden_states_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(hidden_store.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ConfigError, match=r"8 batches take about 0.01 GiB .* too little. Lower"):
        run(options(tmp_path / "a", hidden_states=str(tmp_path / "states")), word_problems)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    """What was saved before it stays."""
    given = {"learning_rate": 1e30, "warmup": 0.0, "save_every": 1, "clip": 0.0}
    with pytest.raises(ConfigError, match=r"The loss is .* before step \d; .* Lower learning_rate"):
        run(options(tmp_path, **given), word_problems)
    newest = Checkpoints(tmp_path, None).newest()  # type: ignore[arg-type]
    assert newest is not None
    losses_so_far = losses(tmp_path)
    assert all(math.isfinite(loss) for loss, _ in losses_so_far.values())
    assert read_state(newest)["step"] == max(losses_so_far)


@pytest.mark.exhaustive
def test_a_run_of_some_time(tmp_path: Path) -> None:
    """The schedule is fitted to the time: the learning rate is at its end when that is over."""
    given = {"max_steps": 10**6, "max_minutes": 0.05, "validate_every": 10**6}
    started = time.monotonic()
    rare = {"log_every": 10**6, "save_every": 10**6}  # it looks at the clock all the same
    run(options(tmp_path, **given, **rare), word_problems)
    assert time.monotonic() - started < 60
    lines = [line for line in lines_of(tmp_path / "log.jsonl") if "loss" in line]
    assert 10 < lines[-1]["step"] < 10**5
    assert lines[-1]["done"] > 0.9 and lines[-1]["learning_rate"] < 0.1 * 6e-4
    assert (tmp_path / "draft" / "model.safetensors").exists()


def test_tensorboard_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="logs tensorboard needs the package; run: pip install"):
        run(options(tmp_path / "run", logs=("tensorboard",)), word_problems)
    assert not (tmp_path / "run").exists()


def test_memory_that_runs_out_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore.")

    monkeypatch.setattr(Trainer, "step", fail)
    expected = r"memory ran out at step 0: CUDA out of memory.* Set --micro-batch below 2 or"
    with pytest.raises(ConfigError, match=expected):
        run(options(tmp_path), word_problems)
