"""The host's work for a request of two 256 × 256 views, on one core: where a card packs the pictures, and where the host does it.

    python benchmarks/host.py [--rounds 300] [--out docs/host.json]

For both models and in one run, the sides taking turns; what the card would make of its bytes must be what the host packs. No engine runs.
`mirror` is LIBERO's adapter, the others are the stages of a request. The ratio is what carries from one machine to another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM"):  # before numpy and tokenizers load
    os.environ[name] = "1"

import cv2  # noqa: E402
import numpy as np  # noqa: E402

from vla_eval.engines import kernels  # noqa: E402
from vla_eval.images import mirror  # noqa: E402
from vla_eval.policies import sight  # noqa: E402
from vla_eval.policies.gr00t import processor as gr00t  # noqa: E402
from vla_eval.policies.gr00t.contract import from_checkpoint, parse  # noqa: E402
from vla_eval.policies.gr00t.policy import Gr00tPolicy  # noqa: E402
from vla_eval.policies.on_card import Kept  # noqa: E402
from vla_eval.policies.pi05 import processor as pi05  # noqa: E402
from vla_eval.policies.pi05.adapters import specimen  # noqa: E402
from vla_eval.policies.pi05.configuration import RELEASED  # noqa: E402
from vla_eval.policies.pi05.contracts import CONFIGURATIONS, find_statistics, read_statistics  # noqa: E402
from vla_eval.policies.pi05.policy import Pi05Policy  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "tests/golden"
WORDS = "put both moka pots on the stove"
SIDES = ("host", "card")
DTYPE = "float16"


class Stages(NamedTuple):
    """What the host does for a request, step by step; each takes what the one before gave."""

    pack: Callable[[], Any]
    fill: Callable[[Any], None]
    unpack: Callable[[], Any]


class NoCard:
    """Host memory where a card's would be."""

    def pinned(self, shape: Any, dtype: str) -> Any:
        return np.zeros(shape, dtype)

    empty = pinned

    def load(self, array: Any) -> Any:
        return array


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=300)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/host.json")
    asked = arguments.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cv2.setNumThreads(1)
    picture = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    result = {
        "what": "host work for one request, two views, one core; CPU milliseconds",
        "machine": f"{platform.machine()}, {processor_name()}",
        "python": platform.python_version(),
        "opencv": cv2.__version__,
        "rounds": asked.rounds,
        "mirror_ms": in_turn({"": lambda: [mirror(picture), mirror(picture)]}, asked.rounds)[""],
        "gr00t": measured({side: gr00t_side(side == "card") for side in SIDES}, asked.rounds),
        "pi05": measured({side: pi05_side(side == "card") for side in SIDES}, asked.rounds),
    }
    print(json.dumps(result, indent=1))
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


def measured(sides: dict[str, Stages], rounds: int) -> dict[str, Any]:
    """Every stage on both sides, and what the card's sum is of the host's."""
    found: dict[str, Any] = {side: {} for side in sides}
    for stage in Stages._fields:
        turns: dict[str, Callable[[], Any]] = {}
        for side, stages in sides.items():
            packed = stages.pack()
            turns[side] = (lambda fill=stages.fill, packed=packed: fill(packed)) if stage == "fill" else getattr(stages, stage)
        for side, taken in in_turn(turns, rounds).items():
            found[side][f"{stage}_ms"] = taken
    sums = {side: sum(taken["median"] for taken in stages.values()) for side, stages in found.items()}
    return {
        **found,
        "sum_ms": {side: round(taken, 3) for side, taken in sums.items()},
        "host_over_card": round(sums["host"] / sums["card"], 1),
    }


