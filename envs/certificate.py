"""Whether this installation's LIBERO is the one that scores mean: measured by effect, held against recordings. T actions, N state.

`certificate.json` and `certificate.npz` hold the recordings, one task of each suite; tools/make_certificate.py makes them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from vla_eval.arrays import read_npz, write_npz
from vla_eval.registry import load_tasks
from vla_eval.types import BadRequest, EpisodeRecord, Image, Measured, Play, Probe, Task, Vector, VlaEvalError

from . import machine
from .libero import CAMERAS, HOLD_OPEN, PIXELS, LiberoEnv

DEFAULT = "libero_spatial"  # its recorded task is also the one that settles differently under another physics: one simulator for all lines
PROTOCOL = "openpi"
SMALL = 32  # a picture by look: means over squares of 8 × 8
LOOK_ALIKE = 4.0  # grey levels, mean over a small picture; docs/install.md says what lies on either side
WITHIN_PIXELS = 10.0  # an object's collision shape is not quite what is drawn: 5 at most over the five suites
CHANGED = 60  # of 3 × 255: a pixel that shows an object, rather than its shadow
REDRAW_SECONDS = 300.0  # another process that builds the scene, on a loaded machine
WILD_STEPS = 5
SAME_START = 1e-6  # between Python and numpy versions states part by up to 6e-14
SAME_END = 1e-3  # a start 5e-7 away ended 5e-5 away, actions weaker by a thousandth ended 0.04 away
SAME_TURN_DEG = 2.0

# Measured over the five suites with mujoco 3.3.2 and robosuite 1.4.0: ten half steps along or about x, y, z.
SHIFT_CM, SHIFT_WITHIN, SHIFT_ASIDE = np.array([5.1, 6.0, 5.9]), 0.5, 1.5
TURN_DEG, TURN_WITHIN, TURN_ASIDE = np.array([31.0, 24.5, 26.1]), 2.0, 5.0
HALF, HALF_STEPS, GRIP_STEPS, SETTLED_STEPS = 0.5, 10, 20, 30
CLOSED_CM, OPEN_CM = 1.0, 7.9  # between the fingers
DEPTHS = {"agentview": 0.7, "robot0_eye_in_hand": 0.35}  # m before the camera: near enough for no hand to stand between
HANGS = np.array([60.0, 96.0])  # column, row: far from every turn and mirror image of itself
TILT_DEG, HEIGHT_CM, ASIDE_CM = 15.9, 3.5, 1.45  # of libero_spatial 5's bowl on its ramekin, after 30 no-ops, over all stored rows


@dataclass(frozen=True, slots=True)
class Recording:
    """One task of a suite as an installation that scores right plays it."""

    suite: str
    task: int
    trial: int
    seed: int  # of the environment's reset
    object: str  # one that is easily seen
    max_steps: int
    pictures: Mapping[str, Mapping[str, str]]  # mujoco and renderer -> camera -> SHA-256 of the start's picture
    actions: Vector  # [T, 7] float32: they succeed with the last one
    start: Vector  # [N] the state after settling
    end: Vector  # [N] the state after the last action
    fixtures: Mapping[str, Vector]  # [7] poses, quaternion w x y z
    small: Mapping[str, Image]  # camera -> [32, 32, 3] the start's picture by look

    @property
    def played(self) -> Task:
        """The task as a run plays it today."""
        return load_tasks(f"{self.suite}@{PROTOCOL}")[self.task]


FIXTURE = "fixture "  # before a fixture's name, among the keys of a file
Measure = Callable[[LiberoEnv, Recording], Measured]


def certify(suites: Sequence[str], play: Play) -> Iterator[Probe]:
    """The probes of `suites`, in the order in which one broken thing explains another. Raises BadRequest for a suite without recordings."""
    for suite in suites:
        if suite not in recordings():
            raise BadRequest(f"--suite {suite}: nothing is recorded that it could be held against; choose one of {', '.join(recordings())}")
    return _probes(tuple(dict.fromkeys(suites)) or (DEFAULT,), play)


def _probes(suites: Sequence[str], play: Play) -> Iterator[Probe]:
    yield Probe("versions", ", ".join(f"{name} {wanted}" for name, (wanted, *_) in machine.ALLOWED.items()), versions)
    for suite in dict.fromkeys((*ALWAYS, *suites)):
        lines = [*ALWAYS.get(suite, ()), *(LINES if suite in suites else ())]
        with closing(_Scene(recordings()[suite])) as scene:
            yield scene.probe("build", "a simulator, whatever its versions", built)
            if scene.broken:
                continue
            for line in dict.fromkeys(lines):
                yield scene.probe(*line)
            if suite in suites:
                limit = f"no success, cut after {scene.recorded.max_steps} steps"
                yield scene.probe("no-op and step limit", limit, lambda env, of: no_op(play(env, of.played, "zero"), of))
                yield scene.probe("oracle", "success within the step limit", lambda env, of: oracle(play(env, of.played, "oracle")))


class _Scene:
    """A recorded task, built when its first line asks for it, whatever the versions: the lines say what those do."""

    def __init__(self, recorded: Recording) -> None:
        self.recorded = recorded
        self._env: LiberoEnv | None = None
        self.broken = False  # tried to build it, and could not

    def probe(self, name: str, expected: str, measure: Measure) -> Probe:
        """A line about this task."""
        broken = versions().cause  # what a wrong version does first is to break
        return Probe(f"{self.recorded.suite}/{self.recorded.task}: {name}", expected, lambda: measure(self.env(), self.recorded), broken)

    def env(self) -> LiberoEnv:
        """The simulator. Raises whatever building it raises."""
        if self._env is None:
            self.broken = True
            with machine.any_version():
                self._env = LiberoEnv(**self.recorded.played.env_kwargs)
            self.broken = False
        return self._env

    def close(self) -> None:
        """Free the simulator."""
        if self._env is not None:
            self._env.close()


def versions() -> Measured:
    """The packages whose versions decide what a score means."""
    found = ", ".join(f"{name} {machine.installed(name) or 'missing'}" for name in machine.ALLOWED)
    wrong = [sentence for name in machine.ALLOWED if (sentence := machine.unfit(name))]
    return Measured(not wrong, found, "; ".join(wrong))


def built(env: LiberoEnv, recorded: Recording) -> Measured:
    """Whether there is anything to measure: a task that cannot be built has no other line."""
    width = len(env.snapshot())
    cause = "another scene: the benchmark's files or its robot are others"
    return Measured(width == len(recorded.start), f"{width} numbers a state, {len(recorded.start)} recorded", cause)


def settling(env: LiberoEnv, recorded: Recording) -> Measured:
    """How the bowl of libero_spatial 5 comes to rest on its ramekin, by the bodies' matrices."""
    _reset(env, recorded)
    for _ in range(SETTLED_STEPS - env._settle_steps):
        env.step(HOLD_OPEN)
    bowl, ramekin = (env._data.body(env._problem.obj_body_id[name]) for name in ("akita_black_bowl_1", "glazed_rim_porcelain_ramekin_1"))
    tilt = float(np.degrees(np.arccos(np.clip(bowl.xmat[8], -1, 1))))
    *aside, height = 100 * (bowl.xpos - ramekin.xpos)
    beside = float(np.hypot(*aside))
    holds = abs(tilt - TILT_DEG) <= 1 and abs(height - HEIGHT_CM) <= 0.5 and abs(beside - ASIDE_CM) <= 0.3
    found = f"tilted {tilt:.1f}°, {height:.2f} cm above, {beside:.2f} cm beside it"
    return Measured(holds, found, f"contacts are computed otherwise: from mujoco 3.4.0 on this bowl slides ({_installed()})")


