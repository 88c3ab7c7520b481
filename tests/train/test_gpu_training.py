"""Training on a GPU: FlexAttention with gradients, compiled steps, no wait for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.attention.base import LayerMask, Mask
from forerun.llm.bundled import bundled
from forerun.models.tokenizer import load_tokenizer
from forerun_train.drafts.build import build_draft
from forerun_train.hidden_states import load_frozen_target
from forerun_train.masks import BlockPlaces, MaskShape, attend, blocks_after_context, make_mask
from forerun_train.trainer.distributed import Ranks
from forerun_train.trainer.loop import Trainer
from forerun_train.trainer.memory import estimate, shape_of
from forerun_train.trainer.options import KINDS, TrainOptions
from forerun_train.trainer.run import Reader, run
from forerun_train.trainer.view import lines_of
from tests.train.packed import word_problems

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
TARGET = bundled("target")


def reader(device: torch.device = CUDA) -> Reader:
    tokenizer = load_tokenizer(TARGET)
    return Reader(tokenizer, len(tokenizer), Ranks(0, 1, device))


def options(output: Path, **given: Any) -> TrainOptions:
    small = {"seq_len": 256, "batch_size": 4, "anchors": 32, "num_layers": 2, "block_size": 8}
    fixed = {"target": str(TARGET), "data": "-", "output": str(output)}
    return TrainOptions.of(None, {"kind": "dflash", **fixed, **small, **given})


@pytest.mark.parametrize("kind", [LayerMask(Mask.BLOCK), LayerMask(Mask.CAUSAL, 64)], ids=str)
def test_flex_attention_and_its_gradients(kind: LayerMask) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(1, 255, (2, 32), generator=generator).sort(1).values
    first = (anchors - torch.randint(0, 90, (2, 32), generator=generator)).clamp(min=0)
    inputs = [
        torch.randn(2, heads, length, 64, generator=generator)
        for heads, length in ((6, 256), (2, 512), (2, 512))
    ]
    outputs = []
    for device in (CPU, CUDA):
        places = BlockPlaces(first.to(device), anchors.to(device), 8, 256)
        mask = make_mask(blocks_after_context(places, kind), MaskShape(2, 256, 512, device))
        q, k, v = (x.to(device).requires_grad_() for x in inputs)
        out = attend(q, k, v, mask, 0.125)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        outputs.append([each.cpu() for each in (out, *gradients)])
    for dense, flex in zip(*outputs, strict=True):
        torch.testing.assert_close(flex, dense, rtol=5e-3, atol=5e-3)  # TF32 in its kernels


def one_step(device: torch.device, made: TrainOptions, compiled: bool) -> tuple[Tensor, Tensor]:
    target = load_frozen_target(made.target, torch.float32, device, 300)
    draft = build_draft(made, target, 3).model
    if compiled:
        draft.compile_parts()
    trainer = Trainer(made, target, draft, Ranks(0, 1, device))
    batch = next(iter(word_problems(made, reader(device)).train()))
    # Anchors must be the same on both devices.
    noise = torch.rand((made.batch_size, made.seq_len), generator=torch.Generator().manual_seed(0))
    trainer._noise = lambda step, length: noise.to(device)  # type: ignore[method-assign]
    sums = trainer.step(batch, 0, 0.5)
    return sums.loss.cpu(), sums.norm.cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_that_of_a_cpu(kind: str, compiled: bool, tmp_path: Path) -> None:
    made = options(tmp_path, kind=kind, head_rank=32)
    for gpu, cpu in zip(one_step(CUDA, made, compiled), one_step(CPU, made, False), strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=5e-3, atol=1e-3)


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    made = options(tmp_path)
    target = load_frozen_target(made.target, torch.bfloat16, CUDA, 300)
    trainer = Trainer(made, target, build_draft(made, target, 3).model, Ranks(0, 1, CUDA))
    batches = iter(word_problems(made, reader()).train())
    for step in range(3):
        trainer.step(next(batches), step, 0.1)
    batch = next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(batch, 3, 0.2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_run_in_bfloat16_learns(tmp_path: Path) -> None:
    run(options(tmp_path, max_steps=120, learning_rate=0.01, optimizer="muon"), word_problems)
    lines = lines_of(tmp_path / "log.jsonl")
    assert [line["accept_length"] for line in lines if "accept_length" in line][-1] > 1.5


def test_the_memory_estimate_is_near_the_peak(tmp_path: Path) -> None:
    made = options(tmp_path, seq_len=1024, batch_size=16, anchors=128)
    target = load_frozen_target(made.target, torch.bfloat16, CUDA, 1100)
    draft = build_draft(made, target, 3).model
    draft.compile_parts()
    trainer = Trainer(made, target, draft, Ranks(0, 1, CUDA))
    batches = iter(word_problems(made, reader()).train())
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        trainer.step(next(batches), step, 0.1)
    expected = estimate(shape_of(made, target, draft, 1), target, draft, 1).total
    assert 0.5 < torch.cuda.max_memory_allocated() / expected < 1.2
