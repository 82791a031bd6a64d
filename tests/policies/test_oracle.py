"""The oracle's parts on small shapes; and, on real LIBERO, that it succeeds where doing nothing does not."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from vla_eval.policies import oracle
from vla_eval.policies.baseline import zero
from vla_eval.policies.oracle import arm
from vla_eval.policies.oracle.grasp import OPENING, downward, from_above, hits, search
from vla_eval.policies.oracle.handling import Tops, goal_poses, hangs, rest_height, way_out
from vla_eval.policies.oracle.mechanisms import Joint
from vla_eval.policies.oracle.motion import CLOSE, OPEN, Hand, Memory, Move, action, after, arrived, timed
from vla_eval.policies.oracle.plan import pending
from vla_eval.policies.oracle.scene import PITCH, Scene, filled
from vla_eval.registry import load_tasks
from vla_eval.run.episode import in_process, rollout
from vla_eval.testing import check_policy
from vla_eval.types import BadRequest, InvalidObservation, Observation, Privileged, Request, Vector

if TYPE_CHECKING:
    from vla_eval.envs.libero import LiberoEnv

CODE = Path(oracle.__file__).parent
NAMES = (  # every kind of object that LIBERO's suites place, and the suites
    "akita_black_bowl", "alphabet_soup", "basket", "bbq_sauce", "black_book", "butter", "chefmate_8_frypan",
    "chocolate_pudding", "cookies", "cream_cheese", "desk_caddy", "flat_stove", "glazed_rim_porcelain_ramekin", "ketchup",
    "microwave", "milk", "moka_pot", "salad_dressing", "orange_juice", "plate", "popcorn", "porcelain_mug",
    "red_coffee_mug", "tomato_sauce", "white_bowl", "white_cabinet", "white_yellow_mug", "wine_bottle", "wine_rack",
    "wooden_cabinet", "wooden_shelf", "wooden_tray", "wooden_two_layer_shelf", "yellow_book", "libero_",
)  # fmt: skip


def box(size: tuple[float, float, float], at: tuple[float, float, float] = (0, 0, 0), piece: int = 0) -> Vector:
    """[8, 4] corners of a box of full `size` around `at`, as one convex piece of a shape."""
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float32)
    return np.column_stack([signs * np.array(size, np.float32) / 2 + np.array(at, np.float32), np.full(8, piece, np.float32)])


Part = tuple[tuple[float, float, float], tuple[float, float, float]]  # size, centre


def cup(outer: float = 0.1, wall: float = 0.006, height: float = 0.06) -> Vector:
    """A square cup: four walls and a floor, its origin in the middle of its underside."""
    half, up = outer / 2 - wall / 2, height / 2
    sides: list[Part] = [((wall, outer, height), (side * half, 0, up)) for side in (-1, 1)]
    sides += [((outer, wall, height), (0, side * half, up)) for side in (-1, 1)]
    pieces = [*sides, ((outer, outer, wall), (0, 0, wall / 2))]
    return np.concatenate([box(size, at, piece) for piece, (size, at) in enumerate(pieces)])


def solid(shape: Vector, at: tuple[float, float, float] = (0, 0, 0)) -> Vector:
    return np.asarray(filled(np.ascontiguousarray(shape, np.float32).tobytes()) + np.array(at))


def truth(**parts: Any) -> Privileged:
    """A scene with what a test names and nothing else."""
    empty = Privileged(goal=(), holds=(), poses={}, joints={}, regions={}, extents={}, shapes={}, parents={})
    return {**empty, **parts}  # type: ignore[typeddict-item]


def pose(*at: float) -> Vector:
    return np.array([*at, 0, 0, 0, 1], float)


NOWHERE = np.zeros((0, 3))


# --- the arm ---------------------------------------------------------------------------------------------------------------------


def test_the_arm_stretched_upwards_is_as_long_as_its_data_sheet_says() -> None:
    pos, rot, _ = arm.forward(np.zeros((1, 7)))
    np.testing.assert_allclose(pos[0], [0.088, 0, 0.333 + 0.316 + 0.384 - 0.107 - 0.097], atol=1e-12)
    np.testing.assert_allclose(rot[0][:, 2], [0, 0, -1], atol=1e-12)


def test_the_jacobian_is_the_derivative_of_where_the_hand_is() -> None:
    q = arm.HOME + 0.1
    _, _, jacobian = arm.forward(q[None])
    step = 1e-6
    for joint in range(7):
        (ahead, turned, _), (behind, before, _) = (arm.forward((q + side * step * np.eye(7)[joint])[None]) for side in (1, -1))
        np.testing.assert_allclose(jacobian[0, :3, joint], (ahead[0] - behind[0]) / (2 * step), atol=1e-8)
        turn = Rotation.from_matrix(turned[0] @ before[0].T).as_rotvec() / (2 * step)
        np.testing.assert_allclose(jacobian[0, 3:, joint], turn, atol=1e-6)  # central difference: rounding 1e-16 / step


def test_the_reach_of_the_arm_ends_where_its_links_do() -> None:
    base = np.array([-0.66, 0, 0.912])
    lost = arm.shortfall(base, base + np.array([[0.5, 0, 0.1], [1.2, 0, 0.1]]), Rotation.concatenate([downward(0)] * 2))
    assert lost[0] == 0
    assert lost[1] > 0.25  # at most 0.855 m from the shoulder, less the hand that points down


# --- the servo -------------------------------------------------------------------------------------------------------------------


def test_a_predicted_move_arrives_without_overshooting_and_keeps_to_its_line() -> None:
    start, end = np.array([0.0, 0.0, 0.3]), np.array([0.2, -0.1, 0.1])
    hand = Hand(start, downward(0), np.zeros(6))
    (move,) = timed([Move(end, downward(1.0).as_quat(), OPEN, tol=0.005)], hand)
    line = (end - start) / np.linalg.norm(end - start)
    for spent in range(100):
        if arrived(hand, move, spent, seen=True):
            break
        hand = after(hand, action(hand, move, np.zeros(3), start))
        along = (hand.pos - start) @ line
        assert along < np.linalg.norm(end - start) + 0.002
        assert np.linalg.norm(hand.pos - start - along * line) < 0.002
    assert spent < move.at_most
    assert np.linalg.norm(hand.pos - end) < 0.005
    assert (hand.rot * downward(1.0).inv()).magnitude() < 0.12


def test_actions_stay_inside_the_action_space_and_carry_the_grip() -> None:
    hand = Hand(np.zeros(3), downward(0), np.full(6, 0.2))
    command = action(hand, Move(np.array([9.0, -9, 9]), downward(3.0).as_quat(), CLOSE), np.full(3, 0.01), np.ones(3))
    assert np.abs(command).max() <= 1
    assert command[6] == CLOSE


def test_an_exact_move_ends_only_where_the_hand_was_seen() -> None:
    hand = Hand(np.zeros(3), downward(0), np.zeros(6))
    exact = Move(np.zeros(3), downward(0).as_quat(), tol=0.005, at_most=30)
    assert arrived(hand, exact, 3, seen=True)
    assert not arrived(hand, exact, 3, seen=False)
    assert arrived(hand, replace(exact, tol=0.02), 3, seen=False)
    assert arrived(hand, exact, 30, seen=False)


def test_memory_survives_its_bytes() -> None:
    move = Move(np.arange(3.0), downward(0.3).as_quat(), CLOSE, speed=0.5, at_least=2, at_most=9)
    memory = Memory((move, replace(move, at_most=0)), 3, np.ones(3), np.zeros(3), np.arange(6.0), np.full(3, 0.01), {"tries": {"a": 2}})
    again = Memory.unpack(memory.pack())
    assert again.pack() == memory.pack()
    assert [kept.at_most for kept in again.moves] == [9, 0]
    assert again.notes == memory.notes
    assert Memory.unpack(None).moves == ()


# --- grasps and places -----------------------------------------------------------------------------------------------------------


def test_a_box_is_grasped_across_its_narrow_side() -> None:
    body = solid(box((0.12, 0.04, 0.06)), (0.3, 0.1, 0.03))
    best = next(search(body, NOWHERE, 0.0, from_above()))
    assert abs(best.rot.apply([0, 1, 0]) @ [0, 1, 0]) > 0.95
    np.testing.assert_allclose(best.pos[:2], [0.3, 0.1], atol=0.01)
    assert best.width == pytest.approx(0.04, abs=0.008)  # two grid steps
    assert best.pos[2] - 0.01 > 0  # the fingertips stay above the ground


def test_what_is_wider_than_the_fingers_open_is_grasped_at_a_corner_if_at_all() -> None:
    small, large = (list(search(solid(box((side, side, 0.1)), (0, 0, 0.05)), NOWHERE, 0.0, from_above())) for side in (0.05, 0.1))
    assert all(np.abs(grasp.pos[:2]).max() > 0.025 for grasp in large)
    assert small[0].cost < 0.02 < 0.1 < large[0].cost


def test_a_cup_wider_than_the_fingers_is_grasped_by_its_rim() -> None:
    best = next(search(solid(cup()), NOWHERE, 0.0, from_above()))
    assert best.width < 0.02
    assert 0.035 < np.abs(best.pos[:2]).max() < 0.06


def test_a_grasp_keeps_clear_of_neighbours() -> None:
    body, wall = solid(box((0.04, 0.04, 0.06)), (0, 0, 0.03)), solid(box((0.3, 0.02, 0.2)), (0, 0.06, 0.1))
    free, beside = (list(search(body, around, 0.0, from_above())) for around in (NOWHERE, wall))
    assert free
    assert beside
    assert [grasp.cost for grasp in free] == sorted(grasp.cost for grasp in free)
    assert any(hits(grasp.pos, grasp.rot, wall, OPENING, slack=0) for grasp in free)
    assert not any(hits(grasp.pos, grasp.rot, wall, grasp.width, slack=-0.004) for grasp in beside)


def test_what_has_air_under_its_foot_is_about_to_fall_though_its_rim_reaches_over_a_neighbour() -> None:
    funnel = np.concatenate([solid(box((0.04, 0.04, 0.04), (0, 0, 0.02))), solid(box((0.12, 0.12, 0.01), (0, 0, 0.045)))])
    beside = solid(box((0.02, 0.02, 0.04), (0.05, 0, 0.02)))
    raised = np.array([0.0, 0.0, 0.07])
    assert not hangs(funnel, NOWHERE, 0.0)
    assert hangs(funnel + raised, beside + raised, 0.0)
    assert not hangs(funnel + raised, solid(box((0.1, 0.1, 0.07), (0, 0, 0.035))), 0.0)


def test_a_thing_leaves_what_hangs_over_it_the_way_the_hand_came() -> None:
    block, roof = solid(box((0.04, 0.04, 0.04), (0, 0, 0.02))), solid(box((0.2, 0.2, 0.02), (0, 0, 0.2)))
    aslant = np.array([0.0, -0.8, -0.6])  # the hand points towards -y
    out = way_out(block, roof, aslant)
    assert out[[0, 2]] == pytest.approx([0, 0])
    assert 0.12 <= out[1] < 0.2  # half the roof and half the block, and some more
    assert not way_out(block, NOWHERE, aslant).any()
    assert not way_out(block, roof - np.array([0.0, 0.0, 0.3]), aslant).any()  # what lies below hangs over nothing
    assert not way_out(block, roof, np.array([0.0, 0.0, -1.0])).any()  # from straight above no way leads aside


def test_a_thing_comes_to_rest_on_what_is_below_it() -> None:
    block = solid(box((0.05, 0.05, 0.04)))
    assert rest_height(block, Tops.of(NOWHERE), 0.5) == pytest.approx(0.52, abs=PITCH)
    table = solid(box((0.2, 0.2, 0.1)), (0, 0, 0.55))
    assert rest_height(block, Tops.of(table), 0.5) == pytest.approx(0.62, abs=PITCH)
    assert rest_height(block + np.array([0.5, 0, 0]), Tops.of(table), 0.5) == pytest.approx(0.52, abs=PITCH)
    assert rest_height(solid(box((0.05, 0.05, 0.04))), Tops.of(solid(cup())), 0.0) == pytest.approx(
        0.006 + 0.02, abs=PITCH
    )  # inside, on the floor


def test_two_things_for_one_container_get_places_apart() -> None:
    shapes = {"a": box((0.04, 0.04, 0.04)), "b": box((0.04, 0.04, 0.04)), "c": cup(0.14)}
    poses = {"a": pose(0.3, 0, 0.02), "b": pose(0.3, 0.2, 0.02), "c": pose(0, 0, 0)}
    regions = {"inside": np.array([0, 0, 0.03, 0, 0, 0, 1, 0.06, 0.06, 0.03])}
    goals = (("in", "a", "inside"), ("in", "b", "inside"))
    scene = Scene(truth(goal=goals, holds=(False, False), shapes=shapes, poses=poses, regions=regions, parents={"inside": "c"}))
    first, second = (goal_poses(scene, goal, scene.place(goal[1])[1], scene.walls(goal[1]))[0] for goal in goals)
    assert np.linalg.norm(first.pos - second.pos) > 0.04
    for stow in (first, second):
        assert (np.abs(stow.pos - [0, 0, 0.03]) < [0.06, 0.06, 0.03]).all()
        assert (stow.way == [0, 0, -1]).all()


def test_under_a_roof_a_thing_is_brought_in_level_from_the_open_side() -> None:
    parts: list[Part] = [((0.2, 0.2, 0.02), (0, 0, 0.01)), ((0.2, 0.2, 0.02), (0, 0, 0.19)), ((0.02, 0.2, 0.2), (0.09, 0, 0.1))]
    parts += [((0.2, 0.02, 0.2), (0, side * 0.09, 0.1)) for side in (-1, 1)]
    shelf = np.concatenate([box(size, at, piece) for piece, (size, at) in enumerate(parts)])
    regions = {"inside": np.array([0, 0, 0.1, 0, 0, 0, 1, 0.06, 0.06, 0.06])}
    goal = ("in", "a", "inside")
    shapes, poses = {"a": box((0.05, 0.05, 0.05)), "shelf": shelf}, {"a": pose(-0.4, 0, 0.025), "shelf": pose(0, 0, 0)}
    scene = Scene(truth(goal=(goal,), holds=(False,), shapes=shapes, poses=poses, regions=regions, parents={"inside": "shelf"}))
    best = goal_poses(scene, goal, scene.place("a")[1], scene.walls("a"))[0]
    np.testing.assert_array_equal(best.way, [1, 0, 0])
    assert 0.02 < best.pos[2] - 0.025 < 0.04


# --- joints and order ------------------------------------------------------------------------------------------------------------


def test_a_sliding_part_opens_along_its_longer_end_and_its_handle_is_what_sticks_out() -> None:
    front, bar = box((0.2, 0.02, 0.07), (0, 0, 0), 0), box((0.09, 0.015, 0.015), (0, 0.03, 0), 1)
    joint = np.array([0.0, 0, -1, 0, 0, 0, 0, -0.16, 0.01, 0])
    scene = Scene(truth(shapes={"part": np.concatenate([front, bar])}, poses={"part": pose(0, 0, 0)}, joints={"part": joint}))
    part = Joint(scene, "part")
    assert (part.near, part.far) == (0.01, -0.16)
    np.testing.assert_allclose(part.outward(np.zeros(3)), [0, 1, 0])
    handle, rest = part.handle()
    assert handle[:, 1].min() > 0.015
    assert rest[:, 1].max() < 0.015
    moved, _ = part.moved(np.zeros(3), downward(0), -0.1)
    np.testing.assert_allclose(moved, [0, 0.1, 0])


def test_a_hand_on_a_door_goes_round_its_hinge() -> None:
    joint = np.array([0.0, 0, 0, 1, 0, 0, 0, -2.0, 0, 1])
    scene = Scene(truth(shapes={"door": box((0.3, 0.02, 0.2), (0.15, 0, 0))}, poses={"door": pose(0, 0, 0)}, joints={"door": joint}))
    door = Joint(scene, "door")
    np.testing.assert_allclose(door.outward(np.array([0.3, 0, 0])), [0, -1, 0], atol=1e-12)
    pos, rot = door.moved(np.array([0.3, 0, 0]), downward(0), -np.pi / 2)
    np.testing.assert_allclose(pos, [0, -0.3, 0], atol=1e-12)
    assert (rot * downward(-np.pi / 2).inv()).magnitude() < 1e-9


@pytest.mark.parametrize(
    ("goals", "order"),
    [
        ([("close", "shut"), ("in", "a", "shut")], [1, 0]),  # what goes in first, then the lid
        ([("in", "a", "there"), ("turnon", "knob")], [1, 0]),
        ([("on", "a", "b"), ("in", "b", "tray")], [1, 0]),  # the lower one first
        ([("open", "x"), ("close", "y")], [1, 0]),  # what stands open is in the way
        ([("on", "a", "b"), ("on", "c", "d")], [0, 1]),
    ],
)
def test_conjuncts_come_in_a_workable_order(goals: list[tuple[str, ...]], order: list[int]) -> None:
    scene = Scene(truth(goal=goals, holds=[False] * len(goals)))
    assert pending(scene) == [goals[i] for i in order]


def test_what_holds_already_is_left_alone() -> None:
    assert pending(Scene(truth(goal=(("on", "a", "b"), ("open", "c")), holds=(True, False)))) == [("open", "c")]


# --- its tables ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import certify_oracle  # type: ignore[import-not-found]

    monkeypatch.setattr(certify_oracle, "DOCS", tmp_path)
    return cast("ModuleType", certify_oracle)


def test_an_error_counts_in_no_rate_of_the_tables_and_stands_beside_it(tables: ModuleType) -> None:
    trial: dict[str, Any] = {"steps": 9, "seconds": 2.0, "cpu_seconds": 1.0}
    ended: list[dict[str, Any]] = [
        {"outcome": "success"},
        {"outcome": "failure", "bin": "dropped", "unmet": ["on(a, b)"]},
        {"outcome": "error", "error": "GLError: gone"},
    ]
    task = {"instruction": "lift", "trials": {str(number): trial | end for number, end in enumerate(ended)}}
    suites = {"libero_goal@openpi": {"0": task}}
    assert "| 1/2 | 9.5–90.5 |" in tables.suites_table(suites)
    assert "n = 2 |" in tables.suites_table(suites)
    assert "| libero_goal@openpi/0 | lift | 1/2 | – | 1 |" in tables.tasks_table(suites)
    assert "| 1 of 2, errors: 1 | dropped 1×, GLError: gone 1× | `on(a, b)` 1× |" in tables.misses_table(suites)
    assert "| zero | libero_goal@openpi | 0–2 of 1 tasks | 1/2 | 0 (1 of 2) |" in tables.baselines_table({"zero": suites})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tasks", "77"], "--tasks 77: no such task in libero_goal"),
        (["--tasks", "0", "--trials", "50"], "--trials 50: libero_goal@openpi/0 has trials 0 to 49"),
        (["--trials", "-1", "--protocol", "gr00t"], "--trials -1: libero_goal@gr00t/0 has trials 0 on"),
        (["--protocol", "gr0ot"], "unknown protocol 'gr0ot' of suite 'libero_goal'"),
    ],
)
def test_what_cannot_be_played_is_refused_and_nothing_is_written(
    words: list[str], sentence: str, tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["certify_oracle.py", "--suites", "libero_goal", *words])
    with pytest.raises(SystemExit) as ended:
        tables.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_resume_plays_an_error_again_and_what_has_ended_not(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []

    class Pool:
        """Runs nothing; keeps what it is asked for."""

        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, _: object, suite: str, index: int, left: object) -> Future[dict[str, object]]:
            asked.append((suite, index, left))
            done: Future[dict[str, object]] = Future()
            done.set_result({})
            return done

    monkeypatch.setattr(tables, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tables.os, "environ", {})
    options = Namespace(suites=["libero_goal"], tasks=[0, 1], trials=[0, 1, 2], protocol="openpi", baselines=False, resume=True, workers=1)
    ends = {"0": {"outcome": "failure"}, "1": {"outcome": "error"}}
    every = {str(number): {"outcome": "success"} for number in range(3)}
    tables.play(
        options,
        tables.tasks_asked(options),
        {"oracle": {"libero_goal@openpi": {"0": {"trials": ends}, "1": {"trials": every}}}},
        tmp_path / "a",
    )
    assert asked == [("libero_goal@openpi", 0, {"oracle": [1, 2]})]


# --- the policy ------------------------------------------------------------------------------------------------------------------


def test_the_oracle_says_what_it_does_not_take() -> None:
    with pytest.raises(BadRequest, match="no bundle"):
        oracle.load("some/bundle")
    with pytest.raises(BadRequest, match="no option 'speed'"):
        oracle.load(speed=2)
    state = {"eef_pos": np.zeros(3), "eef_rot": np.zeros(3), "gripper": np.zeros(2)}
    with pytest.raises(InvalidObservation, match="privileged"):
        oracle.load().act([Request(Observation(images={}, state=state, instruction="lift"), 0, "t", 0, 0)])


def test_the_oracle_knows_no_task_suite_or_object_by_name_and_no_simulator() -> None:
    code = "\n".join(path.read_text() for path in sorted(CODE.glob("*.py"))).lower()
    assert "def act" in code
    for name in NAMES:
        assert name not in code, name
        assert name.replace("_", " ").strip() not in code or name == "libero_", name
    for word in ("import mujoco", "import robosuite", "pickle"):
        assert word not in code


@pytest.mark.libero
def test_the_oracle_is_a_policy() -> None:
    check_policy(oracle.load(), load_tasks("libero_object@openpi")[0])


@pytest.mark.libero
@pytest.mark.parametrize(("suite", "task"), [("libero_object", 0), ("libero_goal", 7)], ids=["into", "knob"])
def test_the_oracle_succeeds_where_doing_nothing_fails(libero: Callable[[str, int], LiberoEnv], suite: str, task: int) -> None:
    env, about = libero(suite, task), load_tasks(f"{suite}@openpi")[task]
    for policy, expected in ((oracle.load(), "success"), (zero(horizon=4), "failure")):
        ask = in_process(policy)
        record = rollout(env, ask, about, policy.needs, trial=0, seed=0, replan=4)
        assert record.outcome == expected, record.error
