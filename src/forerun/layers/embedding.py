"""The vocabulary at both ends of a model, each split by token ids across tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.cpu.gemm import PackedWeight, has_rows, take_packed_rows
from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.kernels.sampling.argmax import argmax, argmax_keys, ids_of_keys
from forerun.layers.communication import WeightPlacement
from forerun.layers.gemm import CpuGemm, LibraryGemm
from forerun.layers.linear import LinearBase, Rows
from forerun.layers.module import Module
from forerun.layers.quantize_method import QuantizeMethod
from forerun.layers.sharding import Shard, VocabShard

Change = Callable[[Tensor], Tensor]  # elementwise


class VocabEmbedding(Module):
    """`weight` [V, H] (vLLM, SGLang: VocabParallelEmbedding)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, place: WeightPlacement, scale: float = 1.0
    ) -> None:
        """`scale`: of what is looked up, not of the weight, which may also be the LM head's."""
        self.vocab = VocabShard.of(vocab_size, place.comm)
        self.weight = place.empty(self.vocab.rows, hidden_size)
        # Rounded to the weight's dtype, as in transformers.
        self._scale = float(torch.tensor(scale, dtype=place.dtype))
        self._comm = place.comm
        self._cpu_kernels = False
        self.quantized: QuantizedWeight | None = None  # in the place of `weight`
        self._method = QuantizeMethod()  # of it
        self.packed: PackedWeight | None = None  # what is read, once prepared, if not `weight`

    def quantize(self, method: QuantizeMethod) -> bool:
        """Keeps the rows as the method does, before they are loaded; False: they stay plain."""
        if method.keeps_vocabulary:
            (n, k), device = self.weight.shape, self.weight.device
            self.quantized, self._method = method.empty_linear(n, k, device), method
        if self.quantized is not None:
            self.weight = self.weight.new_empty(0, self.weight.shape[1])
        return self.quantized is not None

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        plain = self.quantized is None
        return {f"{prefix}weight": self.vocab.own(self.weight)} if plain else {}

    def quantized_weights(self, prefix: str = "") -> dict[str, QuantizedWeight]:
        return {} if self.quantized is None else {f"{prefix}weight": self.quantized}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return {f"{prefix}weight": self.vocab.shard} if self._comm.size > 1 else {}

    def prepare(self) -> None:
        self.weight[self.vocab.count :] = 0
        self._cpu_kernels = library.serves(self.weight.dtype, self.weight.device)
        if self.quantized is not None:
            gemm = self._method.gemm(self.quantized, None, self.weight.dtype)
            assert isinstance(gemm, CpuGemm)
            self.packed, self.quantized = gemm.weight, None

    def read_packed(self, packed: PackedWeight) -> None:
        """Reads the LM head's packed weight from now on, instead of one of its own."""
        self.packed, self.weight = packed, self.weight.new_empty(0, self.weight.shape[1])

    @property
    def rows(self) -> Tensor | None:
        """`weight`, if a call is a look-up of its rows and no more."""
        plain = self.quantized is None and self.packed is None
        return self.weight if plain and self._comm.size == 1 and self._scale == 1 else None

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int -> [T, H]."""
        if self._comm.size == 1:
            return self._embed(input_ids)
        ids = input_ids - self.vocab.first
        elsewhere = (ids < 0) | (ids >= self.vocab.count)
        own = self._embed(ids.masked_fill(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(1), 0)
        return self._comm.all_reduce(own)

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self.packed is not None:
            embedded = take_packed_rows(self.packed, input_ids.long())
        elif self._cpu_kernels and input_ids.dtype == torch.int64:
            embedded = cpu.take_rows(self.weight, input_ids)
        else:
            embedded = F.embedding(input_ids, self.weight)
        if self._scale != 1:
            embedded = embedded * self._scale
        return embedded


class LMHead(LinearBase):
    """`weight` [V, H], its own or tied to the embedding (vLLM, SGLang: ParallelLMHead)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, place: WeightPlacement, tied: VocabEmbedding | None
    ) -> None:
        self.vocab = VocabShard.of(vocab_size, place.comm)
        rows = 0 if tied is not None else self.vocab.rows
        super().__init__(hidden_size, rows, False, place)
        self.comm, self._tied = place.comm, tied
        if tied is not None:
            self.weight, self.shared = tied.weight, True
            self.gemm = LibraryGemm(self.weight, None)

    def prepare(self) -> None:
        tied = self._tied
        if tied is not None and tied.packed is not None:
            self.gemm, self.weight = self._with_tokens(CpuGemm(tied.packed)), tied.weight
            self.quantized_gemm = self.gemm.describe_quantized()
            return
        if not self.shared:
            self.weight[self.vocab.count :] = 0
        super().prepare()
        if tied is not None and isinstance(self.gemm, CpuGemm) and has_rows(self.gemm.weight):
            tied.read_packed(self.gemm.weight)

    def quantize(self, method: QuantizeMethod) -> bool:
        """Plain in nearly all quantized checkpoints."""
        return method.keeps_vocabulary and super().quantize(method)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """A tied head is loaded as the embedding."""
        return {} if self.shared else super().weights(prefix)

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return {} if self.shared else super().shards(prefix)

    def _rows(self, prefix: str) -> dict[str, Rows]:
        return {prefix: self.vocab.own}

    def _row_shards(self, prefix: str) -> dict[str, Shard]:
        return {prefix: self.vocab.shard} if self.comm.size > 1 else {}

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [T, H] -> logits [T, V], in the weights' dtype."""
        logits = self.gemm(hidden_states)
        if self.comm.size == 1:
            return logits
        return self.comm.all_gather(logits)[:, : self.vocab.vocab_size]

    def own_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, n], of the rank's token ids."""
        return self.gemm(hidden_states)[:, : self.vocab.count]

    def argmax(self, hidden_states: Tensor, change: Change | None = None) -> Tensor:
        """[T, H] -> [T] int64: the largest logit's id, the lowest of equals; keeps no logits.

        `change`: what a family does to its logits before.
        """
        if self.comm.size == 1:
            if change is None:
                return self.gemm.argmax(hidden_states)
            return argmax(change(self.gemm(hidden_states)))
        own = self.own_logits(hidden_states)
        keys = argmax_keys(own if change is None else change(own), self.vocab.first)
        return ids_of_keys(self.comm.all_reduce_max(keys))
