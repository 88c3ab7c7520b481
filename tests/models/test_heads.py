"""Heads and convolutions, against their definitions written out as loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.layers.communication import WeightPlacement
from forerun.models.block_convolution import BlockConvolution, ConvolutionConfig
from forerun.models.heads.base import Block, BodySizes, DraftHead, Proposal
from forerun.models.heads.correlator import LiLiCorrConfig, LiLiCorrHead
from forerun.models.heads.markov import MarkovConfig
from forerun.models.heads.refiner import XPressConfig, XPressHead
from forerun.models.heads.selector import SelectorConfig
from tests.models.head_parts import Vocabulary, best

V, H, ROWS, BATCH = 40, 12, 5, 3
SIZES = BodySizes(H, V, V, ROWS, 1e-6)
PLACE = WeightPlacement(torch.float32, torch.device("cpu"))


def filled(head: Any) -> Any:
    torch.manual_seed(7)
    for weight in head.weights().values():
        weight.normal_(0, 0.4)
    head.prepare()
    return head


def block(depth: int = ROWS - 1, first: int = 1) -> Block:
    torch.manual_seed(8)
    return Block(
        hidden=torch.randn(BATCH, ROWS, H),
        first=first,
        depth=depth,
        anchor=torch.tensor([3, 17, 30]),
        before=torch.tensor([9, 0, 21]),
        greedy=True,
        context=torch.randn(BATCH, H),
    )


def propose(head: DraftHead, given: Block) -> tuple[Proposal, Vocabulary]:
    torch.manual_seed(9)
    vocabulary = Vocabulary(torch.randn(V, H), torch.randn(V, H))
    return head.propose(given, vocabulary, best), vocabulary


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_convolution(rows: int) -> None:
    taps, group = 3, 4
    layer: BlockConvolution = filled(BlockConvolution(ConvolutionConfig(taps, group), H, PLACE))
    weights = layer.weights()
    base, projection = weights["base_kernel"], weights["kernel_projection.weight"]
    given, x = torch.randn(2, rows, H), torch.randn(2, rows, H)
    own = layer.dynamic(given)
    dynamic = (given @ projection.T).view(2, rows, 2, taps, H // group)
    for side in (0, 1):
        out = layer.convolve(x, own, side)
        for b in range(2):
            for i in range(rows):
                for c in range(H):
                    wanted = sum(
                        float(
                            (base[side, t, c] + dynamic[b, i, side, t, c // group]) * x[b, i - t, c]
                        )
                        for t in range(min(taps, i + 1))
                    )
                    assert math.isclose(float(out[b, i, c]), wanted, abs_tol=1e-4)


def test_a_jacobi_pass_per_draft_is_drafting_one_by_one() -> None:
    """XPress: each row's token, given those before it, by the definition."""
    head: XPressHead = filled(XPressConfig(6, 12, ROWS - 1).build(SIZES, PLACE, {}))
    given = block()
    proposal, vocabulary = propose(head, given)
    w = {name.removeprefix("refiner_head."): t for name, t in head.weights().items()}
    readout, embed = head.refiner_head.readout, head.refiner_head.token_embed
    for b in range(BATCH):
        h = given.hidden[b]
        known = [int(given.before[b]), int(given.anchor[b])]  # before row 0, before row 1
        for k in range(1, ROWS):
            xs = []
            for row in range(k + 1):
                pooled = w["down_g.weight"] @ h.mean(0)
                token = embed(torch.tensor([known[row]]))[0]
                joined = torch.cat([w["down_h.weight"] @ h[row], pooled, token])
                xs.append(w["in_proj.weight"] @ joined)
            x = xs[k] + sum(w["mix_l"][:, k, row] * xs[row] for row in range(k + 1))
            gate, up = w["mlp_gate.weight"] @ x, w["mlp_up.weight"] @ x
            x = x + w["mlp_down.weight"] @ (F.silu(gate) * up)
            logits = vocabulary.compute_logits(h[k]) + readout(x.unsqueeze(0))[0]
            known.append(int(logits.argmax()))
        assert proposal.tokens[b].tolist() == known[2:]


KEYS = {
    "lilicorr_candidate_topk": 4,
    "lilicorr_hidden_size": 8,
    "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_factor_dim": 4,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 10.0,
}


@pytest.mark.parametrize("depth", [ROWS - 1, 2])
def test_lattice_walk(depth: int) -> None:
    """LiLiCorr: candidate by candidate, by the definition."""
    head: LiLiCorrHead = filled(LiLiCorrConfig.read(KEYS, "config").build(SIZES, PLACE, {}))
    given = block(depth)
    proposal, vocabulary = propose(head, given)
    w = {name.removeprefix("lilicorr."): t for name, t in head.weights().items()}
    for b in range(BATCH):
        assert proposal.tokens[b].tolist() == walk(w, given, vocabulary, b)


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + SIZES.eps).sqrt() * w[f"{name}.weight"]