def pictures(env: LiberoEnv, recorded: Recording) -> Measured:
    """The recorded start, drawn: no physics takes part. Where nobody has recorded this mujoco and renderer, compared by look, and said."""
    _reset(env, recorded)
    env.restore(recorded.start, recorded.fixtures)
    drawn = env.look(CAMERAS)
    renderer = drawn_by(env)
    known = recorded.pictures.get(renderer)
    apart = {camera: _levels(shrunk(drawn[camera]), recorded.small[camera]) for camera in CAMERAS}
    by_look = "; ".join(f"{camera} {levels:.1f} grey levels off by look" for camera, levels in apart.items())
    if known is not None:
        other = [camera for camera in CAMERAS if digest(drawn[camera]) != known[camera]]
        if not other:
            return Measured(True, f"both equal byte for byte, drawn by {renderer}")
        return Measured(False, f"{' and '.join(other)} not equal ({by_look}), drawn by {renderer}", _why_drawn(drawn, recorded))
    found = f"{by_look}; {renderer} is not among the recorded, so no byte was compared"
    return Measured(max(apart.values()) <= LOOK_ALIKE, found, _why_drawn(drawn, recorded))


def _why_drawn(drawn: Mapping[str, Image], recorded: Recording) -> str:
    for camera in CAMERAS:
        small, wanted = shrunk(drawn[camera]), recorded.small[camera]
        ways = {name: _levels(turn.picture(small), wanted) for name, turn in _TURNS.items()}
        best = min(ways, key=lambda name: ways[name])
        if best and ways[best] <= LOOK_ALIKE:
            return f"{camera} is {best}: the renderer's first row is the bottom one, and rows alone have to be reversed"
        if _levels(small[..., ::-1], wanted) <= min(ways[""] / 2, LOOK_ALIKE):
            return f"{camera} has red and blue exchanged (BGR)"
    brighter = float(np.mean([shrunk(drawn[camera]).astype(float) - recorded.small[camera] for camera in CAMERAS]))
    if abs(brighter) > LOOK_ALIKE:
        more = "brighter" if brighter > 0 else "darker"
        return f"{more} by {abs(brighter):.0f} grey levels: from mujoco 3.3.3 on light is computed otherwise ({_installed()})"
    if all(_levels(shrunk(drawn[camera]), recorded.small[camera]) <= LOOK_ALIKE for camera in CAMERAS):
        return "alike but not the same bytes: other assets, or a driver that rounds otherwise on this processor"
    return f"other assets, another camera or another light ({_installed()})"


