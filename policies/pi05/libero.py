"""pi0.5 in LIBERO: the only place where the environment's pictures, state and actions meet the checkpoint's."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_eval.bundles import File, Part, Published
from vla_eval.engines.bench import Rehearsal
from vla_eval.engines.bundle import Bundle
from vla_eval.images import mirror
from vla_eval.types import ARM_ACTION, ARM_STATE, ActionChunk, BadRequest, ContractMismatch, Interface, Observation, Request, Vector

from ..flow import Stopwatch, draw_noise
from .contracts import CONFIGURATIONS, STATISTICS
from .policy import Pi05Policy, open_policy
from .processor import TOKENIZER, TOKENIZER_PLACES
from .runtime import Inputs

SIDE = 256  # pixels, as openpi's client renders; the processor takes any size
CAMERAS = {"observation/image": "agentview", "observation/wrist_image": "robot0_eye_in_hand"}  # the request's key -> the environment's
LIBERO = CONFIGURATIONS["pi05_libero"]
PUBLISHED_SUITES = LIBERO.trained_for
# What is published: the mirror's two files by how their SHA-256 begin, openpi's statistics and the tokenizer by all of it.
WEIGHTS = Part(
    "checkpoint", "lerobot/pi05_libero_base", files=("*.json", "*.safetensors", "*.model"), needed=("config.json", "model.safetensors"),
    digests={"config.json": "4d59e79adda2b1467e00f4c76390d95bfe05e9f1eff5f4da08aa493d6fe08651", "model.safetensors": "21b87117"},
)  # fmt: skip
_BUCKETS = "https://storage.googleapis.com"


class Pi05Libero:
    """A harness policy around a pi0.5 bundle. `model` is the robot-facing policy underneath."""

    name = "pi05"

    def __init__(self, model: Pi05Policy, side: int = SIDE) -> None:
        self.model = model
        cameras = dict.fromkeys(CAMERAS.values(), (side, side))
        self._needs = Interface(cameras=cameras, state=ARM_STATE, action=ARM_ACTION, control_hz=20.0)
        self.horizon = model.configuration.horizon

    @property
    def needs(self) -> Interface:
        """Raises ContractMismatch for a bundle of another robot: it can be asked by `infer`, not played in these suites."""
        if self.model.configuration.adapter != "libero":
            raise ContractMismatch(
                f"the bundle drives {self.model.configuration.name!r}, no LIBERO arm; ask it with `vla-eval infer`, "
                "or export with --policy-config pi05_libero"
            )
        return self._needs

    @property
    def engines(self) -> Mapping[str, Mapping[str, str]]:
        """What runs each component, for manifests; with the action's, the statistics that no identity covers."""
        about = self.model.runtime.about
        return {**about, "action": {**about["action"], "norm_stats_sha256": self.model.statistics.sha256}}

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        """[10, 7] environment actions for each request. The noise is the request's seed's, so batch mates change nothing."""
        runtime, watch = self.model.runtime, Stopwatch()
        with watch.stage("pack"):
            rows = [self.model.row(to_robot(request.observation)) for request in batch]
            starts = [draw_noise(request.seed, runtime.horizon, runtime.width) for request in batch]
        answers = runtime([Inputs(row.pixels, row.token_ids, start) for row, start in zip(rows, starts, strict=True)])
        chunks = []
        for row, answer in zip(rows, answers, strict=True):
            began = time.perf_counter()
            actions = self.model.actions(answer.chunk, row.state).astype(np.float32)  # the environment's own: −1 opens, +1 closes
            chunks.append(ActionChunk(actions, {**watch.seconds, **answer.seconds, "unpack": time.perf_counter() - began}))
        return chunks

    def infer(self, request: Mapping[str, Any], *, noise: Vector | None = None, seed: int = 0) -> dict[str, NDArray[Any]]:
        """As `Pi05Policy.infer`: the robot's own keys in, robot units out; no camera is turned."""
        return self.model.infer(request, noise=noise, seed=seed)

    def infer_canonical(self, folder: Path) -> dict[str, NDArray[Any]]:
        """As `Pi05Policy.infer_canonical`."""
        return self.model.infer_canonical(folder)

    def reproduce(self, pixel_file: Path, token_file: Path, start_file: Path, chunk_file: Path) -> tuple[Vector, Vector]:
        """As `Pi05Policy.reproduce`."""
        return self.model.reproduce(pixel_file, token_file, start_file, chunk_file)

    def rehearse(self, words: str) -> Rehearsal:
        """As `Pi05Policy.rehearse`: a full batch of the robot's own requests, for timing."""
        return self.model.rehearse(words)


