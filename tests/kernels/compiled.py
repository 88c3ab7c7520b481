"""Compiles Triton kernels ahead of time for GPUs that are not present, and inspects the assembly.

`python -m tests.kernels.compiled FAMILY[:ONLY] ...` compiles the cases of `cases_FAMILY.py` (a list
`CASES`) for their targets, or only one case or target, and prints one JSON line per kernel and
target. It needs a process of its own: in the tests' process Triton may have been imported in
interpreter mode.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.kernels.runtime.gpu import GpuInfo
from forerun.kernels.runtime.jit import LazyKernel

CUDA, HIP = ("sm_80", "sm_90", "sm_100"), ("gfx942", "gfx950", "gfx1100")
TARGETS = CUDA + HIP
PDL_TARGETS = ("sm_90", "sm_100")  # where kernels are launched with PDL
RDNA = GpuInfo(96, amd=True)
GPUS = {  # targets that share their tiles
    "": (("sm_90",), GpuInfo(132, amd=False)),
    ", Blackwell": (("sm_100",), GpuInfo(148, amd=False, capability=100)),
    ", Ampere": (("sm_80",), GpuInfo(108, amd=False, capability=80, smem_bytes=163 << 10)),
    ", CDNA": (("gfx942", "gfx950"), GpuInfo(304, amd=True, warp_size=64)),
    ", RDNA": (("gfx1100",), RDNA),
}
SMEM_LIMIT = {  # bytes of shared memory (LDS) per CTA
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "gfx1100": 64 << 10,
}


@dataclass(frozen=True)
class Case:
    """A kernel with one set of constexpr values, and what its assembly must look like.

    A kernel that has the constexpr `PDL` is compiled with it where it is launched with it.
    """

    name: str
    kernel: LazyKernel
    signature: Mapping[str, str]  # argument -> "*bf16", "*i32", "i32", "fp32"; no constexprs
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages
    hip_constants: Mapping[str, Any] = field(default_factory=dict)  # overrides for AMD
    hip_options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = TARGETS
    multiples: tuple[str, ...] = ()  # integer arguments divisible by 16
    matrix: bool = False  # must use tensor cores (AMD: matrix cores)
    wide: bool = True  # must have 16-byte global loads
    spill_bytes: int = 0  # local memory allowed per thread
    chained: bool = False  # products of wgmma must not wait for each other one by one (sm_90)
    # Cases of the same word lay out alike what they add up, and so round alike; "": any way.
    alike: str = ""


def on_each(
    name: str, targets: tuple[str, ...], make: Callable[[str, tuple[str, ...], GpuInfo], Case]
) -> list[Case]:
    """The cases that `make` makes of the targets, one for all that share their tiles."""
    chosen = {k: (tuple(t for t in all_ if t in targets), gpu) for k, (all_, gpu) in GPUS.items()}
    return [make(name + suffix, ts, gpu) for suffix, (ts, gpu) in chosen.items() if ts]


@dataclass(frozen=True)
class Facts:
    """What the assembly of one case has; shared and local memory in bytes."""

    case: str
    target: str
    matrix: bool
    wide: bool
    shared: int
    spill: int
    serial: bool  # a wait follows every single wgmma
    layouts: list[str]  # of what is reduced in float32, if it must be `alike`


def compile_case(case: Case, target: str) -> Facts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hip = target.startswith("gfx")
    warp_size = 64 if target.startswith("gfx9") else 32
    gpu = GPUTarget("hip", target, warp_size) if hip else GPUTarget("cuda", int(target[3:]), 32)
    constants = {**case.constants, **(case.hip_constants if hip else {})}
    options = {**case.options, **(case.hip_options if hip else {})}
    kernel = case.kernel.load()
    if "PDL" in kernel.arg_names:
        constants["PDL"] = target in PDL_TARGETS
        options |= {"launch_pdl": True} if constants["PDL"] else {}
    signature = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    missing = [n for n, kind in signature.items() if kind == "constexpr" and n not in constants]
    assert not missing, f"{case.name}: {missing} are in neither signature nor constants"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in case.multiples
    }
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=gpu, options=options)
    text = built.asm["amdgcn" if hip else "ptx"]
    inspect = _inspect_hip if hip else _inspect_cuda
    matrix, wide, spill = inspect(text, built)
    layouts = _reduced_layouts(built.asm["ttgir"]) if case.alike else []
    serial = case.chained and target == "sm_90" and _is_serial(built.asm["cubin"])
    return Facts(case.name, target, matrix, wide, built.metadata.shared, spill, serial, layouts)


def _reduced_layouts(ttgir: str) -> list[str]:
    """Shapes and layouts of the float32 tensors that a kernel sums or takes the maximum of."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    reduced = re.findall(r'"tt\.reduce"\([\s\S]*?\}\) : \((tensor<[^>]*xf32[^>]*>)\)', ttgir)
    assert reduced, "nothing is reduced"
    return sorted({re.sub(r"#\w+", lambda name: layouts[name[0]], each) for each in reduced})


