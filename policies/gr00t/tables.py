"""What of a denoise step depends on the time alone, evaluated once for each number of steps. L blocks, W wide."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.weights import Weights

from .configuration import FREQUENCIES, Architecture

Array = NDArray[np.float32]


def buckets(steps: int, total: int) -> list[int]:
    """The time of each denoise step as the network counts it: 0, 250, 500, 750 for four steps of a thousand."""
    return [int(step / steps * total) for step in range(steps)]


def adanorm_modulation(a: Architecture, w: Weights, steps: int) -> Array:
    """[steps, L + 1, 2 W]: the raw output of each block's AdaLayerNorm projection, and of `proj_out_1` in the last row.

    The blocks' halves are (scale, shift), the last row's (shift, scale); the graph splits them.
    """
    model = w.under("action_head.model")
    embedder = model.under("timestep_encoder.timestep_embedder")
    times = np.array(buckets(steps, a.buckets), np.float32)
    embedded = _linear(_silu(_linear(_cos_sin(times), embedder, "linear_1")), embedder, "linear_2")
    asked = _silu(embedded)
    rows = [_linear(asked, model, f"transformer_blocks.{i}.norm1.linear") for i in range(a.dit_layers)]
    return np.stack([*rows, _linear(asked, model, "proj_out_1")], axis=1)


def action_time_bias(a: Architecture, w: Weights, steps: int, slot: int) -> Array:
    """[steps, W]: what the action encoder's W2 makes of the time, its bias included: the action half needs no other."""
    encoder = w.under("action_head.action_encoder")
    lower = encoder["W2.W"].row(slot).rows(a.width, 2 * a.width)  # [W, W], in first
    waves = _sin_cos(np.array(buckets(steps, a.buckets), np.float32), a.width)
    return waves @ lower.floats() + encoder["W2.b"].row(slot).floats()


def _cos_sin(times: Array) -> Array:
    """[steps, 256]: cosines first, the last frequency 1e-4 exactly."""
    half = FREQUENCIES // 2
    phases = times[:, None] * np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(1e4) / (half - 1)))
    return np.concatenate([np.cos(phases), np.sin(phases)], axis=1)


def _sin_cos(times: Array, width: int) -> Array:
    """[steps, width]: sines first, the last frequency a step short of 1e-4."""
    half = width // 2
    phases = times[:, None] * np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(1e4) / half))
    return np.concatenate([np.sin(phases), np.cos(phases)], axis=1)


def _linear(x: Array, w: Weights, name: str) -> Array:
    return x @ w[f"{name}.weight"].floats().T + w[f"{name}.bias"].floats()


def _silu(x: Array) -> Array:
    activated: Array = x / (1 + np.exp(-x))
    return activated