def states(w: dict[str, Tensor], given: Block, vocabulary: Vocabulary, b: int) -> Any:
    """(ids [slots, K], state of every candidate before the layers, slot of each)."""
    k, ids, xs, slots = 4, [], [], []
    for slot in range(ROWS - 1):
        h = given.hidden[b, slot + 1]
        logp = vocabulary.compute_logits(h).log_softmax(-1)
        top = logp.topk(k)
        ids.append(top.indices)
        for rank in range(k):
            p = top.values[rank]
            features = torch.tensor(
                [p, p.exp(), p - top.values[0], rank / (k - 1), float(rank == 0)]
            )
            features = (features - features.mean()) / (
                features.var(unbiased=False) + 1e-5
            ).sqrt() * w["feature_mlp.0.weight"] + w["feature_mlp.0.bias"]
            features = linear(w, "feature_mlp.3", F.silu(linear(w, "feature_mlp.1", features)))
            x = linear(w, "token_proj", vocabulary.embedding[top.indices[rank]])
            x = x + linear(w, "pass_hidden_proj", h) + features
            xs.append(x + w["slot_embedding"][0, 0, slot, 0] + w["rank_embedding"][0, 0, 0, rank])
            slots.append(slot)
    return ids, torch.stack(xs), slots


def attend(w: dict[str, Tensor], name: str, x: Tensor, slots: list[int]) -> Tensor:
    size, heads = x.shape[1], 2
    dim = size // heads
    qkv = x @ w[f"{name}.in_proj_weight"].T + w[f"{name}.in_proj_bias"]
    q, k, v = qkv.split(size, 1)
    out = torch.zeros_like(x)
    for head in range(heads):
        part = slice(head * dim, (head + 1) * dim)
        scores = q[:, part] @ k[:, part].T / math.sqrt(dim)
        for i, own in enumerate(slots):
            for j, other in enumerate(slots):
                scores[i, j] += w["relative_slot_bias"][head, own - other + ROWS - 1]
                scores[i, j] += w["same_slot_bias"][head] * (own == other)
        out[:, part] = scores.softmax(-1) @ v[:, part]
    return torch.stack([linear(w, f"{name}.out_proj", row) for row in out])


def walk(w: dict[str, Tensor], given: Block, vocabulary: Vocabulary, b: int) -> list[int]:
    assert given.context is not None
    ids, x, slots = states(w, given, vocabulary, b)
    for layer in ("layers.0", "layers.1"):
        normed = torch.stack([norm(w, f"{layer}.attn_norm", row) for row in x])
        x = x + attend(w, f"{layer}.attn", normed, slots)
        inner = [
            F.silu(linear(w, f"{layer}.mlp.0", norm(w, f"{layer}.mlp_norm", row))) for row in x
        ]
        x = x + torch.stack([linear(w, f"{layer}.mlp.2", row) for row in inner])
    anchor = norm(w, "anchor_norm", linear(w, "context_proj", given.context[b]))
    outs, ins = [], []
    for row in x:
        row = norm(w, "output_norm", row)
        f = F.silu(linear(w, "factor_input_proj", torch.cat([row, anchor, row * anchor])))
        outs.append(F.normalize(linear(w, "out_head", f), dim=0, eps=1e-6))
        ins.append(F.normalize(linear(w, "in_head", f), dim=0, eps=1e-6))
    before, tokens = F.normalize(linear(w, "anchor_out_head", anchor), dim=0, eps=1e-6), []
    for slot in range(given.depth):
        scores = [float(10 * before @ ins[4 * slot + j]) for j in range(4)]
        chosen = scores.index(max(scores))
        tokens.append(int(ids[slot][chosen]))
        before = outs[4 * slot + chosen]
    return tokens


def test_only_the_best_logits_are_corrected() -> None:
    """`dspark_draft_topk`: with one, the base logits decide; with all, nothing changes."""
    tokens = []
    for k in (None, V, 1):
        head = filled(MarkovConfig(6, "vanilla", False, False, k).build(SIZES, PLACE, {}))
        proposal, vocabulary = propose(head, block(ROWS, 0))
        tokens.append(proposal.tokens)
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])
    assert torch.equal(tokens[2], vocabulary.compute_argmax(block().hidden))


def test_candidate_walk() -> None:
    """DFlash2: multiplier, then soft cap, then edges, by the definition."""
    head = filled(SelectorConfig(6, 4, 0.5, 3.0).build(SIZES, PLACE, {}))
    given = block()
    proposal, vocabulary = propose(head, given)
    w = {name.removeprefix("candidate_selector."): t for name, t in head.weights().items()}
    for b in range(BATCH):
        token = int(given.anchor[b])
        for i, h in enumerate(given.hidden[b, 1:]):
            unary = 3 * torch.tanh(0.5 * vocabulary.compute_logits(h) / 3)
            query = w["predecessor_codebook"][token] * (w["hidden_projection.weight"] @ h)
            scores = {
                c: float(unary[c] + query @ w["successor_codebook"][c])
                for c in unary.topk(4).indices.tolist()
            }
            token = max(scores, key=scores.__getitem__)
            assert int(proposal.tokens[b, i]) == token


def test_a_part_of_a_block_begins_as_the_whole() -> None:
    """Fewer drafts are a prefix of all, whatever the head."""
    configs = (
        MarkovConfig(6, "rnn", True, True, None),
        SelectorConfig(6, 4),
        LiLiCorrConfig.read(KEYS, "config"),
    )
    for config in configs:
        head = filled(config.build(SIZES, PLACE, {}))
        whole, _ = propose(head, block())
        part, _ = propose(head, block(2))
        assert torch.equal(part.tokens, whole.tokens[:, :2])