def load(
    bundle: str | Path | Bundle | None = None,
    *,
    backend: str = "auto",
    steps: int | None = None,
    kernels: str = "auto",
    side: int = SIDE,
    asset: str | None = None,
) -> Pi05Libero:
    """The policy of a bundle. `steps` of the flow (10), `side` of the pictures in pixels (256), `asset` picks a set of statistics.

    `kernels` is what answers on a GPU: "yes" our kernels, "no" TensorRT's plans, "auto" kernels where they can.

    Raises BadRequest without a bundle.
    """
    if bundle is None:
        raise BadRequest(
            "policy 'pi05' needs a bundle: `vla-eval bundles` lists those found here; "
            "`vla-eval export --model pi05 --checkpoint DIR --out BUNDLE` makes one, and `--bundle BUNDLE` names it"
        )
    for name, value in (("steps", steps), ("side", side)):
        if value is not None and (type(value) is not int or value < 1):
            raise BadRequest(f"option {name} is {value!r}; it must be a whole number from 1")
    if asset is not None and not isinstance(asset, str):
        raise BadRequest(f"option asset is {asset!r}; it must be the name of a folder below assets/")
    return Pi05Libero(open_policy(bundle, backend=backend, steps=steps, kernels=kernels, asset=asset), side)


def published(suite: str) -> Published | None:
    """LeRobot's mirror of openpi's LIBERO weights, and what the mirror lacks: openpi's statistics, and the tokenizer that openpi loads."""
    if suite not in PUBLISHED_SUITES:
        return None
    statistics = _in_bucket(
        "norm_stats", f"openpi-assets/checkpoints/{LIBERO.name}/assets/{LIBERO.asset_id}/{STATISTICS}", 1_914,
        "b3a44bb2810436fb62917decaea58bd4d9110255df527dea21e8fd40c960bd84", of_checkpoint=True, beside=(f"assets/**/{STATISTICS}",),
    )  # fmt: skip
    tokenizer = _in_bucket(
        "tokenizer", f"big_vision/{TOKENIZER}", 4_264_023, "8986bb4f423f07f8c7f70d0dbe3526fb2316056c17bae71b1ea975e77a168fc6",
        hub=("google/paligemma-3b-pt-224", "tokenizer.model"), beside=TOKENIZER_PLACES,
    )  # fmt: skip
    return Published((WEIGHTS, statistics, tokenizer), {"policy_config": LIBERO.name})


def _in_bucket(option: str, name: str, size: int, sha256: str, **more: Any) -> File:
    """A file of one of openpi's buckets; openpi keeps its own copies under the same name."""
    kept = Path(os.environ.get("OPENPI_DATA_HOME", "~/.cache/openpi")).expanduser() / name
    return File(option, f"{_BUCKETS}/{name}", size, sha256, copies=(kept,), **more)


def to_robot(observation: Observation) -> dict[str, Any]:
    """The environment's observation as openpi's LIBERO client sends it.

    Pictures come upright and leave mirrored: training saw the renderer's picture turned by 180°, and the renderer's first row is the
    bottom one, so a left-right mirror of the upright picture is the same.
    """
    state = observation["state"]
    return {
        **{theirs: mirror(observation["images"][ours]) for theirs, ours in CAMERAS.items()},
        "observation/state": np.concatenate([state["eef_pos"], state["eef_rot"], state["gripper"]]),
        "prompt": observation["instruction"],
    }
