"""Where the seconds of a load go, on a GPU: hashing, reading, upload, compiling, deserialising, contexts, self-test, first requests.

    python benchmarks/gpu_load.py gr00t|pi05|BUNDLE [--kernels] [--plans] [--dtype fp16|bf16] [--times 3]
                                  [--size full|tiny] [--minutes 8] [--work DIR] [--out DIR]

`--kernels` exports the weights of our own kernels too; `--plans` then loads TensorRT's plans in their place all the same. A model's name
stands for a bundle of random weights, built directly and kept in --work. The first load of a bundle compiles what the caches then keep;
files are in the page cache from the second on. One JSON goes into --out, by default $OUT.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from _parts import Note, Parts, command_line
from _stages import followed
from gpu_models import OPTIONS, WORDS

from vla_eval import registry
from vla_eval.engines import trt
from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.engines.card import Card
from vla_eval.engines.trt_build import card_here

_PROBE = 1 << 28  # bytes that rates are measured on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--dtype", default="fp16", choices=["fp16", "bf16"])
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--plans", action="store_true")
    asked, work = command_line(parser)
    options = {"kernels": "no"} if asked.plans else {}
    flavour = trt.door()
    file = asked.out / f"load-{Path(asked.bundle).name}{'-kernels' if asked.kernels else ''}{'-plans' if asked.plans else ''}.json"
    about = {"command": " ".join(sys.argv), "tensorrt": f"{flavour.name} {flavour.version}", "sm": card_here(), "cores": os.cpu_count()}
    parts = Parts(file, minutes=asked.minutes, **about)
    parts("rates", rates)
    bundle = parts("bundle", lambda note: found(note, asked, work))
    if bundle is not None:
        for number in range(1, asked.times + 1):
            one_load(parts, f"load {number}", bundle, options)
            gc.collect()  # frees the card
    return parts.end()


def one_load(parts: Parts, name: str, bundle: Bundle, options: dict[str, str]) -> None:
    """A load and its first requests."""
    policy = parts(name, lambda note: loaded(note, bundle, options))
    if policy is not None:
        parts(f"{name}, requests", lambda note: requests(note, policy, bundle))


def found(note: Note, asked: argparse.Namespace, work: Path) -> Bundle:
    """The bundle that is named, or one of random weights."""
    if asked.bundle in WORDS:
        checkpoint, out = work / f"{asked.bundle}-{asked.size}", work / f"{asked.bundle}-{asked.size}-{asked.dtype}-load"
        if not checkpoint.exists():
            registry.load_synth(asked.bundle)(checkpoint, size=asked.size)
        tiny = {"geometry": checkpoint / "geometry.json"} if asked.size == "tiny" else {}
        kernels = {"kernels": True} if asked.kernels else {}
        registry.load_recipe(asked.bundle)(checkpoint, out, **OPTIONS[asked.bundle], **tiny, **kernels, dtype=asked.dtype, direct=True)
        asked.bundle = out
    bundle = open_bundle(asked.bundle)
    note.update(path=str(bundle.path), model=bundle.model, frontend=bundle.frontend, dtype=bundle.options["dtype"])
    return bundle


def loaded(note: Note, bundle: Bundle, options: dict[str, str]) -> Any:
    """The policy, loaded, and where the time went."""
    with followed() as stages:
        policy = registry.load_policy(bundle.model, bundle=bundle.path, backend="tensorrt", **options)
    note.update(stages.data())
    return policy


def requests(note: Note, policy: Any, bundle: Bundle) -> None:
    """The first ones: the second is captured, the third is replayed."""
    rehearsal = policy.rehearse(WORDS[bundle.model])
    for name in ("first", "second", "third"):
        began = time.perf_counter()
        stages = rehearsal.answer()
        note[name] = {"ms": round(1e3 * (time.perf_counter() - began), 2), **{k: round(1e3 * v, 2) for k, v in stages.items()}}


def rates(note: Note) -> None:
    """What this machine does in one thread, in GB/s: SHA-256, and copies to the card from plain and from page-locked memory."""
    data = np.random.default_rng(0).integers(0, 256, _PROBE, np.uint8).view(np.float32)
    card = Card()
    locked, there = card.pinned(data.shape, "float32"), card.empty(data.shape, "float32")
    locked[:] = data

    def copied(array: Any) -> None:
        card.upload(array, there)
        card.wait()

    works = {"sha256": lambda: hashlib.sha256(data).digest(), "upload": lambda: copied(data), "upload, page-locked": lambda: copied(locked)}
    for name, work in works.items():
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        note[name] = round(_PROBE / 1e9 / min(seconds), 2)
    card.close()


if __name__ == "__main__":
    raise SystemExit(main())