def _inspect_cuda(ptx: str, built: Any) -> tuple[bool, bool, int]:
    matrix = re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)
    wide = re.search(r"ld\.global[\w.:]*\.v4\.(b|u|f)32|ld\.global[\w.:]*\.v8\.b32", ptx)
    wide = wide or re.search(r"ld\.global[\w.:]*\.v2\.(b|u|f)64", ptx)
    wide = wide or re.search(
        r"cp\.async\.c[ag]\.shared\.global[\w.:]* *\[[^]]*\], *\[[^]]*\], *(16|0x10)", ptx
    )
    wide = wide or re.search(r"cp\.async\.bulk(?!\.prefetch)", ptx)
    return bool(matrix), bool(wide), _spill_bytes(built.asm["cubin"])


def _spill_bytes(cubin: bytes) -> int:
    """Bytes of stack and local memory per thread."""
    shown = _cuobjdump(cubin, "-res-usage")
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", shown))


def _is_serial(cubin: bytes) -> bool:
    """Whether ptxas has put a wait after every wgmma, as it does where one is missing."""
    shown = _cuobjdump(cubin, "-sass")
    return 0 < len(re.findall(r"\bHGMMA\.", shown)) <= shown.count("WARPGROUP.DEPBAR")


def _cuobjdump(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(tool), option, file.name], capture_output=True, text=True, check=True
        ).stdout


def _inspect_hip(text: str, built: Any) -> tuple[bool, bool, int]:
    matrix = re.search(r"\bv_(mfma|smfmac|wmma)_", text)
    wide = re.search(r"\b(global|buffer)_load_(dwordx4|b128)\b", text)
    spill = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    assert spill is not None
    return bool(matrix), bool(wide), int(spill[1])


def problems(case: Case, facts: Facts) -> list[str]:
    """Where the assembly does not meet the case's requirements."""
    where = f"{case.name} on {facts.target}:"
    found = []
    if case.matrix and not facts.matrix:
        found.append(f"{where} no tensor-core instruction")
    if case.wide and not facts.wide:
        found.append(f"{where} no 16-byte global load")
    if facts.spill > case.spill_bytes:
        found.append(f"{where} {facts.spill} bytes of local memory")
    if facts.serial:
        found.append(f"{where} every product of wgmma waits for the one before")
    if facts.shared > SMEM_LIMIT[facts.target]:
        found.append(
            f"{where} {facts.shared} bytes of shared memory, limit {SMEM_LIMIT[facts.target]}"
        )
    return found


def compile_family(family: str, cases: Sequence[Case], only: str) -> None:
    """`only`: a case or a target; empty: all."""
    for case in cases:
        for target in case.targets:
            if only and only not in (case.name, target):
                continue
            facts = compile_case(case, target)
            found = {"family": family, "alike": case.alike, **asdict(facts)}
            found["problems"] = problems(case, facts)
            print(json.dumps(found), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Imports all cases first: loading one kernel of a module replaces the others there too."""
    chosen = [argument.partition(":")[::2] for argument in arguments]
    modules = [importlib.import_module(f"tests.kernels.cases_{family}") for family, _ in chosen]
    for (family, only), module in zip(chosen, modules, strict=True):
        compile_family(family, module.CASES, only)


if __name__ == "__main__":
    main(sys.argv[1:])
