"""GEMM dispatch: which implementation computes x Wᵀ + b for a weight, and what is fused into it.

    CpuGemm       on a CPU: our kernels in C++ over a packed weight (`kernels/cpu/gemm.py`)
    OneDnnGemm    float32 on a CPU without a C++ compiler: the weight reordered once into oneDNN's
                  blocked layout
    SkinnyGemm    bfloat16 on a GPU: our kernels where `kernels/gemm/dispatch.py` has a
                  configuration for so few tokens, else the vendor's library
    FixedOrderGemm  bfloat16 on a GPU with `enable_deterministic_inference`: our kernels for any
                  number of tokens, an output's products along K in one order
    LibraryGemm   everything else: `F.linear`

`gemm_for` chooses once per weight, when the model is prepared. `gemm_quantized.py` has the GEMMs of
quantized weights.

Without our kernels, on a CPU in float32, the library behind `F.linear` is slow for the few tokens
of a decode step; oneDNN with reordered weights is faster at every number of tokens. Measured on 2
AVX2 cores, all matrices of an 8M-parameter model, 1 / 16 / 80 tokens: `F.linear` 2.9 / 9.1 /
15.0 ms, reordered 2.5 / 4.9 / 12.0 ms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu import library as cpu_library
from forerun.kernels.elementwise.gated_act import silu_mul
from forerun.kernels.gemm.config import (
    GemmConfig,
    Sm90GemmConfig,
    uses_split_k,
)
from forerun.kernels.gemm.dispatch import (
    choose_fixed_order_gemm,
    choose_gemm,
    choose_gemm_silu_mul,
)
from forerun.kernels.gemm.gemm import (
    DeferredNorm,
    GemmWeight,
    gemm,
    gemm_add,
    gemm_add_deferred_norm,
    gemm_argmax,
    gemm_partials,
    gemm_silu_mul,
)
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.sampling.argmax import argmax
from forerun.layers.norm import RMSNorm

# The number of tokens that oneDNN is asked to lay a weight out for. Hints of 32 and more serve 1
# to 256 tokens alike; hints of 1 to 16 make some other number up to three times slower.
ONEDNN_TOKENS = 32

# A weight that must also stay plain (a tied embedding) is reordered up to this size only: beyond
# it the second copy costs more memory than the faster GEMM is worth.
MAX_SHARED_COPY = 256 << 20  # bytes

INT8 = "int8"  # `EngineConfig.quantization`
DRAFT = "draft"  # INT8 where kernels read such weights, of drafts

# Weights up to this size are also kept transposed: for one token that is 1.3 times faster than
# oneDNN (3.2 against 4.2 ms for all matrices of an 8M-parameter model), and that is plain decoding.
MAX_TRANSPOSED = 8 << 20  # bytes

MIN_IN_PLACE_TOKENS = 512  # below, what keeps a residual would copy more than the GEMM saves


def adds_in_place(num_tokens: int) -> bool:
    """Whether a GEMM may overwrite the residual [num_tokens, out] with the sum."""
    return num_tokens >= MIN_IN_PLACE_TOKENS


class Gemm(ABC):
    """y = x Wᵀ + b of one weight [out, in], alone or with what surrounds it fused in.

    x is [T, in], or short of the last step of its RMSNorm (`DeferredNorm`) where
    `accepts_deferred_norm` says so. The defaults fuse nothing.
    """

    packs_weight: ClassVar[bool] = False  # it keeps a copy, and does not read the plain weight

    def describe_quantized(self) -> str | None:
        """What computes with a quantized weight, by tokens; None: it is not kept quantized."""
        return None

    @abstractmethod
    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        """[T, out]."""

    def accepts_deferred_norm(self, num_tokens: int) -> bool:
        """Whether it can finish a deferred RMSNorm of this many tokens."""
        return False

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """(norm(sum), sum) of the residual [T, out] and the output.

        Where `adds_in_place`, the residual may be overwritten.
        `reader`: the GEMM that alone reads the norm, if there is one: it may be left the norm's
        last step.
        """
        return norm.add(self(x), residual)

    def with_int8_tokens(self) -> Gemm:
        """The same weight, with tokens rounded to 8 bits when they are multiplied, where it can."""
        return self

    def in_fixed_order(self) -> Gemm | None:
        """The same weight with one order of sums for any number of tokens; None: it has none."""
        return None

    def split_k_partials(self, x: Tensor, free_smem: int = 0) -> Tensor | None:
        """Partials [S, T, out] float32, if the norm that follows is to add them up.

        `free_smem`: shared memory per SM in bytes to leave to that norm.
        """
        return None

    def silu_and_mul(self, x: Tensor | DeferredNorm) -> Tensor:
        """[gate | up] = output -> silu(gate) · up, [T, out / 2]."""
        gate_up = self(x)
        return silu_mul(gate_up, gate_up.dtype)

    def argmax(self, x: Tensor) -> Tensor:
        """[T] int64: the id of each token's largest output, the lowest of equals."""
        return argmax(self(x))


