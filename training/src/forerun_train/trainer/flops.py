"""Floating-point operations of a training step, and what part of a GPU's peak they are (MFU).

Counted are the matrix products that a step needs, as if none ran twice: two operations for each
weight and token forward, two more for the input's gradient and two for the weight's.
"""

from __future__ import annotations

import torch

from forerun_train.drafts.draft import Draft
from forerun_train.hidden_states import FrozenTarget
from forerun_train.trainer.options import TrainOptions

# Dense bfloat16 operations per second, by how the device's name begins (vendors' data sheets).
PEAKS = {
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X": 1307e12,
}


def flops_per_step(options: TrainOptions, target: FrozenTarget, draft: Draft) -> float:
    """Operations of all devices together."""
    tokens = options.batch_size * options.seq_len
    blocks = options.batch_size * options.anchors
    model = target.config
    layers = sum(w.numel() for n, w in target.weights.items() if ".layers." in n)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * options.seq_len
    total = 2.0 * tokens * (layers + attention / 2)
    total += _body(draft, tokens, blocks * options.block_size)
    rows = blocks * draft.num_drafts
    passes = 2 + draft.head.has_lm_head + draft.head.reads_target
    total += 2.0 * rows * len(draft.vocabulary.head) * model.hidden_size * passes
    return total


def _body(draft: Draft, tokens: int, rows: int) -> float:
    """Forward and backward of the draft's body."""
    of_layers = sum(p.numel() for layer in draft.layers() for p in layer.parameters())
    others = sum(p.numel() for p in draft.body.parameters()) - of_layers
    of_context = sum(
        p.numel()
        for layer in draft.layers()
        for name, p in layer.named_parameters()
        if "k_proj" in name or "v_proj" in name
    )
    if not draft.layers():  # a chain: its layer runs over the context, and over every step
        return 6.0 * (tokens + rows) * others
    return 6.0 * (rows * of_layers + tokens * (others + of_context))


def peak_flops(device: torch.device) -> float | None:
    """Operations per second that the device can do in bfloat16; None: not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for begin, peak in PEAKS.items() if name.startswith(begin)), None)