def orientation(env: LiberoEnv, recorded: Recording) -> Measured:
    """Where a known object appears, against where the camera's own matrices put it."""
    words, causes = [], []
    for camera, depth in DEPTHS.items():
        info = env.reset(seed=recorded.seed, options={"trial": recorded.trial})[1]
        there = _hung(env, env.snapshot(), recorded.object, _in_world(env, camera, HANGS, depth))
        env.restore(there, info["fixtures"])
        outline = np.array([_in_picture(env, camera, point) for point in _outline(env, recorded.object)])
        expected = (outline.min(axis=0) + outline.max(axis=0)) / 2
        drawn = env.look([camera])[camera].astype(int)
        env.restore(_hung(env, there, recorded.object, np.array([0.0, 0.0, -5.0])), info["fixtures"])
        rows, columns = np.nonzero(np.abs(drawn - env.look([camera])[camera]).sum(axis=2) > CHANGED)
        if not len(rows):
            words.append(f"{camera}: not seen")
            causes.append(f"{camera}: another camera, or a picture that is not of the present state")
            continue
        seen = np.array([np.mean(np.percentile(where, (1, 99))) for where in (columns, rows)])
        words.append(f"{camera}: column {seen[0]:.0f}, row {seen[1]:.0f}, projected to {expected[0]:.0f}, {expected[1]:.0f}")
        away = {name: float(np.linalg.norm(seen - turn.point(expected))) for name, turn in _TURNS.items()}
        best = min(away, key=lambda name: away[name])
        if away[""] > WITHIN_PIXELS:
            laid = away[best] <= WITHIN_PIXELS
            causes.append(f"{camera}: {f'the picture is {best}' if laid else 'another camera or field of view'}")
    return Measured(not causes, "; ".join(words), "; ".join(causes))


