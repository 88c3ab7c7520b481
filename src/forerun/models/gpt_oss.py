"""gpt-oss (arXiv 2508.10925): attention sinks, windows in every other layer, experts with biases.

Experts clamp what goes into their SwiGLU. In checkpoints they are MXFP4 (`quantization.py`): on a
GPU the kernels read that, elsewhere they are dequantized while they are loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.kernels.moe.experts import ClampedSwiglu, expert_partials
from forerun.kernels.moe.experts_mxfp4 import BLOCK_K as MXFP4_BLOCK_K
from forerun.kernels.moe.experts_mxfp4 import (
    Mxfp4Matrices,
    describe_mxfp4,
    expert_partials_mxfp4,
)
from forerun.kernels.moe.gated_output import GatedOutput
from forerun.kernels.moe.routing import Routed, RouterLogits
from forerun.kernels.runtime.gpu import have_triton
from forerun.layers.communication import WeightPlacement
from forerun.layers.moe import Experts, Router, Routing, SparseMoE
from forerun.layers.sharding import Shard
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer, SinkAttention
from forerun.models.quantization import BLOCKS, MXFP4_RUN, SCALES


class GptOssRouter(Router):
    has_bias = True


class GptOssExperts(Experts):
    """Experts with biases, named as whole tensors; gate and up alternate in checkpoints."""

    quantizable = False  # in FP8: the kernels have no biases
    block = MXFP4_BLOCK_K  # as the kernels for MXFP4 read them
    alpha, limit = 1.702, 7.0  # of `ClampedSwiglu`; a config may have others

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        place: WeightPlacement,
        num_shared: int = 0,
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, place, num_shared)
        self.set_fused(True)
        self.b13 = place.empty(self.num_experts, 2 * self.width)
        self.b2 = place.empty(self.num_experts, hidden_size)
        self._adds_bias = self._columns.ranges[0].start == 0  # of the sum over ranks
        self._stored: list[tuple[Tensor, Tensor]] = []  # blocks and scales of w13, w2
        self._mxfp4: list[Mxfp4Matrices] = []

    def allocate_mxfp4(self) -> None:
        """Allocates them on a GPU, in place of `w13` and `w2`."""
        (experts, hidden, width), device = self.w2.shape, self._device
        if not have_triton(device.type) or hidden % MXFP4_BLOCK_K or width % MXFP4_BLOCK_K:
            return
        for n, k in ((2 * width, hidden), (hidden, width)):
            runs = experts, n, k // MXFP4_RUN
            blocks = torch.empty(*runs, MXFP4_RUN // 2, dtype=torch.uint8, device=device)
            self._stored.append((blocks, torch.empty(runs, dtype=torch.uint8, device=device)))

    def allocate(self) -> None:
        if not self._stored:
            super().allocate()

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Views of gate_up_proj [E, H, I, 2] and down_proj [E, I, H], and of their biases."""
        biases = {
            f"{prefix}gate_up_proj_bias": self.b13.unflatten(1, (2, -1)).transpose(1, 2),
            f"{prefix}down_proj_bias": self.b2,
        }
        if self._stored:
            w13, w2 = self._stored
            names = BLOCKS, SCALES
            rows = [tensor.unflatten(1, (2, -1)).transpose(1, 2) for tensor in w13]
            gate_up = {f"{prefix}gate_up_proj{n}": t for n, t in zip(names, rows, strict=True)}
            down = {f"{prefix}down_proj{n}": t for n, t in zip(names, w2, strict=True)}
            return gate_up | down | biases
        pairs = self.w13.unflatten(1, (2, -1))  # [E, 2, I, H]
        plain = {
            f"{prefix}gate_up_proj": pairs.permute(0, 3, 2, 1),
            f"{prefix}down_proj": self.w2.transpose(1, 2),
        }
        return plain | biases

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Gate and up alternate, so a rank's columns of both are neighbours."""
        if self._ranks == 1:
            return {}
        if self.is_part:
            whole = Shard(0, self._num_all, (self.part,))
            return dict.fromkeys(self.weights(prefix), whole)
        own, pairs = self._columns, self._columns.scaled(2)
        gate_up, down = f"{prefix}gate_up_proj", f"{prefix}down_proj"
        biases = {f"{gate_up}_bias": pairs.along(1)}
        if not self._stored:
            return biases | {gate_up: pairs.along(2), down: own.along(1)}
        runs = own.in_groups(MXFP4_RUN, "expert width").along(2)
        gates = dict.fromkeys((gate_up + BLOCKS, gate_up + SCALES), pairs.along(1))
        return biases | gates | dict.fromkeys((down + BLOCKS, down + SCALES), runs)

    def prepare(self) -> None:
        super().prepare()
        if not self._adds_bias:
            self.b2.zero_()
        self._mxfp4 = [Mxfp4Matrices.pack(blocks, scales) for blocks, scales in self._stored]
        self._stored = []
        if self._mxfp4:
            self.quantized_gemm = describe_mxfp4(self._mxfp4[1], self.w2.dtype)

    def __call__(
        self, x: Tensor, routed: Routed | RouterLogits, shared: GatedOutput | None = None
    ) -> Tensor:
        here = self.routed_here(routed)
        swiglu = ClampedSwiglu(self.b13, self.b2, self.alpha, self.limit)
        if self._mxfp4:
            assert shared is None
            w13, w2 = self._mxfp4
            return expert_partials_mxfp4(x, w13, w2, here, swiglu)
        return expert_partials(x, self.w13, self.w2, here, shared, activation=swiglu)


class GptOssMoE(SparseMoE):
    experts_choose = False  # the experts' kernel for Hopper has no biases
    router_type = GptOssRouter
    experts_type = GptOssExperts
    stored_names = (("gate", "router"),)


class GptOssDecoderLayer(PreNormDecoderLayer):
    attention = SinkAttention

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer_id: int, place: WeightPlacement) -> GptOssMoE:
        # A softmax over the k best logits is one over all, divided by the sum of the k best.
        routing = Routing(
            num_experts=config.need("num_local_experts"),
            top_k=config.need("num_experts_per_tok"),
            norm_topk_prob=True,
            float32_logits=False,
        )
        moe = GptOssMoE(config.hidden_size, config.intermediate_size, routing, place)
        experts = moe.experts
        assert isinstance(experts, GptOssExperts)
        experts.alpha = float(config.raw.get("swiglu_alpha") or experts.alpha)
        experts.limit = float(config.raw.get("swiglu_limit") or experts.limit)
        return moe


class GptOssForCausalLM(DecoderForCausalLM):
    decoder_layer = GptOssDecoderLayer
    has_attention_sinks = True
