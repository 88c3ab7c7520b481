"""The GEMMs of a decode step, counted from outside while one eager step runs.

Library GEMMs (cuBLAS, oneDNN) pass PyTorch's dispatcher, where a `TorchDispatchMode` reads their
operands; composite operators (`linear`, `matmul`, `einsum`) are decomposed into `mm`, `addmm` and
`bmm` first. Our own kernels bypass the dispatcher, but all are launched by one function,
`kernels.gemm.gemm._launch`, which is wrapped while recording. So are that of the GEMMs per head
(MLA), those on a CPU and the functions of the experts of a mixture; which experts are read depends
on the tokens, and their expected number is counted (`touched_experts`); shared ones always are.

Only GEMMs with a weight count: one operand must have existed before recording began. Attention is
not counted: recording pauses while a backend runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from forerun.attention.base import AttentionContext
from forerun.engine.engine import Engine
from forerun.executor.device_executor import device_step
from forerun.executor.step.inputs import StepShape
from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu.experts import PackedExperts
from forerun.kernels.cpu.gemm import PackedWeight, PackedWeights
from forerun.kernels.gemm import gemm as own_kernels
from forerun.kernels.gemm import head_gemm
from forerun.kernels.gemm.arguments import GemmArguments
from forerun.kernels.gemm.config import GemmConfig
from forerun.kernels.gemm.gemm import GemmWeight
from forerun.kernels.gemm.int4 import PackedInt4
from forerun.kernels.moe import router
from forerun.kernels.moe.experts_mxfp4 import Mxfp4Matrices
from forerun.kernels.moe.fp8_matrices import Fp8Matrices
from forerun.kernels.moe.router_logits_sm90 import LogitsRouter
from forerun.kernels.moe.routing import Routed, RouterLogits
from forerun.layers import experts_cpu, experts_fp8, gemm_quantized, moe
from forerun.models.formats import mxfp4
from forerun.plan.work import Gemm, touched_experts
from forerun.sampling.sampler import SamplingFlags

# The first of two operands, among the arguments.
_OPERANDS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1,
}  # fmt: skip
_ONEDNN = "mkldnn::_linear_pointwise"


@contextmanager
def recording() -> Iterator[list[Gemm]]:
    """Yields a list to which every GEMM with a weight that runs in the block is appended."""
    mode = _Recorder()
    with (
        _wrapped(own_kernels, "_launch", mode.watch),
        _wrapped(head_gemm, "_launch", mode.watch_heads),
        _wrapped(router, "router_partials", mode.watch_router),
        _wrapped(router, "route_sm90", mode.watch_router),
        _wrapped(moe, "router_logits_sm90", mode.watch_logits),
        _wrapped(moe, "add_rms_norm_router_logits_sm90", mode.watch_logits),
        _wrapped(gemm_quantized, "gemm_int4", mode.watch_int4),
        _wrapped(gemm_quantized, "gemm_int4_partials", mode.watch_int4),
        _wrapped(moe, "expert_partials", mode.watch_experts),
        _wrapped(experts_fp8, "expert_partials_fp8", mode.watch_packed_experts),
        _wrapped(mxfp4, "expert_partials_mxfp4", mode.watch_packed_experts),
        _wrapped(experts_cpu, "expert_partials_cpu", mode.watch_cpu_experts),
        _wrapped(cpu, "head_gemm", mode.watch_cpu_heads),
        _wrapped(cpu, "gemm", mode.watch_cpu),
        _wrapped(cpu, "gemm_add_rms_norm", mode.watch_cpu),
        _wrapped(cpu, "gemm_silu_mul", mode.watch_cpu),
        _wrapped(cpu, "gemm_argmax", mode.watch_cpu),
        _wrapped(AttentionContext, "run", _unwatched),
        _wrapped(AttentionContext, "attend_latent", _unwatched),
        mode,
    ):
        yield mode.gemms


def _packed_bits(weight: PackedWeight) -> float | None:
    """Bits of a value in memory; None: those of its dtype."""
    plain = weight.format is cpu.plain_format(weight.dtype)
    return None if plain else 8 * weight.nbytes / (weight.n * weight.k)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gemms: list[Gemm] = []
        self._results: dict[int, Tensor] = {}  # storage -> a tensor in it, which keeps it alive

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        if name in _OPERANDS:
            self._record(*args[_OPERANDS[name] :][:2])
        elif name == _ONEDNN:
            self._add(*_onednn_operands(func, args))
        out = func(*args, **kwargs)
        self._note_results((args, kwargs), out)
        return out

    def _record(self, a: Tensor, b: Tensor) -> None:
        """a [..., M, K] times b [..., K, N]; the weight may be either."""
        if not self._is_result(b):
            self._add(a, b.mT)
        elif not self._is_result(a):
            self._add(b.mT, a)

    def _add(self, x: Tensor, weight: Tensor) -> None:
        """x [..., T, K], weight [..., N, K]."""
        n, k = weight.shape[-2:]
        for _ in range(weight.shape[:-2].numel()):
            self.gemms.append(Gemm(n, k, weight.dtype, x.shape[-2]))

    def watch(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def watched(config: GemmConfig, w: GemmWeight, args: GemmArguments) -> None:
            self._add(args.x, args.weight)
            if args.scales is not None:
                self.gemms[-1] = replace(self.gemms[-1], scale_bytes=args.scales.nbytes)
            launch(config, w, args)

        return watched

    def watch_heads(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: Tensor, weight: Tensor, out: Tensor) -> None:
            self._add(x.transpose(0, 1), weight.mT)
            launch(x, weight, out)

        return watched

    def watch_cpu(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: Tensor, weight: PackedWeight, *rest: Any) -> Any:
            bits = _packed_bits(weight)
            made = Gemm(weight.n, weight.k, weight.dtype, x.shape[-2], bits=bits)
            self.gemms.append(made)
            return run(x, weight, *rest)

        return watched

    def watch_cpu_heads(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: Tensor, heads: PackedWeights, out: Tensor) -> None:
            for weight in heads.weights:
                bits = _packed_bits(weight)
                self.gemms.append(Gemm(weight.n, weight.k, weight.dtype, len(x), bits=bits))
            run(x, heads, out)

        return watched

    def watch_cpu_experts(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(
            x: Tensor, experts: PackedExperts, routed: Routed | RouterLogits, *rest: Any
        ) -> Any:
            for each in (experts.gate_up, experts.down):
                one = each.weights[0]
                shape, bits = (len(each), one.n, one.k), _packed_bits(one)
                self._add_experts(len(x), shape, x.dtype, routed, bits)
            return run(x, experts, routed, *rest)

        return watched

    def watch_router(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: Tensor, weight: Tensor, *rest: Any) -> Any:
            self._add(x, weight)
            return run(x, weight, *rest)

        return watched

    def watch_logits(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: Tensor, *rest: Any) -> Any:  # x, or the partials that it is the sum of
            router: LogitsRouter = rest[-1]
            self._add(x, router.weight)
            return run(x, *rest)

        return watched

    def watch_experts(self, partials: Callable[..., Any]) -> Callable[..., Any]:
        def watched(
            x: Tensor,
            w13: Tensor,
            w2: Tensor,
            routed: Routed | RouterLogits,
            *shared: Any,
            **rest: Any,
        ) -> Tensor:
            for weight in (w13, w2):
                self._add_experts(len(x), weight.shape, weight.dtype, routed)
            return cast(Tensor, partials(x, w13, w2, routed, *shared, **rest))

        return watched

    def watch_packed_experts(self, partials: Callable[..., Any]) -> Callable[..., Any]:
        def watched(
            x: Tensor,
            w13: Mxfp4Matrices | Fp8Matrices,
            w2: Mxfp4Matrices | Fp8Matrices,
            routed: Routed | RouterLogits,
            *rest: Any,
        ) -> Tensor:
            for weight in (w13, w2):
                self._add_experts(len(x), weight.shape, x.dtype, routed, weight.bits)
            return cast(Tensor, partials(x, w13, w2, routed, *rest))

        return watched

    def _add_experts(
        self,
        tokens: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        routed: Routed | RouterLogits,
        bits: float | None = None,
    ) -> None:
        """One of the stacked matrices [E, N, K] of the experts."""
        if isinstance(routed, RouterLogits):
            choices, always = routed.num_choices, routed.routing.num_shared
        else:
            choices, always = routed.experts.shape[1], routed.num_shared
        count, n, k = shape
        touched = touched_experts(tokens, choices - always, count - always) + always
        self.gemms.append(Gemm(n, k, dtype, tokens * choices, touched, bits=bits))

    def watch_int4(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: Tensor, weight: PackedInt4, *rest: Any, **named: Any) -> Any:
            out, (n, k) = run(x, weight, *rest, **named), weight.shape
            if out is not None:  # else another call computes it
                self.gemms.append(Gemm(n, k, x.dtype, x.shape[0], bits=weight.bits))
            return out

        return watched

    def _is_result(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._results

    def _note_results(self, inputs: Any, out: Any) -> None:
        """Remembers the tensors that an operator allocated; views of its inputs are not new."""
        known = {_storage(x) for x in tree_iter(inputs) if _has_storage(x)}
        for tensor in tree_iter(out):
            if _has_storage(tensor) and _storage(tensor) not in known:
                self._results[_storage(tensor)] = tensor


def _unwatched(attend: Callable[..., Any]) -> Callable[..., Any]:
    def unwatched(*args: Any) -> Any:
        with _disable_current_modes():
            return attend(*args)

    return unwatched


def _onednn_operands(func: OpOverload, args: Any) -> tuple[Tensor, Tensor]:
    """x and the packed weight; in the binary form the other addend is between them."""
    return args[0], args[2] if func._overloadname == "binary" else args[1]


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


@contextmanager
def _wrapped(
    owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces function `name` of a module or class by `wrap(function)` within the block."""
    original = vars(owner)[name]
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@torch.inference_mode()
def step_gemms(engine: Engine, batch_size: int) -> tuple[Gemm, ...]:
    """The GEMMs of a decode step at full width, run eagerly on the padding slot of an idle engine.

    Raises:
        AlgorithmError: the algorithm failed in it.
    """
    step = device_step(engine.executor)
    tables, width = step.tables, step.caps.num_verify_tokens
    slots = tables.upload([tables.padding_slot] * batch_size, torch.int64)
    draft = step.empty_draft(slots, width) if step.caps.needs_host_tokens and width > 1 else None
    shape = StepShape(width, 1 + step.caps.kv_reserve, SamplingFlags())
    with step.dummy_steps(), recording() as gemms:
        step.decode(slots, shape, draft)
    error = step.algorithm.take_error()
    if error is not None:
        raise error
    return tuple(gemms)