def hand_pose(env: LiberoEnv, recorded: Recording) -> Measured:
    """What the observation says of the hand, against where wrist and finger pads are: no quaternion takes part in that."""
    state = _reset(env, recorded)["state"]
    tip, turn = _hand(env)
    vector = np.asarray(state["eef_rot"], float)
    rotation = Rotation.from_rotvec(vector)
    away, angle = 100 * float(np.linalg.norm(state["eef_pos"] - tip)), _degrees(rotation, turn)
    short = float(vector[0]) < 0  # at rest the hand is turned by about +π about x, on either side of it
    found = f"eef_pos {away:.1f} cm and eef_rot {angle:.2f}° off; eef_rot {', '.join(f'{number:.2f}' for number in vector)}"
    causes = []
    if away > 1:
        causes.append("eef_pos is not in world axes, or of another point than between the fingers")
    if angle > SAME_TURN_DEG:
        causes.append(_why_turned(rotation, turn))
    elif short:
        causes.append("the angle is shortened (as scipy's as_rotvec does), and jumps by 2π where the hand rests")
    return Measured(not causes, found, "; ".join(causes))


def object_poses(env: LiberoEnv, recorded: Recording) -> Measured:
    """The quaternions that info and the privileged observation give, against the bodies' matrices."""
    _reset(env, recorded)
    info = env.step(HOLD_OPEN)[4]
    told = {"info": info["objects"], "privileged": {name: env.privileged()["poses"][name] for name in info["objects"]}}
    worst, causes = 0.0, []
    for source, poses in told.items():
        truth = {name: Rotation.from_matrix(env._data.xmat[env._problem.obj_body_id[name]].reshape(3, 3)) for name in poses}
        angles = {name: _degrees(Rotation.from_quat(pose[3:]), truth[name]) for name, pose in poses.items()}
        name = max(angles, key=lambda name: angles[name])
        worst = max(worst, angles[name])
        if angles[name] > 0.1:
            causes.append(f"{source}: {_why_turned(Rotation.from_quat(poses[name][3:]), truth[name])} (seen at {name})")
    return Measured(not causes, f"at most {worst:.3g}° off, {len(info['objects'])} objects", "; ".join(causes))


def gripper(env: LiberoEnv, recorded: Recording) -> Measured:
    """What the two commands do to the fingers."""
    plus, minus = (_gap_after(env, recorded, command) for command in (1.0, -1.0))
    found = f"+1 leaves {plus:.2f} cm between the fingers, −1 {minus:.2f} cm"
    if minus < CLOSED_CM < plus:
        cause = "the sign is inverted: +1 has to close (a model whose 1 means open needs −sign(2g − 1))"
    else:
        cause = f"another gripper or latch: robosuite 1.5 moves the fingers otherwise ({_installed()})"
    return Measured(plus <= CLOSED_CM and abs(minus - OPEN_CM) <= 0.2, found, cause)


def position_axes(env: LiberoEnv, recorded: Recording) -> Measured:
    """Where the hand goes when x, y and z are commanded one by one."""
    moved = [100 * (after[0] - before[0]) for before, after in _commanded(env, recorded, 0)]
    return _axes(np.array(moved), SHIFT_CM, SHIFT_WITHIN, SHIFT_ASIDE, " cm", "moves")


def rotation_axes(env: LiberoEnv, recorded: Recording) -> Measured:
    """How the hand turns when the three rotations are commanded one by one."""
    turned = [np.degrees((after[1] * before[1].inv()).as_rotvec()) for before, after in _commanded(env, recorded, 3)]
    return _axes(np.array(turned), TURN_DEG, TURN_WITHIN, TURN_ASIDE, "°", "turns about")


def _commanded(env: LiberoEnv, recorded: Recording, first: int) -> Iterator[tuple[tuple[Vector, Rotation], tuple[Vector, Rotation]]]:
    """The hand before and after each of three commands, from number `first` of an action on."""
    for action in _half_steps(first):
        _reset(env, recorded)
        before = _hand(env)
        for _ in range(HALF_STEPS):
            env.step(action)
        yield before, _hand(env)


