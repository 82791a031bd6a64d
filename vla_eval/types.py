"""The nouns of the harness, and the root of its exceptions. T steps, A action dimensions, H W pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, NotRequired, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # [H, W, 3] RGB, upright
Vector = NDArray[Any]  # a plain array of numbers; the shape stands where it is born
Outcome = Literal["success", "failure", "error"]
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much

SEED_LIMIT = 2**32  # every seed here fits numpy's global one: 0 <= seed < 2**32


def silent(what: str, done: int, total: int) -> None:
    """The progress that nobody watches."""


class VlaEvalError(Exception):
    """Something the user can mend; its text says what, where and what to do. The command line prints it as one line."""


class BadRequest(VlaEvalError):
    """Asked for something that does not exist or cannot be done: exit code 2."""


class ContractMismatch(VlaEvalError):
    """An environment does not offer what a policy needs, or a bundle contradicts itself."""


class InvalidAction(VlaEvalError):
    """A policy answered with something that is no action: an error record, never a failed episode."""


class InvalidObservation(VlaEvalError):
    """An observation that no policy should see: an empty instruction, a missing picture, NaN."""


class Meaning(StrEnum):
    """What a number means, as a closed set: two sides that say the same word mean the same convention."""

    EEF_POS_WORLD_M = "eef_pos_world_m"  # [3] m, world frame
    EEF_ROT_WORLD_AXIS_ANGLE = "eef_rot_world_axis_angle"  # [3] rad, 0…2π, not shortened
    GRIPPER_FINGERS_M = "gripper_fingers_m"  # [2] m, mirrored finger positions
    DELTA_X_WORLD = "delta_x_world"  # [-1, 1] of the controller's 0.05 m
    DELTA_Y_WORLD = "delta_y_world"
    DELTA_Z_WORLD = "delta_z_world"
    DELTA_RX_WORLD = "delta_rx_world"  # [-1, 1] of the controller's 0.5 rad, axis-angle
    DELTA_RY_WORLD = "delta_ry_world"
    DELTA_RZ_WORLD = "delta_rz_world"
    GRIPPER_PLUS_CLOSES = "gripper_plus_closes"  # the sign alone counts: -1 open, +1 close, 0 holds


ARM_ACTION: tuple[Meaning, ...] = (
    Meaning.DELTA_X_WORLD, Meaning.DELTA_Y_WORLD, Meaning.DELTA_Z_WORLD,
    Meaning.DELTA_RX_WORLD, Meaning.DELTA_RY_WORLD, Meaning.DELTA_RZ_WORLD,
    Meaning.GRIPPER_PLUS_CLOSES,
)  # fmt: skip
ARM_STATE: Mapping[str, Meaning] = {
    "eef_pos": Meaning.EEF_POS_WORLD_M,
    "eef_rot": Meaning.EEF_ROT_WORLD_AXIS_ANGLE,
    "gripper": Meaning.GRIPPER_FINGERS_M,
}


class Privileged(TypedDict):
    """Simulator truth, for policies whose `needs.privileged` says so. World frame; a pose is [7]: xyz m, quaternion x y z w."""

    goal: Sequence[tuple[str, ...]]  # ("on", "bowl", "plate"): every conjunct, predicate first, lower case
    holds: Sequence[bool]  # which conjuncts are true now, in the goal's order
    poses: dict[str, Vector]  # [7] of every object, fixture and moving part a goal or a grasp can name
    joints: dict[str, Vector]  # [10] of articulated parts: q, axis xyz, anchor xyz m, lower, upper, 1 = hinge / 0 = slide
    regions: dict[str, Vector]  # boxes [10]: pose, half-sizes m
    extents: dict[str, Vector]  # [3] m, half-sizes of the collision geometry in the body's own axes
    shapes: dict[str, Vector]  # [N, 4] points on the collision geometry in the body's own axes, m; the last column numbers the convex piece
    parents: dict[str, str]  # region or moving part -> the object or fixture it belongs to


class Observation(TypedDict):
    """What a policy is shown."""

    images: dict[str, Image]  # camera -> [H, W, 3] uint8 RGB, upright
    state: dict[str, Vector]  # "eef_pos" [3] m · "eef_rot" [3] axis-angle rad · "gripper" [2] m; world frame
    instruction: str
    privileged: NotRequired[Privileged]  # only if the policy's `needs.privileged` says so


class Info(TypedDict):
    """What an environment says beside its observation, at reset and after each step."""

    is_success: bool
    predicates: dict[str, bool]  # each conjunct of the goal, by its text "on(bowl, plate)"
    ended: NotRequired[Literal["success", "cap"]]  # when terminated or truncated
    action: NotRequired[Vector]  # after a step: what was executed, if the environment changed what it was given (clamped)
    objects: NotRequired[dict[str, Vector]]  # [7] poses of movable objects
    held: NotRequired[dict[str, bool]]  # object -> between both fingers
    fixtures: NotRequired[dict[str, Vector]]  # at reset: [7] body poses (xyz, quaternion w x y z as MuJoCo stores it) that reset moved


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a policy."""

    observation: Observation
    seed: int  # of this chunk; 0 <= seed < 2**32
    task: str  # which episode this is: for replay and logs
    trial: int
    step: int
    memory: bytes | None = None  # what this policy returned with the episode's previous chunk; None at its start


@dataclass(frozen=True, slots=True)
class ActionChunk:
    """One answer of a policy."""

    actions: Vector  # [T, A] in the environment's action space
    seconds: Mapping[str, float] = field(default_factory=dict)  # stage -> wall time: "pack", "visual", "prefill", "denoise", "unpack"
    memory: bytes | None = None


