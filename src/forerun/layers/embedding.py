"""The vocabulary at both ends of a model, each split by token ids across tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.cpu.gemm import PackedWeight, take_packed_rows
from forerun.kernels.sampling.argmax import argmax, argmax_keys, ids_of_keys
from forerun.layers.communication import WeightPlacement
from forerun.layers.gemm import CpuGemm, LibraryGemm
from forerun.layers.linear import LinearBase, Rows
from forerun.layers.module import Module
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
        self._packed: PackedWeight | None = None

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}weight": self.vocab.own(self.weight)}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return {f"{prefix}weight": self.vocab.shard} if self._comm.size > 1 else {}

    def prepare(self) -> None:
        self.weight[self.vocab.count :] = 0
        self._cpu_kernels = library.serves(self.weight.dtype, self.weight.device)

    def read_packed(self, packed: PackedWeight) -> None:
        """Reads the LM head's packed weight from now on, instead of one of its own."""
        self._packed, self.weight = packed, self.weight.new_empty(0, self.weight.shape[1])

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int -> [T, H]."""
        if self._comm.size == 1:
            return self._embed(input_ids)
        ids = input_ids - self.vocab.first
        elsewhere = (ids < 0) | (ids >= self.vocab.count)
        own = self._embed(ids.masked_fill(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(1), 0)
        return self._comm.all_reduce(own)

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self._packed is not None:
            embedded = take_packed_rows(self._packed, input_ids.long())
        elif self._cpu_kernels and input_ids.dtype == torch.int64:
            embedded = cpu.take_rows(self.weight, input_ids)
        else:
            embedded = F.embedding(input_ids, self.weight)
        if self._scale != 1:
            embedded = embedded * self._scale
        return embedded


class LMHead(LinearBase):
    """`weight` [V, H], its own or tied to the embedding (vLLM, SGLang: ParallelLMHead)."""

    quantizable = False  # as in nearly all quantized checkpoints

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
        if not self.shared:
            self.weight[self.vocab.count :] = 0
        super().prepare()
        if self._tied is not None and isinstance(self.gemm, CpuGemm) and self.gemm.is_plain:
            self._tied.read_packed(self.gemm.weight)

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