def gr00t_side(on_card: bool) -> Stages:
    """GR00T in LIBERO with the tiny checkpoint's statistics and tokenizer."""
    folder = GOLDEN / "gr00t_tiny/checkpoint"
    contract = parse(from_checkpoint(folder, "libero_sim"), "tiny")
    tokens = gr00t.Tokens(folder / "tokenizer", contract.prompt, 64)
    layout = gr00t.Layout(128, 5e6, (24, 20, 20), 64, 1e4, 2304, tokens.image_token)  # the released model's
    runtime = SimpleNamespace(horizon=40, width=132, state_width=132, layout=layout, on_card=on_card)
    policy = Gr00tPolicy(contract, tokens, cast(Any, runtime))
    rng = np.random.default_rng(0)
    observation = {
        **{f"video.{camera}": rng.integers(0, 256, (1, 1, 256, 256, 3), np.uint8) for camera in contract.cameras},
        **{f"state.{group.key}": rng.random((1, 1, group.dim)).astype(np.float32) for group in contract.state},
        contract.language_key: WORDS,
    }
    chunk = rng.standard_normal((1, 40, 132), np.float32)
    how, by = gr00t.reading((256, 256)), sight.area((243, 243), (256, 256))
    into = entrance(on_card, (512, gr00t.VALUES), (243, 243), by, how)

    def pack() -> Any:
        (row,) = policy.rows(observation)
        return row[0], policy._starts(None, 7, 1)

    check(pack()[0], how, by, gr00t.pack([gr00t.see(observation[f"video.{c}"][0, 0], contract.pictures) for c in contract.cameras]))
    return Stages(pack, lambda packed: into.fill(0, packed[0]), lambda: gr00t.decode_chunk(contract, chunk))


def pi05_side(on_card: bool) -> Stages:
    """pi0.5 in LIBERO with the tiny checkpoint's statistics and tokenizer."""
    configuration = CONFIGURATIONS["pi05_libero"]
    assets = read_statistics(find_statistics(GOLDEN / "pi05_tiny/pi05_libero/checkpoint", "", None), configuration)
    runtime = SimpleNamespace(horizon=10, width=32, geometry=RELEASED, on_card=on_card)
    policy = Pi05Policy(configuration, assets, pi05.Tokens(GOLDEN / "pi05_tiny/paligemma_tokenizer.model"), cast(Any, runtime))
    rng, side = np.random.default_rng(0), RELEASED.vision.image
    request = specimen(policy._adapter, configuration, rng, WORDS)
    chunk, state = rng.standard_normal((10, 32), np.float32), policy.row(request).state
    how, by = pi05.reading(side), sight.bordered((256, 256), side)
    into = entrance(on_card, (2, 3, side, side), (256, 256), by, how)

    def pack() -> Any:
        return policy.row(request).pixels, policy._start(None, 7)

    pictures = [value for value in request.values() if isinstance(value, np.ndarray) and value.ndim == 3]
    check(pack()[0], how, by, pi05.pixels(pictures, side))
    return Stages(pack, lambda packed: into.fill(0, packed[0]), lambda: policy.actions(chunk, state))


def entrance(on_card: bool, shape: tuple[int, ...], size: sight.Size, by: kernels.Stretch | None, how: sight.Reading) -> Any:
    """What stands before the vision engine, in host memory."""
    kept = Kept(cast(Any, NoCard()))
    return sight.FromBytes(kept, shape, DTYPE, 2, size, by, how) if on_card else sight.FromNumbers(kept, shape, DTYPE)


def check(packed: Any, how: sight.Reading, by: kernels.Stretch | None, wanted: Any) -> None:
    """Hold what a card would make of the bytes against what the host packs."""
    assert by is not None
    if isinstance(packed, sight.Pictures):
        packed = kernels.look_up(kernels.stretch(np.stack(packed.views), by), how.order, how.numbers).reshape(wanted.shape)
    np.testing.assert_array_equal(packed, wanted)


def in_turn(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Least, median and 99th percentile of CPU milliseconds, the sides alternating: a busy machine slows both, waiting counts for none."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 20):
        for name, side in sides.items():
            began = time.thread_time()
            side()
            if round_ >= 20:
                times[name].append(1e3 * (time.thread_time() - began))
    return {
        name: {
            q: round(value, 4)
            for q, value in (("least", min(found)), ("median", statistics.median(found)), ("p99", np.percentile(found, 99)))
        }
        for name, found in times.items()
    }


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown processor"
    )


if __name__ == "__main__":
    main()
