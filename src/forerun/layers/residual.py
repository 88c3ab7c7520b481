"""The residual stream: what is added to it, normed for the next layer, and captured from it."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.communication import WeightPlacement
from forerun.layers.gemm import adds_in_place
from forerun.layers.linear import Hidden, LinearBase, Pending, PendingGemm
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm


class AddRMSNorm(Module):
    """Adds a layer's output to the residual stream and norms the sum: `x, residual = norm(...)`.

    Where the output is a GEMM that has not run, addition and norm are fused with it (see
    `Gemm.add_rms_norm`). If one linear alone reads the norm, `link` it: then that linear's GEMM may
    do the norm's last step.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        place: WeightPlacement,
        rms_norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        self.norm = rms_norm(size, eps, place)
        self._reader: LinearBase | None = None

    def link(self, reader: LinearBase) -> None:
        """Links the linear that reads the norm; for `prepare` of a layer."""
        self._reader = reader

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return self.norm.weights(prefix)

    def __call__(self, x: Hidden, residual: Tensor | None) -> tuple[Tensor | DeferredNorm, Tensor]:
        """(norm(residual + x), residual + x), [T, size] each; the residual begins as None."""
        if isinstance(x, Pending):
            assert residual is not None
            reader = None if self._reader is None else self._reader.gemm
            return x.add_rms_norm(residual, self.norm, reader)
        assert isinstance(x, Tensor)
        return (self.norm(x), x) if residual is None else self.norm.add(x, residual)


def kept(residual: Tensor) -> Tensor:
    """The residual, for who reads it after the next addition to the stream: maybe a copy."""
    return residual.clone() if adds_in_place(residual.shape[0]) else residual


class FinalRMSNorm(AddRMSNorm):
    """Norms what follows the last layer: no linear is linked, so the norm is whole."""

    def __call__(self, x: Hidden, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        normed, residual = super().__call__(x, residual)
        assert isinstance(normed, Tensor)
        return normed, residual


class AuxHiddenStates:
    """What one forward returns: hidden states that a draft model reads, and of which tokens.

    Where only some tokens' final hidden states are needed, those of the prompts' ends, the last
    layer computes its output projection and MLP for them alone.
    """

    def __init__(
        self, layers: tuple[int, ...], rows: Tensor | None = None, last_layer: int = -1
    ) -> None:
        """`layers`: decoder layers whose outputs are captured, in this order.

        `rows` [n] int64: the tokens that continue after the attention of `last_layer`; None: all.
        """
        assert rows is None or last_layer not in layers
        self._layers, self._rows, self._last_layer = layers, rows, last_layer
        self._captured: dict[int, Tensor] = {}

    def after_attention(
        self, layer: int, x: PendingGemm, residual: Tensor
    ) -> tuple[PendingGemm, Tensor]:
        """A layer's attention output and residual, of the tokens that continue."""
        if self._rows is None or layer != self._last_layer:
            return x, residual
        return x.rows(self._rows), residual.index_select(0, self._rows)

    def capture(self, index: int, residual: Tensor) -> None:
        """`index` as in Hugging Face's `hidden_states`: the input of that layer, [T, H]."""
        if index - 1 in self._layers:
            self._captured[index - 1] = kept(residual)

    def concatenated(self) -> Tensor | None:
        """[T, n · H], or None if no layer is captured."""
        if not self._layers:
            return None
        return torch.cat([self._captured[layer] for layer in self._layers], 1)


NO_CAPTURE = AuxHiddenStates(())
