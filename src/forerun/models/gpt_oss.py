"""gpt-oss (arXiv 2508.10925): attention sinks, windows in every other layer, experts with biases.

Experts clamp what goes into their SwiGLU. In checkpoints they are MXFP4 (`formats/mxfp4.py`).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.kernels.moe.experts import ClampedSwiglu
from forerun.kernels.moe.experts_mxfp4 import BLOCK_K as MXFP4_BLOCK_K
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import Rows
from forerun.layers.moe import Experts, Router, Routing, SparseMoE
from forerun.layers.sharding import Shard
from forerun.models.decoder import DecoderForCausalLM
from forerun.models.decoder_layer import PreNormDecoderLayer, SinkAttention


class GptOssRouter(Router):
    has_bias = True


class GptOssExperts(Experts):
    """Experts with biases, named as whole tensors; gate and up alternate in checkpoints."""

    block = MXFP4_BLOCK_K  # as the kernels for MXFP4 read them
    activation: ClampedSwiglu

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
        b13 = place.empty(self.num_experts, 2 * self.width)
        b2 = place.empty(self.num_experts, hidden_size)
        self.activation = ClampedSwiglu(b13, b2, alpha=1.702, limit=7.0)
        self._adds_bias = self._columns.ranges[0].start == 0  # of the sum over ranks

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Views of gate_up_proj [E, H, I, 2] and down_proj [E, I, H], and of their biases."""
        biases = {
            f"{prefix}gate_up_proj_bias": _pairs(self.activation.b13),
            f"{prefix}down_proj_bias": self.activation.b2,
        }
        matrices = super().weights(prefix).items()
        return {name: rows.movedim(-1, 1) for name, rows in matrices} | biases

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Gate and up alternate, so a rank's columns of both are neighbours."""
        if self._ranks == 1:
            return {}
        gate_up, down = f"{prefix}gate_up_proj", f"{prefix}down_proj"
        if self.is_part:
            whole = Shard(0, self._num_all, (self.part,))
            return dict.fromkeys((gate_up, down, f"{gate_up}_bias", f"{down}_bias"), whole)
        own, pairs = self._columns, self._columns.scaled(2)
        return {
            gate_up: pairs.along(2),
            down: own.along(1),
            f"{gate_up}_bias": pairs.along(1),
        }

    def _routed(self, prefix: str) -> dict[str, tuple[int, Rows]]:
        """The rows of a matrix in the order of the checkpoint's columns."""
        return {f"{prefix}gate_up_proj": (0, _pairs), f"{prefix}down_proj": (1, lambda w2: w2)}

    def prepare(self) -> None:
        if not self._adds_bias:
            self.activation.b2.zero_()
        super().prepare()


def _pairs(gate_up: Tensor) -> Tensor:
    """[E, gate | up, ...] -> [E, I, 2, ...], a view."""
    pairs: Tensor = gate_up.unflatten(1, (2, -1))
    return pairs.transpose(1, 2)


class GptOssMoE(SparseMoE):
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
        alpha, limit = (config.raw.get(f"swiglu_{name}") for name in ("alpha", "limit"))
        own = experts.activation
        experts.activation = replace(
            own, alpha=float(alpha or own.alpha), limit=float(limit or own.limit)
        )
        return moe


class GptOssForCausalLM(DecoderForCausalLM):
    decoder_layer = GptOssDecoderLayer
    has_attention_sinks = True
