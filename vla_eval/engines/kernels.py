"""The few CUDA kernels of our own, compiled by NVRTC when a card is opened, each with the same arithmetic in numpy beside it.

N rows, W 16-byte words in a row; V pictures of H rows and W columns, K pixels that a stretched one is made of.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..types import Vector, VlaEvalError

_log = logging.getLogger(__name__)
_DIGEST = 32  # bytes of a SHA-256
_COMPILING = ThreadPoolExecutor(4, "compiling")  # seconds each; NVRTC lets other threads run meanwhile
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

// Pictures x [V, tall, wide, 3] to y [V, rows, columns, 3], in whole numbers, first across, then down: OpenCV's with weights of 2^-11,
// Pillow's with weights of 2^-22, rounded to bytes in between. `down` [rows, k] and `across` [columns, l] say which lines and columns.
struct Byte { int channel, column, row, view; };
__device__ Byte byte_of(int i, int rows, int columns) { return {i % 3, i / 3 % columns, i / 3 / columns % rows, i / 3 / columns / rows}; }

extern "C" __global__ void stretch_area(
    const unsigned char* x, unsigned char* y, const int* down, const int* down_weight, const int* across, const int* across_weight,
    int tall, int wide, int rows, int columns, int k, int l, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Byte b = byte_of(i, rows, columns);
    x += (long long)b.view * tall * wide * 3 + b.channel;
    int sum = 2;
    for (int r = b.row * k; r < (b.row + 1) * k; r++) {
        int line = 0;
        for (int c = b.column * l; c < (b.column + 1) * l; c++) line += across_weight[c] * x[(down[r] * wide + across[c]) * 3];
        sum += down_weight[r] * (line >> 4) >> 16;
    }
    y[i] = sum >> 2;
}
extern "C" __global__ void stretch_antialiased(
    const unsigned char* x, unsigned char* y, const int* down, const int* down_weight, const int* across, const int* across_weight,
    int tall, int wide, int rows, int columns, int k, int l, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Byte b = byte_of(i, rows, columns);
    x += (long long)b.view * tall * wide * 3 + b.channel;
    int sum = 1 << 21;
    for (int r = b.row * k; r < (b.row + 1) * k; r++) {
        int line = 1 << 21;
        for (int c = b.column * l; c < (b.column + 1) * l; c++) line += across_weight[c] * x[(down[r] * wide + across[c]) * 3];
        sum += down_weight[r] * (line >> 22);
    }
    y[i] = sum >> 22;
}

// Bytes of pictures as numbers out of a table of 256, in the order that an engine wants: no arithmetic, so numpy's own numbers.
template <typename T>
__device__ void looked_up(const unsigned char* x, const int* order, const T* table, T* y, int bytes, int numbers, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = table[x[(long long)(i / numbers) * bytes + order[i % numbers]]];
}
extern "C" __global__ void look_up_2(
    const unsigned char* x, const int* order, const unsigned short* table, unsigned short* y, int bytes, int numbers, int n) {
    looked_up(x, order, table, y, bytes, numbers, n);
}
extern "C" __global__ void look_up_4(
    const unsigned char* x, const int* order, const unsigned int* table, unsigned int* y, int bytes, int numbers, int n) {
    looked_up(x, order, table, y, bytes, numbers, n);
}
"""
STRETCHES = ("stretch_area", "stretch_antialiased")
NAMES = ("euler", "place", "to_float16", "to_bfloat16", *STRETCHES, "look_up_2", "look_up_4")


class Taps(NamedTuple):
    """Which pixels of a line, or which lines, each new one is made of, and their whole-number weights."""

    at: NDArray[np.int32]  # [N, K]
    weight: NDArray[np.int32]  # [N, K]


class Stretch(NamedTuple):
    """How pictures of one size become another, by one of `STRETCHES`."""

    how: str
    down: Taps
    across: Taps


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


def stretch(pictures: NDArray[np.uint8], by: Stretch) -> NDArray[np.uint8]:
    """[V, H, W, 3] -> [V, rows, columns, 3]: `stretch_area` and `stretch_antialiased` in numpy."""
    lines = np.einsum("vhckx,ck->vhcx", pictures[:, :, by.across.at], by.across.weight, dtype=np.int32, casting="unsafe")
    if by.how == "stretch_area":
        parts = by.down.weight[..., None, None] * (lines[:, by.down.at] >> 4) >> 16
        enlarged: NDArray[np.uint8] = (parts.sum(2) + 2 >> 2).astype(np.uint8)
        return enlarged
    half = np.int32(1 << 21)
    sums = np.einsum("vrkcx,rk->vrcx", (lines + half >> 22)[:, by.down.at], by.down.weight, dtype=np.int32)
    smoothed: NDArray[np.uint8] = (sums + half >> 22).astype(np.uint8)
    return smoothed


def look_up(pictures: NDArray[np.uint8], order: NDArray[np.int32], table: Vector) -> Vector:
    """[V, numbers]: of each picture the byte at `order` as `table` has it: `look_up_2` and `look_up_4` in numpy."""
    found: Vector = table[pictures.reshape(len(pictures), -1)[:, order]]
    return found


def source_of(name: str) -> str:
    """A source file of this package, behind what all of them share."""
    here = Path(__file__).parent
    return "".join((here / file).read_text(encoding="utf-8") for file in ("device.cu", name))


def compiling(source: str, sm: str, *options: str) -> Future[bytes]:
    """As `compiled`, in a thread from now on."""
    return _COMPILING.submit(compiled, source, sm, *options)


def compiled(source: str, sm: str, *options: str) -> bytes:
    """CUDA source as machine code for a card such as "sm90", compiled once: the user's cache keeps it, by all that it depends on.

    Raises VlaEvalError with the compiler's words.
    """
    from cuda.bindings import nvrtc
    from platformdirs import user_cache_path

    _, *version = nvrtc.nvrtcVersion()
    key = hashlib.sha256(json.dumps([version, sm, options, source]).encode()).hexdigest()
    file = user_cache_path("vla-eval") / "kernels" / f"{key[:32]}.cubin"
    code = _kept(file)
    if code is None:
        code = _compiled(source, sm, *options)
        _keep(file, code)
    return code


def _kept(file: Path) -> bytes | None:
    """Code that was kept: its digest stands before it and is checked before anybody loads it."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    digest, code = whole[:_DIGEST], whole[_DIGEST:]
    if hashlib.sha256(code).digest() == digest:
        return code
    _log.warning("%s is damaged; the kernels are compiled again", file)
    return None


def _keep(file: Path, code: bytes) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(code).digest() + code)
        temporary.replace(file)
    except OSError as error:
        _log.info("%s cannot be written (%s); the next start compiles again", file, error)


def _compiled(source: str, sm: str, *options: str) -> bytes:
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
