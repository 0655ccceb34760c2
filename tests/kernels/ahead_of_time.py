"""Compile exactly what an operation would launch, for an accelerator that is not here, and read the result.

`record` lets the real launch code run on meta tensors and notes each kernel with the types and
specialisations that Triton's launcher would derive from the arguments; `compile_for` builds that for a target
with the tools of Triton's wheel, and reads what Triton's own run of ptxas said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megalite.kernels import flat_triton, launch, rms_norm_triton
from megalite.kernels.adamw import FlatAdamW

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
REGISTERS = 65536  # of a multiprocessor

_ACCESS = re.compile(r"\b(?:ld|st)\.global(?:\.[a-zA-Z_][\w:]*)*?(?:\.v(\d))?\.[a-z](\d+)\b")

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
}


@dataclass(frozen=True)
class Launch:
    """A kernel with what Triton specialises it on, and over how many programs."""

    kernel: Any
    programs: int
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, Any]

    @property
    def code(self) -> str:
        """Equal for launches that compile to the same code, over however many programs."""
        function = self.kernel.fn
        specialised = (self.signature, self.constants, self.aligned, self.options)
        return f"{function.__module__}.{function.__name__} {specialised}"


@dataclass(frozen=True)
class Compiled:
    """One kernel's assembly, what it takes, and how it reaches global memory: bits of each access."""

    assembly: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    accesses: tuple[int, ...]
    fp64_instructions: int
    barriers: int

    @property
    def wide(self) -> int:
        """Accesses of at least 128 bits."""
        return sum(bits >= 128 for bits in self.accesses)

    @property
    def narrow(self) -> int:
        """Accesses of less than 128 bits: scalars, masks, or vectorisation that was lost."""
        return len(self.accesses) - self.wide


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rms_norm(
    hidden: int, dtype: torch.dtype, residual: torch.dtype | None, backward: bool
) -> Callable[[], object]:
    """Forward or backward over 4096 rows."""
    x, weight, rstd = (
        meta(4096, hidden, dtype=dtype),
        meta(hidden, dtype=dtype),
        meta(4096, dtype=torch.float32),
    )
    other = None if residual is None else meta(4096, hidden, dtype=residual)
    if backward:
        source = x if other is None else other
        return lambda: rms_norm_triton.backward(x, other, source, weight, rstd, 0.0)
    return lambda: rms_norm_triton.forward(x, other, weight, 1e-5, 0.0)


def adamw(
    elements: int, weights: torch.dtype, beside: torch.dtype | None, *state: torch.dtype
) -> Callable[[], object]:
    """A step. `beside`: fp32 for a master, int16 for a remainder; `state`: dtypes of gradient and moments."""
    flat_weights, grads, exp_avg, exp_avg_sq = (meta(elements, dtype=dtype) for dtype in (weights, *state))
    other = None if beside is None else meta(elements, dtype=beside)
    master, remainder = (None, other) if beside == torch.int16 else (other, None)
    flat = FlatAdamW(flat_weights, grads, exp_avg, exp_avg_sq, master, remainder)
    return partial(flat_triton.adamw, flat, meta(5, dtype=torch.float32), 0.9, 0.95, 1e-8, 0.1, [(0, 4096)])


