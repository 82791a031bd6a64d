"""pi0.5 in LIBERO: the only place where the environment's pictures, state and actions meet the checkpoint's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.bench import Rehearsal
from vla_eval.engines.bundle import Bundle
from vla_eval.images import mirror
from vla_eval.types import ARM_ACTION, ARM_STATE, ActionChunk, BadRequest, ContractMismatch, Interface, Observation, Request, Vector

from ..flow import Stopwatch, draw_noise
from .policy import Pi05Policy, open_policy
from .runtime import Inputs

SIDE = 256  # pixels, as openpi's client renders; the processor takes any size
CAMERAS = {"observation/image": "agentview", "observation/wrist_image": "robot0_eye_in_hand"}  # the request's key -> the environment's


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
    side: int = SIDE,
    asset: str | None = None,
) -> Pi05Libero:
    """The policy of a bundle. `steps` of the flow (10), `side` of the pictures in pixels (256), `asset` picks a set of statistics.

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
    return Pi05Libero(open_policy(bundle, backend=backend, steps=steps, asset=asset), side)


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
