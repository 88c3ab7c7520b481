"""Ceilings of this machine, measured in the same process as the steps compared with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.evals.timing import median
from forerun.plan.work import Gemm
from forerun.platform.device import dtype_name
from forerun_bench.stream import read_sums

READ_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # far larger than any cache
SQUARE = {"cuda": 8192, "cpu": 1024}  # side of the matrices of a large square GEMM
REPETITIONS = 9
ROTATED_BYTES = 2 << 30  # weights of `gemm_seconds`: too many to stay in a cache


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device."""

    read_bytes_per_second: float
    flops: float  # of a large GEMM in `dtype`
    dtype: str

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        return cls(read_bandwidth(device), gemm_flops(device, dtype), dtype_name(dtype))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line, shown above a table."""
        read, flops = self.read_bytes_per_second / 1e12, self.flops / 1e12
        return f"Measured ceilings: read {read:.3g} TB/s, {self.dtype} GEMM {flops:.3g} TFLOP/s"


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a kernel (on a CPU: a sum) that streams a large tensor."""
    numbers = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    return numbers.nbytes / seconds_of(lambda: read_sums(numbers), device, min)


def gemm_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square GEMM in the vendor's library."""
    side = SQUARE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / seconds_of(lambda: torch.mm(a, b, out=out), device, min)


def gemm_seconds(gemms: Sequence[Gemm], device: torch.device) -> float:
    """The GEMMs of a step alone, one after the other, in the vendor's library.

    On a GPU all run in one graph. Weights are slices of one random buffer, as large as all of them
    together but at most `ROTATED_BYTES`, so that they are read from memory as in a step.
    """
    gemms = [p for gemm in gemms for p in gemm.per_matrix()]
    dtype = max((p.dtype for p in gemms), key=lambda dtype: dtype.itemsize)  # as of activations
    sizes = [p.n * p.k for p in gemms]
    length = max(max(sizes), min(sum(sizes), ROTATED_BYTES // dtype.itemsize))
    buffer = torch.empty(length, dtype=dtype, device=device).normal_()
    inputs = {(p.tokens, p.k): buffer.new_empty(p.tokens, p.k).normal_() for p in gemms}
    outputs = {(p.tokens, p.n): buffer.new_empty(p.tokens, p.n) for p in gemms}
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    at = 0
    for p, size in zip(gemms, sizes, strict=True):
        at = 0 if at + size > length else at
        weight = buffer[at : at + size].view(p.n, p.k)
        calls.append((inputs[p.tokens, p.k], weight.t(), outputs[p.tokens, p.n]))
        at += size

    def run() -> None:
        for x, weight, out in calls:
            torch.mm(x, weight, out=out)

    return seconds_of(run, device)


@torch.inference_mode()
def seconds_of(
    work: Callable[[], object],
    device: torch.device,
    reduce: Callable[[Sequence[float]], float] = median,
) -> float:
    """Device time of `work` in seconds, on a GPU as one graph; `reduce`: over the repetitions."""
    if device.type != "cuda":
        return reduce(_host_seconds(work))
    with torch.cuda.device(device):  # where captures and events go
        return reduce(_graph_seconds(work, device))


def _graph_seconds(work: Callable[[], object], device: torch.device) -> list[float]:
    """On the current device, `device`."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # lazy initialisation must not land in the graph
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for turn in range(REPETITIONS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return times


def _host_seconds(work: Callable[[], object]) -> list[float]:
    work()
    times = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times
