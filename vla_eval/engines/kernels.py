"""The few CUDA kernels of our own, compiled by NVRTC when a card is opened, each with the same arithmetic in numpy beside it.

N rows, W 16-byte words in a row.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..types import Vector, VlaEvalError

WORD = 16  # bytes that one thread moves at once: rows are multiples of it

SOURCE = r"""
// x += dt * v, rounded after the product and after the sum: no fused multiply-add, so that numpy gives the same bits.
extern "C" __global__ void euler(float* x, const float* v, float dt, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __fadd_rn(x[i], __fmul_rn(dt, v[i]));
}

// Row r of out: features[slot[r]] where a picture stands, else table[id[r]], or zeros without a table. One block a row.
extern "C" __global__ void place(const uint4* table, const long long* id, const uint4* features, const int* slot, uint4* out, int words) {
    long long row = blockIdx.x;
    int place = slot[row];
    const uint4* from = place >= 0 ? features + (long long)place * words : table ? table + id[row] * words : 0;
    for (int w = threadIdx.x; w < words; w += blockDim.x)
        out[row * words + w] = from ? from[w] : make_uint4(0, 0, 0, 0);
}

// float32 to half precision, to nearest even.
extern "C" __global__ void to_float16(const float* x, unsigned short* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y[i]) : "f"(x[i]));
}
extern "C" __global__ void to_bfloat16(const float* x, unsigned short* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y[i]) : "f"(x[i]));
}
"""
NAMES = ("euler", "place", "to_float16", "to_bfloat16")


def euler(x: NDArray[np.float32], v: NDArray[np.float32], dt: float) -> NDArray[np.float32]:
    """x + dt·v in float32: `euler` in numpy."""
    return x + np.float32(dt) * v


def place(table: Vector | None, ids: NDArray[np.int64], features: Vector, slots: NDArray[np.int32]) -> Vector:
    """[N, …]: features[slot] where slot is not negative, else table[id], or zeros without a table: `place` in numpy."""
    out: Vector = np.zeros((ids.size, *features.shape[1:]), features.dtype) if table is None else table[ids.ravel()]
    seen = slots.ravel() >= 0
    out[seen] = features[slots.ravel()[seen]]
    return out


def narrow(x: NDArray[np.float32], dtype: str) -> Vector:
    """float32 to "float16" or "bfloat16", to nearest even: `to_float16` and `to_bfloat16` in numpy."""
    with np.errstate(over="ignore"):  # beyond the range is infinity, as on the card
        narrowed: Vector = x.astype({"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype])
    return narrowed


def compiled(source: str, sm: str, *options: str) -> bytes:
    """CUDA source as machine code for a card such as "sm90". Raises VlaEvalError with the compiler's words."""
    from cuda.bindings import nvrtc

    def checked(answer: Any) -> Any:
        status, *rest = answer
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise VlaEvalError(f"NVRTC cannot compile the kernels for {sm}: {status.name}{_log_of(program)}")
        return rest[0] if rest else None

    program: Any = None
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    given = [option.encode() for option in (f"--gpu-architecture=sm_{sm.removeprefix('sm')}", *options)]
    checked(nvrtc.nvrtcCompileProgram(program, len(given), given))
    code: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _log_of(program: Any) -> str:
    from cuda.bindings import nvrtc

    if program is None:
        return ""
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    text: bytes = b" " * size
    nvrtc.nvrtcGetProgramLog(program, text)
    return ": " + text.decode(errors="replace").strip("\0 \n")