class LibraryGemm(Gemm):
    """PyTorch's own: cuBLAS, hipBLASLt, MKL."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        return F.linear(whole(x), self.weight, self.bias)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """Many tokens are added to the residual by the GEMM, in place (beta = 1)."""
        if self.bias is not None or not adds_in_place(x.shape[0]):
            return super().add_rms_norm(x, residual, norm, reader)
        self.add_(x, residual)
        return norm(residual), residual

    def add_(self, x: Tensor, residual: Tensor) -> None:
        """residual [T, out] += x Wᵀ."""
        residual.addmm_(x, self.weight.t())


class CpuGemm(Gemm):
    """Our kernels for CPUs: residual and norm, SwiGLU and argmax in the epilogue."""

    packs_weight = True

    def __init__(self, weight: cpu.PackedWeight) -> None:
        self.weight = weight

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, format: cpu.Format | None = None) -> CpuGemm:
        """`format`: of the packed weight; None: that of its dtype."""
        return cls(cpu.pack(weight, bias, format))

    def describe_quantized(self) -> str | None:
        kind = self.weight.grouped
        if kind is None:
            return None
        tokens = "float32" if self.weight.format is cpu.Format.GROUPED else "8-bit tokens"
        return f"{kind.bits}-bit codes in groups of {kind.group}: {tokens} in C++"

    def with_int8_tokens(self) -> Gemm:
        grouped = self.weight.format is cpu.Format.GROUPED
        return CpuGemm(cpu.with_int8_tokens(self.weight)) if grouped else self

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        return cpu.gemm(whole(x), self.weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        if norm.weight.dtype != x.dtype:  # Gemma's in bfloat16
            return norm.add(self(x), residual)
        return cpu.gemm_add_rms_norm(x, self.weight, residual, norm.weight, norm.eps)

    def silu_and_mul(self, x: Tensor | DeferredNorm) -> Tensor:
        return cpu.gemm_silu_mul(whole(x), self.weight)

    def argmax(self, x: Tensor) -> Tensor:
        return cpu.gemm_argmax(x, self.weight)


class OneDnnGemm(Gemm):
    """The weight in oneDNN's blocked layout and, if it is small, transposed for single tokens."""

    packs_weight = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.mkldnn
        self.weight: Tensor = ops._reorder_linear_weight(weight, ONEDNN_TOKENS)
        self.bias = bias
        small = bias is None and weight.numel() * weight.element_size() <= MAX_TRANSPOSED
        self.transposed = weight.t().contiguous() if small else None  # [in, out]
        self._linear = ops._linear_pointwise.default
        self._linear_add = ops._linear_pointwise.binary

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        x = whole(x)
        if self.transposed is not None and x.shape[0] == 1:
            return torch.mm(x, self.transposed)
        y: Tensor = self._linear(x, self.weight, self.bias, "none", [], "")
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, in], residual [T, out] -> residual + x Wᵀ + b, a new tensor."""
        if self.transposed is not None and x.shape[0] == 1:
            return torch.addmm(residual, x, self.transposed)
        y: Tensor = self._linear_add(x, residual, self.weight, self.bias, "add")
        return y

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """The addition costs nothing in the GEMM."""
        residual = self.add(x, residual)
        return norm(residual), residual


class SkinnyGemm(Gemm):
    """Our kernels for few tokens; SwiGLU goes into GEMMs of many tokens too."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = GemmWeight.from_tensor(weight, bias)
        self._library: Gemm = LibraryGemm(weight, bias)

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        config = self._config(num_tokens_of(x))
        return self._library(x) if config is None else gemm(x, self.weight, config)

    def accepts_deferred_norm(self, num_tokens: int) -> bool:
        return self._config(num_tokens) is not None

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """Residual and norm in the epilogue, or split-K partials that the norm adds up."""
        partials = self.weight.bias is None
        config = self._config(x.shape[0], partials)
        if config is None:
            return self._library.add_rms_norm(x, residual, norm, reader)
        if uses_split_k(config):
            if partials:
                return norm.add(gemm_partials(x, self.weight, config), residual)
        elif self._defers(norm, reader, x):
            return gemm_add_deferred_norm(x, self.weight, residual, norm.weight, norm.eps, config)
        return norm.add(gemm(x, self.weight, config), residual)

    @staticmethod
    def _defers(norm: RMSNorm, reader: Gemm | None, x: Tensor) -> bool:
        """Whether the epilogue may begin a norm: it reads weights of x's dtype, so not Gemma's."""
        if norm.weight.dtype != x.dtype or reader is None:
            return False
        return reader.accepts_deferred_norm(x.shape[0])

    def split_k_partials(self, x: Tensor, free_smem: int = 0) -> Tensor | None:
        if self.weight.bias is not None:
            return None
        config = self._config(x.shape[0], partials=True)
        if config is None or not uses_split_k(config):
            return None
        if isinstance(config, Sm90GemmConfig):
            config = replace(config, free_smem=free_smem)
        return gemm_partials(x, self.weight, config)

    def silu_and_mul(self, x: Tensor | DeferredNorm) -> Tensor:
        config = self._silu_mul_config(num_tokens_of(x))
        return super().silu_and_mul(x) if config is None else gemm_silu_mul(x, self.weight, config)

    def argmax(self, x: Tensor) -> Tensor:
        config = self._config(x.shape[0])
        return argmax(self._library(x)) if config is None else gemm_argmax(x, self.weight, config)

    def _config(self, num_tokens: int, partials: bool = False) -> GemmConfig | None:
        """Our kernel's; None: the library is faster. `partials`: the norm can add them up."""
        n, k = self.weight.weight.shape
        return choose_gemm(n, k, num_tokens, gpu_of(self.weight.weight.device), partials)

    def _silu_mul_config(self, num_tokens: int) -> GemmConfig | None:
        n, k = self.weight.weight.shape
        return choose_gemm_silu_mul(n, k, num_tokens, gpu_of(self.weight.weight.device))