@dataclass(frozen=True, slots=True)
class Interface:
    """What an environment offers or a policy needs: said by both sides, compared before the first step."""

    cameras: Mapping[str, tuple[int, int]]  # name -> (H, W)
    state: Mapping[str, Meaning]
    action: Sequence[Meaning]
    control_hz: float
    privileged: bool = False


class Policy(Protocol):
    """A pure function of its requests. What it wants to remember it returns, and gets back with the next request.

    One with engines may also offer `engines`, component -> what runs it, for manifests, and `infer`, which `vla-eval infer` calls.
    """

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Interface: ...
    @property
    def horizon(self) -> int: ...  # actions in a chunk
    def act(self, batch: Sequence[Request]) -> list[ActionChunk]: ...


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a suite, under one protocol."""

    id: str  # "libero_10@openpi/3": suite, protocol, index
    env: str  # "vla_eval.envs:vla_eval/Libero-v0": module to import, then gymnasium id
    instruction: str
    max_steps: int  # policy steps; settling counts towards nothing
    trials: int | None = None  # fixed initial states that exist; None: unlimited, placed from the seed
    replan: Mapping[str, int] = field(default_factory=dict)  # policy name -> actions of a chunk to execute; not named: its whole horizon
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)  # plain data: every number a score depends on besides max_steps

    @property
    def suite(self) -> str:
        """The suite's full name, protocol included: "libero_10@openpi"."""
        return self.id.rpartition("/")[0]

    @property
    def index(self) -> int:
        """The task's number inside its suite."""
        return int(self.id.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """What became of one episode: one line of `episodes.jsonl`."""

    task: str
    trial: int
    seed: int  # the run's seed; pairs match on (task, trial, seed)
    outcome: Outcome
    steps: int  # env steps after settling
    chunks: int
    attempts: int
    seconds: float  # wall time of the last attempt
    policy_seconds: float
    error: str | None = None
    video: str | None = None  # relative to the run folder
    timing: Mapping[str, float] = field(
        default_factory=dict
    )  # "reset", "simulation", "rendering", "policy", "recording", "waiting": sum = seconds


@dataclass(frozen=True, slots=True)
class RunManifest:
    """Who ran what, where, from which revision: `manifest.json`, written before the first step."""

    schema: int
    run_id: str
    created: str  # UTC, ISO 8601
    command: Sequence[str]
    suite: str  # full name, "libero_10@openpi"
    policy: str
    privileged: bool
    bundle: str | None  # by digest
    backend: str
    engines: Mapping[str, Any]  # per component: flavour, version, card, types as inspected, or "not inspected"
    trials: int
    seed: int
    batch: int
    replan: int
    ledger: Sequence[tuple[str, int]]  # every (task, trial), in playing order, fixed before the first step
    protocol: Mapping[str, Any]  # step limits, settle steps, image sizes, initial states' digests: every number a score depends on
    options: Mapping[str, Any]  # what reached the policy's load(**options)
    versions: Mapping[str, str]  # python, numpy, mujoco, robosuite, …
    revision: Mapping[str, Any]  # of vla-eval: version, commit, dirty
    hardware: Mapping[str, str]  # cpu, gpu, renderer
    stop: Mapping[str, Any] | None = None  # the rule of --stop-when; the ledger is then shuffled by the seed


class Check(NamedTuple):
    """One line of `vla-eval doctor`. A module that registers environments may offer `checks() -> list[Check]`."""

    name: str
    state: Literal["pass", "fail", "absent"]  # absent: not there, and needed only for some work
    found: str
    mend: str = ""  # the command or step that mends it


class Measured(NamedTuple):
    """What one probe found."""

    holds: bool
    found: str
    cause: str = ""  # where it does not hold: what most likely makes it so, in plain words


class Probe(NamedTuple):
    """One line of `vla-eval doctor --certify`, which measures by effect whether an installation is the one that scores mean.

    A module that registers environments may offer `certify(suites: Sequence[str], play: Play) -> Iterator[Probe]`; no suites means
    its own choice, and suites that it cannot certify raise BadRequest before the first probe. `measure` may raise anything: then its
    line is an error with the message, and the others go on.
    """

    name: str
    expected: str
    measure: Callable[[], Measured]
    broken: str = ""  # what most likely makes it raise, if that is known


Play = Callable[[Any, Task, str], EpisodeRecord]  # environment, task, a policy's name: trial 0 of a run of seed 0


class TensorSpec(NamedTuple):
    """One input or output of an engine; a dynamic axis is (min, opt, max)."""

    name: str
    dtype: str
    shape: tuple[int | tuple[int, int, int], ...]


class Simulated(Protocol):
    """What our environments offer on `env.unwrapped` besides gymnasium's methods; one that lacks them is used as it is."""

    def look(self, cameras: Sequence[str]) -> dict[str, Image]: ...  # draws the present state, moves nothing
    def privileged(self) -> Privileged: ...
    def snapshot(self) -> Vector: ...  # [N] float64: time, positions, velocities
    def restore(self, state: Vector, fixtures: Mapping[str, Vector]) -> None: ...


class Recorder(Protocol):
    """Watches an episode from inside the simulator's process, where the frames are."""

    def begin(self, task: Task, trial: int, observation: Observation, info: Info, snapshot: Vector | None) -> None: ...
    def chunk(self, step: int, chunk: ActionChunk, batch: int) -> None: ...  # batch: rows answered together
    def step(self, action: Vector, observation: Observation, info: Info, snapshot: Vector | None) -> None: ...
    def end(self, record: EpisodeRecord) -> EpisodeRecord: ...  # may add where its file is