def _axes(moved: Vector, wanted: Vector, within: float, aside: float, unit: str, does: str) -> Measured:
    """`moved` [3, 3]: row k is what a command along axis k did."""
    along = moved.diagonal()
    off = np.abs(moved - np.diag(along)).max()
    causes = []
    for k, row in enumerate(moved):
        main = int(np.abs(row).argmax())
        if abs(row[main]) < 0.1 * wanted[k]:
            causes.append(f"a command in {'xyz'[k]} does nothing")
        elif main != k:
            causes.append(f"a command in {'xyz'[k]} {does} {'−' if row[main] < 0 else ''}{'xyz'[main]}")
        elif row[k] < 0:
            causes.append(f"{'xyz'[k]} is inverted")
    if not causes and (np.abs(along - wanted) > within).any():
        scale = float(np.mean(along / wanted))
        causes.append(f"{scale:.2g} times as far as under robosuite 1.4's OSC_POSE (full step 0.05 m, 0.5 rad; {_installed()})")
    if not causes and off > aside:
        causes.append(f"{off:.1f}{unit} along another axis: the commands are not taken in world axes")
    return Measured(not causes, f"{_xyz(along)}{unit}, at most {off:.1f}{unit} aside", "; ".join(causes))


def two_resets(env: LiberoEnv, recorded: Recording) -> Measured:
    """The same trial twice, with another one, a closed gripper and other fixtures in between."""
    first = _wild(env, recorded.seed, recorded.trial)
    _wild(env, recorded.seed + 1, recorded.trial + 7)
    for _ in range(8):
        env.step(-HOLD_OPEN)
    again = _wild(env, recorded.seed, recorded.trial)
    if first.fixtures.tobytes() != again.fixtures.tobytes():
        found = f"fixtures stand up to {100 * np.abs(first.fixtures - again.fixtures).max():.2g} cm elsewhere"
        return Measured(False, found, "places are drawn from a generator that the seed does not reach")
    if first.states.tobytes() == again.states.tobytes():
        return Measured(True, f"{len(first.states)} states of {first.states.shape[1]} numbers equal bit for bit, fixtures too")
    where = int(np.flatnonzero((first.states != again.states).any(axis=1))[0])
    cause = (
        "something survives a reset: the gripper's latch, the controller's goal, the solver's warm start; or another stored row is taken"
    )
    return Measured(False, f"states up to {np.abs(first.states - again.states).max():.2g} apart, from step {where} on", cause)