class FixedOrderGemm(Gemm):
    """Our kernels for any number of tokens. A token's output depends on its input alone.

    No norm is deferred: what follows would add up other sums for few tokens than for many.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = GemmWeight.from_tensor(weight, bias)

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        return gemm(x, self.weight, self._config(num_tokens_of(x)))

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """The residual is added in the epilogue, or by the norm to the sums of both halves of K."""
        config = self._config(x.shape[0], partials=self.weight.bias is None)
        if uses_split_k(config):
            return norm.add(gemm_partials(x, self.weight, config), residual)
        total = gemm_add(x, self.weight, residual, config)
        return norm(total), total

    def silu_and_mul(self, x: Tensor | DeferredNorm) -> Tensor:
        return gemm_silu_mul(x, self.weight, self._config(num_tokens_of(x)))

    def argmax(self, x: Tensor) -> Tensor:
        return gemm_argmax(x, self.weight, self._config(x.shape[0]))

    def _config(self, num_tokens: int, partials: bool = False) -> GemmConfig:
        n, k = self.weight.weight.shape
        gpu = gpu_of(self.weight.weight.device)
        return choose_fixed_order_gemm(n, k, num_tokens, gpu, partials)


class BlockwiseGemm(Gemm):
    """Kernels that have one order of sums for few tokens alone, for any number: block by block.

    Each block of tokens reads the weight again. No norm is deferred and no partials are left.
    """

    packs_weight = True

    def __init__(self, few: Gemm, max_tokens: int) -> None:
        """`few`: of 1 to `max_tokens` tokens a token's result does not depend on how many."""
        self._few, self._max_tokens = few, max_tokens

    def describe_quantized(self) -> str | None:
        said = self._few.describe_quantized()
        return None if said is None else f"{said}; {self._max_tokens} tokens at a time"

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        return self._each(self._few, x)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm, reader: Gemm | None
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        pairs = zip(x.split(self._max_tokens), residual.split(self._max_tokens), strict=True)
        done = [self._few.add_rms_norm(*pair, norm, None) for pair in pairs]
        if len(done) == 1:
            return done[0]
        return torch.cat([whole(normed) for normed, _ in done]), torch.cat(
            [total for _, total in done]
        )

    def silu_and_mul(self, x: Tensor | DeferredNorm) -> Tensor:
        return self._each(self._few.silu_and_mul, x)

    def argmax(self, x: Tensor) -> Tensor:
        return self._each(self._few.argmax, x)

    def _each(self, function: Callable[[Tensor], Tensor], x: Tensor | DeferredNorm) -> Tensor:
        outs = [function(part) for part in whole(x).split(self._max_tokens)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def gemm_for(
    weight: Tensor,
    bias: Tensor | None,
    shared: bool = False,
    quantization: str | None = None,
    fixed_order: bool = False,
) -> Gemm:
    """The implementation for a loaded weight [out, in].

    Args:
        shared: the plain matrix stays in use elsewhere, so that a reordered one is a second copy.
        quantization: "int8": the GEMM reads it in 8 bits; only where `CpuGemm` serves. "draft": the
            same, but elsewhere it is as if there were none.
        fixed_order: a token's output depends on its input alone; on a CPU it does anyway.

    Raises:
        ConfigError: no implementation for this weight has a fixed order.
    """
    if fixed_order and weight.is_cuda:
        if not skinny_serves(weight):
            raise ConfigError(
                f"enable_deterministic_inference: GEMMs of {weight.dtype} weights with"
                f" {weight.shape[1]} input columns have no fixed order of sums; drop it."
            )
        return FixedOrderGemm(weight, bias)
    if quantization == INT8 or (quantization == DRAFT and cpu_kernels_serve(weight)):
        return CpuGemm.pack(weight, bias, cpu.Format.INT8)
    if cpu_kernels_serve(weight):
        return CpuGemm.pack(weight, bias)
    if shared and weight.nbytes > MAX_SHARED_COPY:
        return plain_gemm_for(weight, bias)
    if onednn_serves(weight):
        return OneDnnGemm(weight, bias)
    return plain_gemm_for(weight, bias)


def plain_gemm_for(weight: Tensor, bias: Tensor | None = None) -> Gemm:
    """`gemm_for` that reads the weight where it is, such as a view of a larger tensor."""
    if skinny_serves(weight):
        return SkinnyGemm(weight, bias)
    return LibraryGemm(weight, bias)


def cpu_kernels_serve(weight: Tensor) -> bool:
    """float32 and bfloat16 on a CPU, where a compiler is there."""
    fits = weight.dim() == 2 and cpu.fits(weight, cpu.plain_format(weight.dtype))
    return fits and cpu_library.serves(weight.dtype, weight.device)


def onednn_serves(weight: Tensor) -> bool:
    """float32 on a CPU, in a build that has oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


def skinny_serves(weight: Tensor) -> bool:
    """bfloat16 on a GPU."""
    return weight.is_cuda and weight.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0


def whole(x: Tensor | DeferredNorm) -> Tensor:
    assert isinstance(x, Tensor), "only where `accepts_deferred_norm`"
    return x


def num_tokens_of(x: Tensor | DeferredNorm) -> int:
    return (x.x if isinstance(x, DeferredNorm) else x).shape[0]