def describe(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]
) -> Launch:
    """Types as Triton's launcher specialises them: ones and None constant, multiples of 16 known as such."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[str] = []
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0 and value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
        elif type(value) is int:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(name)
        else:
            signature[name] = "fp32"
    return Launch(kernel, prod(grid), signature, constants, tuple(aligned), options)


def record(operation: Callable[[], object]) -> list[Launch]:
    """What `operation` would launch; its tensors may be on the meta device."""
    launches: list[Launch] = []

    def note(
        kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], device: torch.device, **options: Any
    ) -> None:
        launches.append(describe(kernel, grid, arguments, options))

    original = launch.run
    launch.run = note
    try:
        operation()
    finally:
        launch.run = original
    return launches


def compile_for(target: str, what: Launch) -> Compiled:
    """Compile `what` for `target`; read registers, spills, shared memory, global accesses from the result."""
    place = what.kernel.arg_names.index
    source = ASTSource(
        what.kernel,
        what.signature,
        constexprs={(place(name),): value for name, value in what.constants.items()},
        attrs={(place(name),): [["tt.divisibility", 16]] for name in what.aligned},
    )
    options = {**what.options, "enable_fp_fusion": True}
    with redirect_stdout(StringIO()) as log, knobs.nvidia.scope(), knobs.compilation.scope():
        # What comes from Triton's cache has no log.
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        built = triton.compile(source, target=TARGETS[target], options=options)
    return _read_amd(built) if target.startswith("gfx") else _read_nvidia(built, log.getvalue())


def bytes_moved(what: Launch, built: Compiled, trips: int = 1, guarded: bool = True) -> dict[str, int]:
    """Bytes that the compiled code reads and writes through each pointer, by the argument's name.

    Accesses of 16 bytes or more a thread, which carry the tiles, times threads, programs, and in the body of
    a loop `trips`. What a branch can skip is counted only if `guarded`. For an NVIDIA target, and for shapes
    whose last tile is full: masks are not looked at.
    """
    names = [name for name in what.kernel.arg_names if what.signature[name] != "constexpr"]
    lines = [line.split("//")[0].strip() for line in built.assembly.splitlines()]
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
    loops, skipped = _regions(lines, labels)
    came_from: dict[str, set[str]] = {}  # register -> arguments that its address was made of
    moved: dict[str, int] = {}
    for number, line in enumerate(lines):
        if parameter := re.match(r"ld\.param\.b64\s+(%rd\d+), \[\w+_param_(\d+)\]", line):
            came_from[parameter[1]] = {names[int(parameter[2])]} if int(parameter[2]) < len(names) else set()
        elif access := _ACCESS.search(line):
            bits = int(access[1] or 1) * int(access[2])
            inside = any(number in loop for loop in loops)
            if bits < 128 or (not guarded and not inside and any(number in one for one in skipped)):
                continue
            (address,) = re.findall(r"\[ (%rd\d+)", line)
            (name,) = {one for one in came_from.get(address, set()) if what.signature[one].startswith("*")}
            times = trips if inside else 1
            moved[name] = moved.get(name, 0) + bits // 8 * built.threads * what.programs * times
        elif made := re.match(r"(?:@!?%p\d+ )?[\w.]+\s+(%rd\d+), (.*);", line):
            sources = [came_from.get(source, set()) for source in re.findall(r"%rd\d+", made[2])]
            came_from[made[1]] = came_from.get(made[1], set()).union(*sources)
    return moved


def _regions(lines: list[str], labels: dict[str, int]) -> tuple[list[range], list[range]]:
    """Lines of each loop's body, and lines that a branch forward jumps over."""
    loops: list[range] = []
    skipped: list[range] = []
    for number, line in enumerate(lines):
        if jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line):
            target = labels[jump[1]]
            (loops if target < number else skipped).append(range(min(target, number), max(target, number)))
    return loops, skipped


def _read_nvidia(built: Any, log: str) -> Compiled:
    ptx = built.asm["ptx"]
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas printed no resource usage:\n{log}")
    accesses = _ACCESS.findall(ptx)
    return Compiled(
        assembly=ptx,
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=built.metadata.shared,
        threads=built.metadata.num_warps * 32,
        accesses=tuple(int(vector or 1) * int(bits) for vector, bits in accesses),
        fp64_instructions=len(re.findall(r"\.f64\b", ptx)),
        barriers=len(re.findall(r"\bbar\.sync", ptx)),
    )


def _read_amd(built: Any) -> Compiled:
    code = built.asm["amdgcn"]

    def value(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        if found is None:
            raise RuntimeError(f"the compiled code does not say {name}")
        return int(found[1])

    bits = {
        "dwordx4": 128,
        "dwordx3": 96,
        "dwordx2": 64,
        "dword": 32,
        "short": 16,
        "ushort": 16,
        "byte": 8,
        "ubyte": 8,
    }
    accesses = re.findall(
        r"\b(?:global|buffer)_(?:load|store)_(dwordx4|dwordx3|dwordx2|dword|u?short|u?byte)", code
    )
    return Compiled(
        assembly=code,
        registers=value("vgpr_count") + value("agpr_count"),
        spill_bytes=4 * value("vgpr_spill_count"),
        shared_bytes=built.metadata.shared,
        threads=built.metadata.num_warps * 64,
        accesses=tuple(bits[width] for width in accesses),
        fp64_instructions=len(re.findall(r"\bv_\w+_f64\b", code)),
        barriers=len(re.findall(r"\bs_barrier", code)),
    )
