"""Compiles kernels ahead of time for targets this machine does not have, and reads the result.

`python -m tests.kernels.compiled FAMILY` compiles the cases of `cases_FAMILY.py` (a list `CASES`)
for their targets and prints the facts as JSON lines. It runs in a process of its own because the
tests' process may have imported Triton to interpret.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.kernels.runtime.jit import LazyKernel

CUDA, HIP = ("sm_80", "sm_90", "sm_100"), ("gfx942", "gfx950", "gfx1100")
TARGETS = CUDA + HIP
SHARED_LIMIT = {  # bytes a program may have
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "gfx1100": 64 << 10,
}


@dataclass(frozen=True)
class Case:
    """One kernel at one set of constants."""

    name: str
    kernel: LazyKernel
    signature: Mapping[str, str]  # argument -> "*bf16", "*i32", "i32", "fp32"; not the constants
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages
    hip_constants: Mapping[str, Any] = field(default_factory=dict)  # override `constants`
    hip_options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = TARGETS
    multiples: tuple[str, ...] = ()  # integer arguments that are multiples of 16
    matrix: bool = False  # must use the matrix units
    wide: bool = True  # must read global memory 16 bytes a thread
    spill_bytes: int = 0  # local memory tolerated


@dataclass(frozen=True)
class Facts:
    case: str
    target: str
    matrix: bool
    wide: bool
    shared: int
    spill: int


def compile_case(case: Case, target: str) -> Facts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hip = target.startswith("gfx")
    wave = 64 if target.startswith("gfx9") else 32
    gpu = GPUTarget("hip", target, wave) if hip else GPUTarget("cuda", int(target[3:]), 32)
    constants = {**case.constants, **(case.hip_constants if hip else {})}
    kernel = case.kernel.load()
    signature = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    missing = [n for n, kind in signature.items() if kind == "constexpr" and n not in constants]
    assert not missing, f"{case.name}: neither signature nor constants have {missing}"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in case.multiples
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {**case.options, **(case.hip_options if hip else {})}
    built = triton.compile(source, target=gpu, options=options)
    text = built.asm["amdgcn" if hip else "ptx"]
    read = _read_hip if hip else _read_cuda
    matrix, wide, spill = read(text, built)
    return Facts(case.name, target, matrix, wide, built.metadata.shared, spill)


def _read_cuda(ptx: str, built: Any) -> tuple[bool, bool, int]:
    matrix = re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)
    wide = re.search(r"ld\.global[\w.:]*\.v4\.(b|u|f)32|ld\.global[\w.:]*\.v8\.b32", ptx)
    wide = wide or re.search(r"ld\.global[\w.:]*\.v2\.(b|u|f)64", ptx)
    wide = wide or re.search(
        r"cp\.async\.c[ag]\.shared\.global[\w.:]* *\[[^]]*\], *\[[^]]*\], *(16|0x10)", ptx
    )
    wide = wide or re.search(r"cp\.async\.bulk(?!\.prefetch)", ptx)
    usage = _cuobjdump(built.asm["cubin"])
    return bool(matrix), bool(wide), usage


def _cuobjdump(cubin: bytes) -> int:
    """Bytes of stack and local memory a thread uses."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", shown))


def _read_hip(text: str, built: Any) -> tuple[bool, bool, int]:
    matrix = re.search(r"\bv_(mfma|smfmac|wmma)_", text)
    wide = re.search(r"\b(global|buffer)_load_(dwordx4|b128)\b", text)
    spill = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    assert spill is not None
    return bool(matrix), bool(wide), int(spill[1])


def problems(case: Case, facts: Facts) -> list[str]:
    """What the produced assembly should have and has not."""
    where = f"{case.name} on {facts.target}:"
    found = []
    if case.matrix and not facts.matrix:
        found.append(f"{where} no matrix instruction")
    if case.wide and not facts.wide:
        found.append(f"{where} no 16-byte global load")
    if facts.spill > case.spill_bytes:
        found.append(f"{where} {facts.spill} bytes of local memory")
    if facts.shared > SHARED_LIMIT[facts.target]:
        found.append(f"{where} {facts.shared} bytes of shared memory")
    return found


def main(family: str, only: str = "") -> None:
    for case in importlib.import_module(f"tests.kernels.cases_{family}").CASES:
        for target in case.targets:
            if only and only not in (case.name, target):
                continue
            facts = compile_case(case, target)
            print(json.dumps(asdict(facts) | {"problems": problems(case, facts)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
