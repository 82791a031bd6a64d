"""What flow-matching policies share: noise from seeds, full batches of rows that fit together, the loop x ← x + dt·v, stage times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.engine import Tensor, to_host


def draw_noise(seed: int, horizon: int, width: int) -> NDArray[np.float32]:
    """[T, A] normal numbers: the start of the flow. Always the model's full size, since padded numbers take part in the valid ones."""
    return np.random.default_rng(seed).standard_normal((horizon, width), np.float32)


def integrate(
    velocity: Callable[[int, NDArray[np.float32]], Tensor], start: NDArray[np.float32], steps: int, dt: float
) -> NDArray[np.float32]:
    """Euler: `steps` times x ← x + dt·velocity(step, x), in float32 whatever the engine's precision is."""
    x = start.astype(np.float32, copy=True)
    for step in range(steps):
        x += np.float32(dt) * to_host(velocity(step, x)).astype(np.float32, copy=False)
    return x


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that go through the engines together."""

    rows: tuple[int, ...]  # exactly the engine's batch; beyond `real` copies of the last real row
    real: int


def full_batches(kinds: Sequence[Hashable], size: int) -> list[Batch]:
    """Rows of one kind together, in order, each batch filled to `size`: another batch size might round differently."""
    by_kind: dict[Hashable, list[int]] = {}
    for row, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(row)
    batches = []
    for rows in by_kind.values():
        for start in range(0, len(rows), size):
            real = rows[start : start + size]
            batches.append(Batch((*real, *[real[-1]] * (size - len(real))), len(real)))
    return batches


@dataclass
class Stopwatch:
    """Wall seconds by stage; a stage entered twice adds up."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
