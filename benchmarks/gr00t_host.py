"""GR00T's host work for one request, two 256×256 views, on one core: ours beside the same formulas written down plainly, in one run.

    python benchmarks/gr00t_host.py [--tokenizer DIR] [--out docs/gr00t_host.json]

Both sides must give the same arrays; then each is timed in turn. The ratio is what carries from one machine to another.
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
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM"):  # before numpy and tokenizers load
    os.environ[name] = "1"

import cv2  # noqa: E402
import numpy as np  # noqa: E402

from vla_eval.policies.gr00t import processor  # noqa: E402
from vla_eval.policies.gr00t.contract import from_checkpoint, parse  # noqa: E402

TINY = Path(__file__).parents[1] / "tests/golden/gr00t_tiny"
ROUNDS = 300


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--tokenizer", type=Path, default=TINY / "checkpoint/tokenizer")
    arguments.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/gr00t_host.json")
    asked = arguments.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cv2.setNumThreads(1)

    contract = parse(from_checkpoint(TINY / "checkpoint", "libero_sim", tokenizer=asked.tokenizer), "tiny")
    tokens = processor.Tokens(asked.tokenizer, contract.prompt, 64)
    layout = processor.Layout(128, 5e6, (24, 20, 20), 64, 1e4, 2304, tokens.image_token)  # the released model's tables
    rng = np.random.default_rng(0)
    views = [rng.integers(0, 256, (256, 256, 3), np.uint8) for _ in contract.cameras]
    state = {group.key: rng.random(group.dim).astype(np.float32) for group in contract.state}
    chunk = rng.standard_normal((40, 132), np.float32)
    text = "put both moka pots on the stove"

    patches = np.empty((len(views) * 256, processor.VALUES), np.float32)  # as the policy keeps it from request to request

    def ours() -> list[Any]:
        ids = tokens.ids(text)
        tables = processor.vision_tables(layout, len(views), (16, 16))
        return [
            processor.pack([processor.see(view, contract.pictures) for view in views], patches),
            ids,
            processor.prompt_rotary(layout, ids, (16, 16)),
            tables.rotary,
            processor.encode_state(contract, state),
            np.concatenate([*processor.decode_chunk(contract, chunk).values()], axis=-1),
        ]

    def plain() -> list[Any]:  # nothing remembered
        pixels = np.concatenate([plain_patches(view) for view in views])
        ids = tokens.ids.__wrapped__(text)
        places = processor.positions(ids, tokens.image_token, (16, 16))
        tables = processor.vision_tables.__wrapped__(layout, len(views), (16, 16))
        return [
            pixels,
            ids,
            processor.text_rotary(layout, places),
            tables.rotary,
            processor.encode_state(contract, state),
            np.concatenate([*processor.decode_chunk(contract, chunk).values()], axis=-1),
        ]

    for mine, theirs in zip(ours(), plain(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1.2e-7)  # (x/255 − 0.5)/0.5 rounds twice more than (x − 127.5)/127.5
    milliseconds = in_turn({"ours": ours, "plain": plain})
    result = {
        "what": "GR00T host work for one request, two views, one core",
        "machine": f"{platform.machine()}, {processor_name()}",
        "python": platform.python_version(),
        "opencv": cv2.__version__,
        "rounds": ROUNDS,
        "ours_ms": milliseconds["ours"],
        "plain_ms": milliseconds["plain"],
        "ratio": round(milliseconds["plain"]["median"] / milliseconds["ours"]["median"], 2),
        "parts_ms": {
            "pictures": in_turn({"": lambda: [processor.see(view, contract.pictures) for view in views]})[""]["median"],
            "packing": in_turn({"": lambda: processor.pack(views, patches)})[""]["median"],
            "state": in_turn({"": lambda: processor.encode_state(contract, state)})[""]["median"],
            "actions": in_turn({"": lambda: processor.decode_chunk(contract, chunk)})[""]["median"],
        },
    }
    print(json.dumps(result, indent=1))
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


def plain_patches(view: Any) -> Any:
    """Crop, enlarge, scale in two steps, cut into patches, repeat the frame: every array in full, one after another."""
    seen = cv2.resize(np.ascontiguousarray(view[6:249, 6:249]), (256, 256), interpolation=cv2.INTER_AREA)
    scaled = ((seen.astype(np.float32) / np.float32(255)) - np.float32(0.5)) / np.float32(0.5)
    frames = np.repeat(scaled.transpose(2, 0, 1)[None], 2, axis=0)  # [2, 3, 256, 256]
    grid = frames.reshape(1, 2, 3, 8, 2, 16, 8, 2, 16).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return grid.reshape(256, 1536)


def in_turn(sides: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Median and 99th percentile of CPU milliseconds, the sides alternating: a busy machine slows both, and waiting does not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(ROUNDS + 20):
        for name, side in sides.items():
            began = time.thread_time()
            side()
            if round_ >= 20:
                times[name].append(1e3 * (time.thread_time() - began))
    return {
        name: {"median": round(statistics.median(found), 3), "p99": round(float(np.percentile(found, 99)), 3)}
        for name, found in times.items()
    }


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown processor"
    )


if __name__ == "__main__":
    main()
