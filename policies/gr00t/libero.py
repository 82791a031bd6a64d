"""GR00T in LIBERO: the only place where the environment's pictures, state and gripper meet the checkpoint's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_eval.bundles import Part, Published
from vla_eval.engines.bench import Rehearsal
from vla_eval.engines.bundle import Bundle
from vla_eval.images import mirror
from vla_eval.types import ARM_ACTION, ARM_STATE, ActionChunk, BadRequest, ContractMismatch, Interface, Observation, Request, Vector

from ..flow import Stopwatch, draw_noise
from .contract import TOKENIZER_FILES
from .policy import Gr00tPolicy, open_policy
from .processor import decode_chunk
from .runtime import Inputs

PUBLISHED_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
SIDE = 256  # pixels, as the training data were rendered; the processor takes any size
CAMERAS = {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}  # the checkpoint's name -> the environment's
STATE = {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2}
ACTION = {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 1}


class Gr00tLibero:
    """A harness policy around a GR00T bundle. `model` is the robot-facing policy underneath."""

    name = "gr00t"

    def __init__(self, model: Gr00tPolicy, side: int = SIDE) -> None:
        self.model = model
        cameras = dict.fromkeys(CAMERAS.values(), (side, side))
        self._needs = Interface(cameras=cameras, state=ARM_STATE, action=ARM_ACTION, control_hz=20.0)
        self.horizon = model.contract.horizon
        self._why_not = _misfit(model)

    @property
    def needs(self) -> Interface:
        """Raises ContractMismatch for a bundle of another robot: it can be asked by `infer`, not played in these suites."""
        if self._why_not:
            raise ContractMismatch(self._why_not)
        return self._needs

    @property
    def engines(self) -> Mapping[str, Mapping[str, str]]:
        """What runs each component, for manifests."""
        return self.model.runtime.about

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        """[16, 7] environment actions for each request. The noise is the request's seed's, so batch mates change nothing."""
        contract = self.model.contract
        assert not self._why_not, self._why_not
        watch = Stopwatch()
        with watch.stage("pack"):
            rows = []
            for slot, request in enumerate(batch):
                (row,) = self.model.rows(to_robot(request.observation, contract.language_key), slot)
                rows.append(Inputs(*row, draw_noise(request.seed, contract.model_horizon, contract.action_width)))
        answers = self.model.runtime(rows)
        chunks = []
        for answer in answers:
            began = time.perf_counter()
            actions = to_environment(decode_chunk(contract, answer.chunk))
            chunks.append(ActionChunk(actions, {**watch.seconds, **answer.seconds, "unpack": time.perf_counter() - began}))
        return chunks

    def infer(self, observation: Mapping[str, Any], *, noise: Vector | None = None, seed: int = 0) -> dict[str, NDArray[np.float32]]:
        """As `Gr00tPolicy.infer`: the checkpoint's own keys in, robot units out; no camera is turned and no gripper mapped."""
        return self.model.infer(observation, noise=noise, seed=seed)

    def rehearse(self, words: str) -> Rehearsal:
        """As `Gr00tPolicy.rehearse`: a full batch of the robot's own requests, for timing."""
        return self.model.rehearse(words)


def load(
    bundle: str | Path | Bundle | None = None, *, backend: str = "auto", steps: int | None = None, kernels: str = "auto", side: int = SIDE
) -> Gr00tLibero:
    """The policy of a bundle. `steps` picks one of its denoise tables, `side` is the pictures' in pixels: 256 in training.

    `kernels` is what answers on a GPU: "yes" our kernels, "no" TensorRT's plans, "auto" kernels where they can.

    Raises BadRequest without a bundle.
    """
    if bundle is None:
        raise BadRequest(
            "policy 'gr00t' needs a bundle: `vla-eval bundles` lists those found here; "
            "`vla-eval export --model gr00t --checkpoint DIR --out BUNDLE` makes one, and `--bundle BUNDLE` names it"
        )
    for name, value in (("steps", steps), ("side", side)):
        if value is not None and (type(value) is not int or value < 1):
            raise BadRequest(f"option {name} is {value!r}; it must be a whole number from 1")
    return Gr00tLibero(open_policy(bundle, backend=backend, steps=steps, kernels=kernels), side)


def published(suite: str) -> Published | None:
    """Where NVIDIA publishes the checkpoint of a suite, and Qwen the tokenizer that it does not ship."""
    if suite not in PUBLISHED_SUITES:
        return None
    needed = ("config.json", "*.safetensors", "*processor_config.json", "*statistics.json", "*embodiment_id.json")
    weights = Part("checkpoint", "nvidia/GR00T-N1.7-LIBERO", suite, ("*.json", "*.safetensors", "processor/*"), needed)
    names = ("tokenizer.json", "tokenizer_config.json")
    tokenizer = Part("tokenizer", "Qwen/Qwen3-VL-2B-Instruct", files=TOKENIZER_FILES, needed=names, beside=("tokenizer",))
    return Published((weights, tokenizer), {"embodiment": "libero_sim"})


def to_robot(observation: Observation, language_key: str) -> dict[str, Any]:
    """The environment's observation in the checkpoint's terms, for one robot.

    Pictures come upright and leave mirrored: training saw the renderer's picture turned by 180°, and the renderer's first row is the
    bottom one, so a left-right mirror of the upright picture is the same. "roll, pitch, yaw" are the axis-angle vector, not Euler angles.
    """
    state = observation["state"]
    numbers = np.concatenate([state["eef_pos"], state["eef_rot"], state["gripper"]]).astype(np.float32)
    pictures = {f"video.{ours}": mirror(observation["images"][theirs])[None, None] for ours, theirs in CAMERAS.items()}
    parts = np.split(numbers, np.cumsum(list(STATE.values()))[:-1])
    return {
        **pictures,
        **{f"state.{key}": part[None, None] for key, part in zip(STATE, parts, strict=True)},
        language_key: observation["instruction"],
    }


def to_environment(actions: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """[T, 7]: deltas as they are; the gripper, 1 = open in [0, 1], becomes −sign(2g − 1), so that −1 opens and +1 closes."""
    gripper = np.float32(0.0) - np.sign(np.float32(2.0) * actions["gripper"] - np.float32(1.0))  # 0 − 0 is +0: exactly half holds
    return np.concatenate([*(actions[key] for key in ACTION if key != "gripper"), gripper], axis=-1)


def _misfit(model: Gr00tPolicy) -> str:
    contract = model.contract
    for what, has, wanted in (
        ("cameras", list(contract.cameras), list(CAMERAS)),
        ("state", {group.key: group.dim for group in contract.state}, STATE),
        ("action", {group.key: group.dim for group in contract.action}, ACTION),
    ):
        if has != wanted:
            return (
                f"the bundle's embodiment {contract.embodiment_tag!r} has {what} {has}, the LIBERO arm {wanted}; "
                "export with --embodiment libero_sim"
            )
    return ""