def redrawn(env: LiberoEnv, recorded: Recording) -> Measured:
    """A live picture in motion, against what a process of its own draws from the file alone, built and reset under another seed."""
    info = env.reset(seed=recorded.seed, options={"trial": recorded.trial})[1]
    for action in _wild_actions():
        env.step(action)
    live = env.look(CAMERAS)
    with tempfile.TemporaryDirectory() as folder:
        file, answer = Path(folder, "state.npz"), Path(folder, "pictures.npz")
        fixtures = {f"{FIXTURE}{name}": pose for name, pose in info["fixtures"].items()}
        write_npz(file, {"suite": np.array(recorded.suite), "state": env.snapshot(), **fixtures})
        command = [sys.executable, "-m", "vla_eval.envs.certificate", str(file), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=REDRAW_SECONDS, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise VlaEvalError(f"the process that draws the file ended without pictures: {last}")
        again = read_npz(answer)
    other = {camera: float(np.mean(again[camera] != live[camera])) for camera in CAMERAS}
    if not any(other.values()):
        return Measured(True, "both pictures equal byte for byte")
    found = "; ".join(f"{camera}: {100 * share:.0f} % of the bytes differ" for camera, share in other.items())
    cause = "a state, as recorded, does not say all that is drawn: fixtures' poses, the substep by which a live picture lags, a lit burner"
    return Measured(False, found, cause)


def _redraw(file: str, answer: str) -> None:
    """Another process: draw a recorded state again."""
    recording = read_npz(file)
    with closing(_Scene(recordings()[str(recording["suite"])])) as scene:
        env, recorded = scene.env(), scene.recorded
        env.reset(seed=recorded.seed + 99, options={"trial": recorded.trial + 17})
        env.restore(recording["state"], {key.removeprefix(FIXTURE): pose for key, pose in recording.items() if key.startswith(FIXTURE)})
        write_npz(answer, env.look(CAMERAS), sync=False)


def replayed(env: LiberoEnv, recorded: Recording) -> Measured:
    """The actions of a recorded success, without any policy."""
    _reset(env, recorded)
    began = _apart(env.snapshot(), recorded.start)
    seen = [bool(env.step(action)[4]["is_success"]) for action in recorded.actions]
    ended = _apart(env.snapshot(), recorded.end)
    success, steps = any(seen), (seen.index(True) + 1 if any(seen) else len(seen))
    found = f"{'success' if success else 'no success'} at step {steps} of {len(seen)}; states apart by {began:.1g} at the start, "
    if began > SAME_START:
        cause = "the start is another one: other stored states, another seeding, or objects that settle elsewhere"
    elif ended <= SAME_END:
        cause = f"arm and objects move as recorded, and success is {'seen too early' if success else 'not seen'}: other success predicates"
    else:
        cause = f"the same actions move arm or objects otherwise: another controller or another physics ({_installed()})"
    holds = success and steps == len(seen) and began <= SAME_START
    return Measured(holds, f"{found}{ended:.1g} at the end", cause)


def oracle(record: EpisodeRecord) -> Measured:
    """An episode of the scripted policy that sees the simulator's truth."""
    if record.outcome == "error":
        raise VlaEvalError(f"the episode broke: {record.error}")
    cause = "one of the lines above, if one fails; else the success predicates or the oracle (docs/oracle.md says what it misses)"
    return Measured(record.outcome == "success", f"{record.outcome} after {record.steps} steps", cause)


def no_op(record: EpisodeRecord, recorded: Recording) -> Measured:
    """An episode in which nothing is done: it has to fail, at the published limit."""
    if record.outcome == "error":
        raise VlaEvalError(f"the episode broke: {record.error}")
    if record.outcome == "success":
        cause = "the goal is seen as reached although nothing was done: success predicates, or a start that meets the goal"
    else:
        cause = f"the step limit is {record.steps} and @{PROTOCOL}'s is {recorded.max_steps}: rates under another limit are not comparable"
    return Measured(
        record.outcome == "failure" and record.steps == recorded.max_steps, f"{record.outcome} after {record.steps} steps", cause
    )


def _xyz(numbers: Vector) -> str:
    return ", ".join(f"{axis} {number:.1f}" for axis, number in zip("xyz", numbers, strict=True))


Line = tuple[str, str, Measure]  # name, what is expected
_SETTLING: Line = (
    "settling",
    f"bowl tilted {TILT_DEG} ± 1°, {HEIGHT_CM} ± 0.5 cm above and {ASIDE_CM} ± 0.3 cm beside its ramekin, after {SETTLED_STEPS} no-ops",
    settling,
)
_PICTURES: Line = (
    "picture fingerprints",
    f"the recorded bytes from a recorded mujoco and renderer; from others within {LOOK_ALIKE:g} grey levels by look",
    pictures,
)
# Whatever is asked for: where another mujoco shows first, in how things rest and in how light falls on a floor.
ALWAYS: Mapping[str, tuple[Line, ...]] = {"libero_spatial": (_SETTLING,), "libero_object": (_PICTURES,)}
LINES: tuple[Line, ...] = (
    _PICTURES,
    ("camera orientation", f"an object hung left of and above the middle within {WITHIN_PIXELS:g} pixels of its projection", orientation),
    ("hand pose", f"what wrist and finger pads say, within 1 cm and {SAME_TURN_DEG:g}°; the angle not shortened", hand_pose),
    ("object poses", "quaternions x y z w that say what the bodies' matrices say, within 0.1°", object_poses),
    ("gripper", f"{GRIP_STEPS} steps of +1 close below {CLOSED_CM:g} cm, of −1 open to {OPEN_CM} ± 0.2 cm", gripper),
    (
        "position axes",
        f"{HALF_STEPS} steps of +{HALF:g}: {_xyz(SHIFT_CM)} ± {SHIFT_WITHIN:g} cm, each along its own world axis",
        position_axes,
    ),
    (
        "rotation axes",
        f"{HALF_STEPS} steps of +{HALF:g}: {_xyz(TURN_DEG)} ± {TURN_WITHIN:g}°, each about its own world axis",
        rotation_axes,
    ),
    ("two resets", "the same states bit for bit, whatever was played in between", two_resets),
    ("redrawn from a file", "the same bytes from the recorded state, drawn by another process", redrawn),
    ("recorded success", f"the recorded start within {SAME_START:g}, and success with the last of the recorded actions", replayed),
)


@cache
def recordings() -> Mapping[str, Recording]:
    """Suite -> what was recorded of it."""
    words: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    arrays = read_npz(Path(__file__).with_suffix(".npz"))
    found = {}
    for suite, said in words.items():
        own = {key.removeprefix(f"{suite} "): array for key, array in arrays.items() if key.startswith(f"{suite} ")}
        fixtures = {key.removeprefix(FIXTURE): pose for key, pose in own.items() if key.startswith(FIXTURE)}
        small = {camera: own[camera] for camera in CAMERAS}
        found[suite] = Recording(suite, **said, actions=own["actions"], start=own["start"], end=own["end"], fixtures=fixtures, small=small)
    return found


def drawn_by(env: LiberoEnv) -> str:
    """What decides a picture's bytes: "mujoco 3.3.2, llvmpipe (…), Mesa …". EGL and OSMesa on one driver draw the same."""
    return f"mujoco {machine.installed('mujoco')}, {env.hardware()['renderer'].partition(', ')[2]}"


def digest(picture: Image) -> str:
    """SHA-256 of a picture's bytes."""
    return hashlib.sha256(picture.tobytes()).hexdigest()


def shrunk(picture: Image) -> Image:
    """[SMALL, SMALL, 3] means over squares: what a picture looks like, whoever drew it."""
    side = len(picture) // SMALL
    means: Vector = picture.reshape(SMALL, side, SMALL, side, 3).mean(axis=(1, 3))
    return means.round().astype(np.uint8)


def _reset(env: LiberoEnv, recorded: Recording) -> Any:
    return env.reset(seed=recorded.seed, options={"trial": recorded.trial})[0]


class _Wild(NamedTuple):
    """A reset and a few random actions."""

    fixtures: Vector  # [F, 7]
    states: Vector  # [1 + WILD_STEPS, N]


def _wild(env: LiberoEnv, seed: int, trial: int) -> _Wild:
    info = env.reset(seed=seed, options={"trial": trial})[1]
    states = [env.snapshot()]
    for action in _wild_actions():
        env.step(action)
        states.append(env.snapshot())
    return _Wild(np.array(list(info["fixtures"].values())), np.array(states))


def _wild_actions() -> Vector:
    return np.random.default_rng(0).uniform(-1, 1, (WILD_STEPS, 7)).astype(np.float32)


def _half_steps(first: int) -> Iterator[Vector]:
    for axis in range(first, first + 3):
        action = HOLD_OPEN.copy()
        action[axis] = HALF
        yield action


def _gap_after(env: LiberoEnv, recorded: Recording, command: float) -> float:
    """Centimetres between the fingers after GRIP_STEPS of one command."""
    _reset(env, recorded)
    for _ in range(GRIP_STEPS):
        observation = env.step(np.array([0, 0, 0, 0, 0, 0, command], np.float32))[0]
    left, right = observation["state"]["gripper"]
    return 100 * float(left - right)


def _hand(env: LiberoEnv) -> tuple[Vector, Rotation]:
    """The middle between the finger pads, m, and how the hand is turned: z from the wrist to there, y from the right pad to the left."""
    robot = env._problem.robots[0]
    pads = [
        env._data.geom_xpos[[env._model.geom(name).id for name in robot.gripper.important_geoms[key]]].mean(axis=0)
        for key in ("left_fingerpad", "right_fingerpad")
    ]
    tip = (pads[0] + pads[1]) / 2
    z = tip - env._data.body(robot.robot_model.eef_name).xpos
    z /= np.linalg.norm(z)
    x = np.cross(pads[0] - pads[1], z)
    x /= np.linalg.norm(x)
    return tip, Rotation.from_matrix(np.column_stack([x, np.cross(z, x), z]))


def _why_turned(told: Rotation, truth: Rotation) -> str:
    quat = told.as_quat()
    if any(_degrees(Rotation.from_quat(np.roll(quat, by)), truth) < SAME_TURN_DEG for by in (-1, 1)):
        return "a quaternion is swapped: scalar first (w x y z) where it has to be scalar last (x y z w)"
    if _degrees(told.inv(), truth) < SAME_TURN_DEG:
        return "the rotation is inverted: world in the body's axes"
    return "another frame or another convention: Euler angles, or a body that is not the hand"


def _degrees(one: Rotation, other: Rotation) -> float:
    return float(np.degrees((one * other.inv()).magnitude()))


def _camera(env: LiberoEnv, camera: str) -> tuple[Vector, Vector, float]:
    """Where the camera stands, its axes as columns (right, up, backwards), and its focal length in pixels."""
    number = env._model.camera(camera).id
    focal = PIXELS / 2 / np.tan(np.radians(env._model.cam_fovy[number]) / 2)
    return env._data.cam_xpos[number].copy(), env._data.cam_xmat[number].reshape(3, 3).copy(), float(focal)


def _in_picture(env: LiberoEnv, camera: str, point: Vector) -> Vector:
    """[2] column and row at which an upright picture shows a point of the world."""
    place, axes, focal = _camera(env, camera)
    right, up, back = axes.T @ (point - place)
    pixel: Vector = np.array([right, -up]) * focal / -back + (PIXELS - 1) / 2
    return pixel


def _in_world(env: LiberoEnv, camera: str, pixel: Vector, depth: float) -> Vector:
    """[3] m, the point that `_in_picture` shows there, `depth` m before the camera."""
    place, axes, focal = _camera(env, camera)
    column, row = (pixel - (PIXELS - 1) / 2) * depth / focal
    return np.asarray(place + axes @ np.array([column, -row, -depth]))


def _hung(env: LiberoEnv, state: Vector, name: str, place: Vector) -> Vector:
    """The state with an object at rest elsewhere."""
    body = env._problem.obj_body_id[name]
    moved: Vector = state.copy()
    joint = env._model.body_jntadr[body]
    at = 1 + env._model.jnt_qposadr[joint]
    moved[at : at + 3] = place
    at = 1 + env._model.nq + env._model.jnt_dofadr[joint]
    moved[at : at + 6] = 0
    return moved


def _outline(env: LiberoEnv, name: str) -> Vector:
    """[N, 3] m, extreme points of an object in the world."""
    truth, turn = env.privileged(), env._data.xmat[env._problem.obj_body_id[name]].reshape(3, 3)
    points: Vector = truth["poses"][name][:3] + truth["shapes"][name][:, :3] @ turn.T
    return points


class _Turn(NamedTuple):
    """One of the eight ways to lay a square picture."""

    swap: bool
    rows: bool
    columns: bool

    def picture(self, picture: Image) -> Image:
        picture = picture.swapaxes(0, 1) if self.swap else picture
        return picture[:: -1 if self.rows else 1, :: -1 if self.columns else 1]

    def point(self, point: Vector) -> Vector:
        """Where a column and row of the picture go."""
        column, row = point[::-1] if self.swap else point
        return np.array([PIXELS - 1 - column if self.columns else column, PIXELS - 1 - row if self.rows else row])


_TURNS: Mapping[str, _Turn] = {
    "": _Turn(False, False, False),
    "upside down": _Turn(False, True, False),
    "mirrored left to right": _Turn(False, False, True),
    "turned by 180°": _Turn(False, True, True),
    "transposed": _Turn(True, False, False),
    "turned by 90°": _Turn(True, True, False),
    "turned by 270°": _Turn(True, False, True),
    "transposed the other way": _Turn(True, True, True),
}


def _levels(one: Image, other: Image) -> float:
    """Grey levels: the mean difference of two pictures."""
    return float(np.abs(one.astype(float) - other).mean())


def _apart(one: Vector, other: Vector) -> float:
    """The largest difference of two states; infinity for those of different scenes."""
    return float(np.abs(one - other).max()) if one.shape == other.shape else float("inf")


def _installed() -> str:
    return " and ".join(f"{name} {machine.installed(name)}" for name in ("mujoco", "robosuite"))


if __name__ == "__main__":
    _redraw(*sys.argv[1:])
