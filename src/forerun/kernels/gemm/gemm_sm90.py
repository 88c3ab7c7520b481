"""Products on Hopper, in CUDA C++ (`gemm_sm90.cu`), most of them of few rows: who loads and who
multiplies are apart, and two multiprocessors share what they read.

Of a program's warps one loads W and one x, by bulk copies into a ring of stages; one or two groups
of four multiply, 64 rows each. Two barriers a stage lie between them: `full` when both operands
have arrived, `empty` when they have been multiplied. W is no kernel's result, so its loader does
not
wait for the kernel before: the ring is full of W when x is ready.

Where x has more rows than a tile, two programs below one another may form a cluster: each loads
half of W's rows and sends them to both (multicast). Triton 3.6 has no such copies on Hopper, and
none of the control over the epilogue that the rest of the gain comes from (docs/kernels.md); that
is why these products are not written in it.

For SiLU · up half of a tile's rows of W are gate's and half up's: both of a pair end in one thread.

Sums are float32 and rounded once, added up in one order. A row's result depends on no other row,
nor on where in a tile it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.runtime import nvrtc as cuda
from forerun.kernels.runtime.gpu import gpu_of

ARCHITECTURE = "sm_90a"
CHUNK = 64  # columns of a stage
MAX_ROWS = 512  # with factors of the rows (`DeferredNorm`)
OUT_ROW = 40  # floats: 32 sums on their way out, so spaced that no two are in one bank
SHARED = 227 << 10  # bytes that a program may have


@dataclass(frozen=True, order=True)
class Sm90Config:
    """How a product is cut up."""

    block_n: int  # rows of W in a tile; with SiLU half gate, half up
    groups: int = 2  # of 64 rows of x in a tile: 1 or 2
    cluster: int = 1  # tiles below one another that share W: 1 or 2
    split: int = 1  # programs a tile; more leave partial sums to the next kernel
    # Clusters that go along W side by side, so that their rows of x stay in L2; 0: all there are.
    band: int = 0

    @property
    def block_m(self) -> int:
        return 64 * self.groups


@dataclass(frozen=True)
class Form:
    """What is compiled in besides."""

    paired: bool = False  # SiLU · up
    partials: bool = False
    best: bool = False  # argmax
    scaled_in: bool = False
    add: bool = False
    scaled_out: bool = False
    bias: bool = False


def stages(config: Sm90Config, form: Form) -> int:
    """Chunks in flight: as many as there is room for, and no more than help."""
    return min((SHARED - _beside(config, form)) // _stage(config), 12)


def shared_bytes(config: Sm90Config, form: Form) -> int:
    """Of a program."""
    return stages(config, form) * _stage(config) + _beside(config, form)


def _stage(config: Sm90Config) -> int:
    """Bytes of a chunk of both operands and its two barriers."""
    return (config.block_m + config.block_n) * CHUNK * 2 + 16


def _beside(config: Sm90Config, form: Form) -> int:
    """What goes out, the rows' factors, their barrier, and what the start is rounded by."""
    room = 0 if form.best else config.block_m * OUT_ROW * 4
    return room + 4 * MAX_ROWS * form.scaled_in + 8 + 1024


def source(config: Sm90Config, form: Form) -> str:
    """All of it, ready to compile."""
    constants = {
        "GROUPS": config.groups, "BN": config.block_n,
        "STAGES": stages(config, form),
        "CLUSTER": config.cluster, "BAND": config.band, "MAX_ROWS": MAX_ROWS, "OUT_ROW": OUT_ROW,
        "PAIRED": form.paired, "PARTIALS": form.partials, "BEST": form.best,
        "SCALED_IN": form.scaled_in, "ADD": form.add, "SCALED_OUT": form.scaled_out,
        "BIAS": form.bias,
    }  # fmt: skip
    defines = "".join(f"#define {name} {int(value)}\n" for name, value in constants.items())
    body = (Path(__file__).parent / "gemm_sm90.cu").read_text(encoding="utf-8")
    return defines + _multiply(config.block_n) + body


def _multiply(columns: int) -> str:
    """The instruction with its operands spelt out: a thread has columns / 2 of the sums."""
    count = columns // 2
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    return (
        f"__device__ void multiply(float (&acc)[{count}], unsigned long long x, "
        f'unsigned long long w) {{ asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.'
        f'f32.bf16.bf16 {{{names}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;" : {sums} '
        ': "l"(x), "l"(w)); }\n'
    )


def launch(
    config: Sm90Config,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    paired: bool = False,
    partials: bool = False,
    best_ids: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    scaled: Tensor | None = None,
    out_squares: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """x [T, K] times weight [N, K]; tensors are None or as in `gemm`.

    Args:
        out: [T, N] bfloat16, [T, N / 2] where `paired`, `partials` [split, T, N] float32, or with
            `best_ids` each tile's largest, [T, tiles over N] float32.
    """
    form = Form(
        paired, partials, best_ids is not None, squares is not None, residual is not None,
        scaled is not None, bias is not None,
    )  # fmt: skip
    (rows, k), n = x.shape, weight.shape[0]
    width, block = n // (1 + paired), config.block_n // (1 + paired)
    assert weight.is_contiguous() and weight.data_ptr() % 16 == 0
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # bulk copies read 16 bytes
        x = x.clone(memory_format=torch.contiguous_format)
    assert squares is None or rows <= MAX_ROWS
    assert width % 4 == 0 and k % (CHUNK * config.split) == 0
    assert block % (8 * config.cluster) == 0 and stages(config, form) > 1
    assert config.split == 1 or partials
    groups_m = -(-rows // (config.block_m * config.cluster))
    units = groups_m * -(-n // config.block_n) * config.split
    clusters = min(gpu_of(x.device).num_sms // config.cluster, units)
    cuda.launch(
        _compiled(config, form, x.device),
        clusters * config.cluster,
        128 * (1 + config.groups),
        (
            cuda.tma_descriptor(x, (min(rows, config.block_m), CHUNK)),
            cuda.tma_descriptor(weight, (block // config.cluster, CHUNK)),
            out, best_ids, bias, residual, norm_weight, scaled, out_squares, squares,
            0 if squares is None else squares.shape[0], eps,
            rows, width, k, units, groups_m, config.split, k // (CHUNK * config.split),
        ),
        x.device,
    )  # fmt: skip


@cache
def _compiled(config: Sm90Config, form: Form, device: torch.device) -> cuda.CudaKernel:
    shared = shared_bytes(config, form)
    return cuda.load_kernel(source(config, form), "product", ARCHITECTURE, shared, device)
