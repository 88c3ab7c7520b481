"""Routing of a mixture of experts: which experts compute a token, and how they are weighted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.cpu.functions import sigmoid
from forerun.kernels.moe.config import MAX_DECODE_TOKENS, max_tiles

NORM_EPS = 1e-20  # DeepSeek-V3 adds it to the sum of a token's weights
MAX_EXPERTS, MAX_TOP_K = 512, 16  # limits of the kernels


@dataclass(frozen=True)
class Routing:
    """How a router's logits become top-k experts and weights.

    Scores are float32, over all experts. With groups (DeepSeek-V2 and V3), the experts are cut into
    `n_group` groups of consecutive ids, and only those of the best `topk_group` groups are chosen
    from. Among equal scores, the lowest id wins.

    Raises:
        ConfigError: the numbers do not fit together, or are beyond what the kernels take.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False  # divide the k weights by their sum (+ NORM_EPS)
    routed_scaling_factor: float = 1.0  # multiplies the weights, after normalisation
    n_group: int | None = None
    topk_group: int | None = None
    # A group's score: its best expert (V2, group_limited_greedy) or the sum of its two best ones
    # (V3, noaux_tc).
    group_score: Literal["max", "top2"] = "max"
    # Whether the gate has `e_score_correction_bias`: added to choose experts, not to weight them.
    correction_bias: bool = False
    # False: logits are rounded to the model's dtype first, as Qwen3-MoE's are.
    float32_logits: bool = True
    # Shared experts, which compute every token: ids E, E + 1, ... See `num_shared_choices`.
    num_shared: int = 0
    # A token's experts, weights and sums are those of any number of tokens, to the last bit.
    fixed_order: bool = False

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ConfigError(f"{problem} Is config.json complete and of this model?")

    @property
    def groups(self) -> tuple[int, int]:
        """(number of groups, groups that are kept); (1, 1) without groups."""
        n_group = self.n_group or 1
        return (n_group, self.topk_group or n_group) if n_group > 1 else (1, 1)

    def num_shared_choices(self, num_tokens: int) -> int:
        """How many shared experts are appended to the choices of so many tokens, with weight 1.

        All of them where the time is that of reading weights (SGLang: shared experts fusion); none
        where large dense GEMMs compute them faster. In a fixed order they always are choices.
        """
        few = num_tokens <= MAX_DECODE_TOKENS
        return self.num_shared if few or self.fixed_order else 0

    def _problems(self) -> list[str]:
        (n_group, kept), experts, top_k = self.groups, self.num_experts, self.top_k
        shared, found = self.num_shared, []
        if not 1 <= top_k <= min(experts, MAX_TOP_K) or experts > MAX_EXPERTS:
            found.append(
                f"{top_k} of {experts} experts per token are not supported: at most {MAX_EXPERTS}"
                f" experts, and 1 to {MAX_TOP_K} of them per token."
            )
        elif shared < 0 or top_k + shared > MAX_TOP_K or experts + shared > MAX_EXPERTS:
            found.append(
                f"{top_k} of {experts} experts per token and {shared} shared ones are not"
                f" supported: at most {MAX_EXPERTS} experts, and {MAX_TOP_K} per token, with the"
                " shared ones."
            )
        if self.scoring not in ("softmax", "sigmoid"):
            found.append(f"Routing by {self.scoring!r} scores is not supported: softmax, sigmoid.")
        if experts % n_group or not 1 <= kept <= n_group or kept * (experts // n_group) < top_k:
            found.append(
                f"{experts} experts in {n_group} groups, of which {kept} are kept, do not give"
                f" {top_k} experts per token."
            )
        if self.group_score == "top2" and n_group > 1 and experts // n_group < 2:
            found.append(f"{n_group} groups of one expert have no second best.")
        return found


@dataclass(frozen=True)
class ExpertTiles:
    """Which (token, choice) pairs each expert computes, as the grouped GEMMs read it.

    Pair p is token p // k with its choice p % k, 0 the best. Tiles of one expert are neighbours.
    """

    pairs: Tensor  # [T * k], or [E, T] flattened, int32: each expert's pairs one after another
    tiles: Tensor  # [3, max_tiles] int32: expert, first index into `pairs`, number of pairs (or 0)
    block_m: int  # most pairs of a tile
    # int32, zero before and after every kernel: counters by which CTAs of `experts_sm90.py`
    # signal each other. [at least max_tiles + 1]; None: the Triton kernels serve.
    progress: Tensor | None = None


@dataclass(frozen=True)
class RouterLogits:
    """Logits of few tokens, from which the experts' kernel for Hopper chooses (no `Routed`)."""

    logits: Tensor  # [T, E up to a multiple of 8] float32, not rounded yet
    correction_bias: Tensor | None
    routing: Routing
    progress: Tensor  # as in `ExpertTiles`

    @property
    def num_choices(self) -> int:
        """Experts of a token, with shared ones."""
        return self.routing.top_k + self.routing.num_shared


@dataclass(frozen=True)
class Routed:
    """The experts of T tokens, best first, then the shared ones that are appended."""

    weights: Tensor  # [T, k] float32
    experts: Tensor  # [T, k] int32
    tiles: ExpertTiles | None = None  # for the kernels
    num_shared: int = 0  # of the k choices, the last
    # Some choices are other ranks': no tile has them, or without tiles, ids are beyond the experts.
    is_part: bool = False
    fixed_order: bool = False  # the routing's

    def new_partials(self, x: Tensor, num_more: int = 0) -> Tensor:
        """Returns [k, T, H] to be filled, of x [T, H]; choices not computed here are zeros.

        float32 up to `MAX_DECODE_TOKENS` tokens or in a fixed order, else of x's dtype.
        `num_more`: so many [T, H] are left after these for the caller to fill.
        """
        float32 = self.fixed_order or len(x) <= MAX_DECODE_TOKENS
        dtype = torch.float32 if float32 else x.dtype
        new = torch.zeros if self.is_part else torch.empty
        return new((self.experts.shape[1] + num_more, *x.shape), dtype=dtype, device=x.device)


def route_ref(
    logits: Tensor,
    correction_bias: Tensor | None,
    routing: Routing,
    num_shared: int | None = None,
) -> Routed:
    """Reference implementation: logits [T, E] float32, correction_bias [E] float32 or None.

    `num_shared`: shared experts among the choices; None: `num_shared_choices`.
    """
    logits = logits.float()
    scores = F.softmax(logits, -1) if routing.scoring == "softmax" else sigmoid(logits)
    choice = scores if correction_bias is None else scores + correction_bias
    n_group, kept = routing.groups
    if n_group > 1:
        grouped = choice.view(len(choice), n_group, -1)
        best = grouped.sort(-1, descending=True).values
        group_scores = best[..., 0] if routing.group_score == "max" else best[..., :2].sum(-1)
        groups = _top_k(group_scores, kept)
        mask = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, groups, False)
        choice = grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1)
    experts = _top_k(choice, routing.top_k)
    weights = scores.gather(1, experts)
    if routing.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + NORM_EPS)
    weights = weights * routing.routed_scaling_factor
    shared = routing.num_shared_choices(len(logits)) if num_shared is None else num_shared
    ids = torch.arange(routing.num_experts, routing.num_experts + shared, device=logits.device)
    experts = torch.cat((experts, ids.expand(len(logits), -1)), 1)
    weights = F.pad(weights, (0, shared), value=1.0)
    return Routed(weights, experts.to(torch.int32), num_shared=shared)


