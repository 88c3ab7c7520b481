"""What a model needs of attention and what a backend can do, both as values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

import torch


class Mask(Enum):
    """Which K/V a token sees, beyond the committed context."""

    CAUSAL = "causal"  # a token at position p sees positions <= p
    BLOCK = "block"  # every token of a request's block sees the context and the whole block
    SLIDING_BLOCK = "sliding block"  # the same within a window around the token
    CUSTOM = "custom"  # a tree: the context and its ancestors


@dataclass(frozen=True)
class LayerMask:
    """The mask of one layer.

    `window` counts positions. CAUSAL: a token at p sees (p - window, p], so the window holds the
    token itself, as in Hugging Face. BLOCK: the context is cut to the `window` positions before the
    block; the block itself is always seen whole. SLIDING_BLOCK, always with a window: a token at p
    sees (p - window, p + window).
    """

    mask: Mask = Mask.CAUSAL
    window: int | None = None


class Phase(Enum):
    """Which forwards a backend serves.

    All but PREFILL have the same number of tokens for every request, or at most so many
    (`AttentionBatch.q_len`).
    """

    PREFILL = "prefill"  # ragged chunks of prompts
    DECODE = "decode"  # one token: plain decoding, the drafts of a chain
    VERIFY = "verify"  # W > 1 tokens: verification, and blocks of a draft that sees them whole
    EXTEND = "draft extend"  # W > 1 verified tokens, which the draft observes


PER_STEP = (Phase.DECODE, Phase.VERIFY, Phase.EXTEND)  # q_len is set: may be captured


class HostLengths(Enum):
    """Which lengths a backend needs on the host before a decode step runs.

    Lengths are committed on the device. The host knows an upper bound while steps are in flight;
    it knows them exactly only after it has the result of the step before.
    """

    NONE = "none"  # lengths are read on the device
    UPPER_BOUND = "upper bound"
    EXACT = "exact"  # no overlap: the host waits for each step (overlap depth 0)


@dataclass(frozen=True)
class AttentionNeed:
    """All a backend must know to say whether it can serve a model in one phase."""

    device: str  # torch.device.type: "cpu", "cuda" (NVIDIA and AMD)
    dtype: torch.dtype  # of q
    # Of q and K; the largest where layers differ. With `mla`, latent and rope part together.
    head_dim: int
    num_heads: int
    num_kv_heads: int  # the fewest where layers differ; with `mla`: 1
    masks: frozenset[LayerMask]
    phase: Phase = Phase.DECODE
    graph: bool = False  # will be captured into a device graph
    kv_dtype: torch.dtype | None = None  # of stored K/V; None: `dtype`
    mla: bool = False  # some layers keep a latent row per token instead of K and V
    latent_dim: int = 0  # with `mla`: Dl, the part of `head_dim` that V is
    dense: bool = True  # some layers keep K and V
    uniform: bool = True  # all layers keep the same
    head_dims: frozenset[int] = frozenset()  # of dense layers, where they differ in what they keep
    sinks: bool = False  # a learned logit per head in the denominator of the softmax
    logit_softcap: bool = False  # cap · tanh(score / cap)
    arch: str | None = None  # of the GPU: "sm_90", "gfx942"; None: a CPU, or not known
    fixed_order: bool = False  # a token's result may depend on the tokens before it alone
    ragged_steps: bool = False  # decode steps may come packed (`AttentionBatch.rows`)
    page_sizes: frozenset[int] | None = None  # one of these will be used; None: any


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. None: anything of that kind."""

    devices: frozenset[str] | None = None
    archs: frozenset[str] | None = None  # GPUs that its kernels were built for
    phases: frozenset[Phase] = frozenset(Phase)
    masks: frozenset[Mask] = frozenset(Mask)
    windows: frozenset[Mask] = frozenset(Mask)  # masks that may have a window
    head_dims: Collection[int] | None = None
    latent_dims: Collection[int] | None = None  # Dl + Dr with `mla`; None: as `head_dims`
    latent_row: tuple[int, int] | None = None  # Dl and Dr with `mla`, where just one pair will do
    dtypes: tuple[torch.dtype, ...] | None = None
    kv_dtypes: tuple[torch.dtype, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    graph: bool = True
    cpu_graph: bool = False  # its kernels can be recorded on a CPU (`kernels/cpu/graph.py`)
    dense: bool = True
    mla: bool = False
    mixed_layouts: bool = False  # layers may differ in what they keep
    sinks: bool = False
    logit_softcap: bool = False
    fixed_order: bool = False  # one order of sums, whatever the batch, chunk, pages and width
    ragged_steps: bool = False  # with `AttentionBatch.rows`, requests differ in their tokens
    host_lengths: HostLengths = HostLengths.NONE
    host_page_table: bool = False  # it also wants page ids on the host

    @property
    def plans_on_host(self) -> bool:
        """Whether `AttentionBackend.prepare` must run before every decode step."""
        return self.host_lengths is not HostLengths.NONE or self.host_page_table

    def refusals(self, need: AttentionNeed) -> list[str]:
        """Every reason why these cannot serve the need; empty if they can."""
        return [*self._refused_values(need), *self._refused_features(need)]

    def _refused_values(self, need: AttentionNeed) -> list[str]:
        out = []
        if self.devices is not None and need.device not in self.devices:
            out.append(f"it runs on {_listed(self.devices)}, not {need.device}")
        elif self.archs is not None and need.arch not in self.archs:
            out.append(f"it runs on {_listed(self.archs)}, not {need.arch or 'an unknown GPU'}")
        if need.phase not in self.phases:
            out.append(f"it does not serve {need.phase.value}")
        latent = need.mla and not need.dense and self.latent_dims is not None
        dims = self.latent_dims if latent else self.head_dims
        if dims is not None and need.head_dim not in dims:
            out.append(f"head dim {need.head_dim} is not {_span(dims)}")
        row = need.latent_dim, need.head_dim - need.latent_dim
        if need.mla and self.latent_row not in (None, row):
            rows = " + ".join(map(str, self.latent_row or ()))
            out.append(f"its latent rows are {rows}, not {row[0]} + {row[1]}")
        if self.dtypes is not None and need.dtype not in self.dtypes:
            out.append(f"it computes in {_names(self.dtypes)}, not {need.dtype}")
        stored = need.kv_dtype or need.dtype
        if self.kv_dtypes is not None and need.kv_dtype and stored not in self.kv_dtypes:
            out.append(f"it reads K/V in {_names(self.kv_dtypes)}, not {stored}")
        for mask in sorted({m.mask.value for m in need.masks if m.mask not in self.masks}):
            out.append(f"it has no {mask} mask")
        windows = {m.mask for m in need.masks if m.window is not None and m.mask in self.masks}
        for mask in sorted(m.value for m in windows - self.windows):
            tree = " (tree)" if mask == Mask.CUSTOM.value else ""
            out.append(f"its {mask}{tree} mask has no window")
        return [*out, *self._refused_pages(need)]

    def _refused_pages(self, need: AttentionNeed) -> list[str]:
        if self.page_sizes is None or need.page_sizes is None:
            return []
        if need.page_sizes.intersection(self.page_sizes):
            return []
        asked = ", ".join(map(str, sorted(need.page_sizes)))
        return [f"it has pages of {', '.join(map(str, self.page_sizes))} tokens, not of {asked}"]

    def _refused_features(self, need: AttentionNeed) -> list[str]:
        asked = (
            (need.dense and not self.dense, "it has no attention over K and V (MLA only)"),
            (need.mla and not self.mla, "it has no latent (MLA) attention"),
            (need.sinks and not self.sinks, "it has no attention sinks"),
            (need.logit_softcap and not self.logit_softcap, "it has no logit soft-cap"),
            (
                need.fixed_order and not self.fixed_order,
                "its sums depend on the batch (enable_deterministic_inference)",
            ),
            (
                need.ragged_steps and not self.ragged_steps,
                "it takes as many tokens of every request (speculative_ragged_verify)",
            ),
            (
                not need.uniform and not self.mixed_layouts,
                "it needs K/V of one shape in all layers",
            ),
            (
                need.graph and not self.graph,
                "it cannot be captured in a device graph (disable_cuda_graph lets it serve)",
            ),
        )
        return [reason for refused, reason in asked if refused]


def _names(dtypes: Collection[torch.dtype]) -> str:
    return _listed(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _listed(values: Iterable[str]) -> str:
    names = sorted(values)
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _span(values: Collection[int]) -> str:
    if isinstance(values, range) and len(values) > 8:
        step = "" if values.step == 1 else f" in steps of {values.step}"
        return f"within {values[0]} to {values[-1]}{step}"
    return f"one of {', '.join(map(str, sorted(values)))}"