def _top_k(scores: Tensor, k: int) -> Tensor:
    """The indices of the k largest, best first, the lowest of equals first (unlike `topk`)."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]


def align_ref(experts: Tensor, num_experts: int, block_m: int) -> ExpertTiles:
    """The tiles of experts [T, k]: pairs sorted by expert (in SGLang, vLLM: moe_align_block_size).

    Reference implementation of `align`.
    """
    ids = experts.flatten()
    pairs = ids.argsort(stable=True)
    expert = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(ids[pairs], expert, right=True)  # [E], where their pairs end
    counts = ends.diff(prepend=ends.new_zeros(1))
    tile_ends = ((counts + block_m - 1) // block_m).cumsum(0)
    tile = torch.arange(max_tiles(len(ids), num_experts, block_m), device=ids.device)
    owner = torch.searchsorted(tile_ends, tile, right=True)
    used, owner = owner < num_experts, owner.clamp(max=num_experts - 1)
    first = block_m * (tile - (tile_ends - (counts + block_m - 1) // block_m)[owner])
    rows = torch.where(used, (counts[owner] - first).clamp(max=block_m), 0)
    tiles = torch.stack((owner, (ends - counts)[owner] + first, rows)).to(torch.int32)
    return ExpertTiles(pairs.to(torch.int32), tiles, block_m)


def select_tiles_ref(tiles: ExpertTiles, part: range) -> ExpertTiles:
    """Reference implementation of `select_tiles`."""
    owner, first, rows = tiles.tiles
    inside = (rows > 0) & (owner >= part.start) & (owner < part.stop)
    order = (~inside).to(torch.int32).argsort(stable=True)
    chosen = torch.stack((owner - part.start, first, rows)) * inside
    return replace(tiles, tiles=chosen[:, order].contiguous())
