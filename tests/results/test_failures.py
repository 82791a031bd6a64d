"""Each scripted way to fail lands in its bin, and no success in any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from vla_eval.results import failures
from vla_eval.results.failures import Bin
from vla_eval.types import EpisodeRecord

WAYS = {
    "idle": Bin.NEVER_REACHED,
    "nudge": Bin.NOT_GRASPED,
    "wrong": Bin.WRONG_OBJECT,
    "drop": Bin.LOST,
    "freeze": Bin.NOT_PLACED,
    "undo": Bin.UNDONE,
    "slow": Bin.SLOW,
}


def record(outcome: str, error: str | None = None) -> EpisodeRecord:
    return EpisodeRecord("t/0", 0, 0, outcome, 1, 1, 1, 1.0, 1.0, error=error)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("way", "wanted"), WAYS.items(), ids=list(WAYS))
def test_a_way_to_fail_lands_in_its_bin(make_runs: ModuleType, way: str, wanted: Bin, seed: int) -> None:
    assert failures.bin_of(record("failure"), make_runs.episode(way, seed)) is wanted


@pytest.mark.parametrize("seed", range(5))
def test_a_success_lands_in_no_bin(make_runs: ModuleType, seed: int) -> None:
    assert failures.bin_of(record("success"), make_runs.episode("success", seed)) is None


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        ("InvalidAction: at step 3 action 0 of the chunk is nan in dimension 2", Bin.POLICY_ERROR),
        ("PolicyFailed: the policy answered with dict, not with an ActionChunk", Bin.POLICY_ERROR),
        ("RuntimeError: no GL context", Bin.HARNESS_ERROR),
        (None, Bin.HARNESS_ERROR),
    ],
)
def test_errors_are_sorted_by_whose_they_are(error: str | None, wanted: Bin) -> None:
    assert failures.bin_of(record("error", error), None) is wanted


def test_a_goal_about_a_door_can_be_judged_by_its_predicates_only(make_runs: ModuleType) -> None:
    idle = make_runs.episode("idle", 0)
    assert failures.sort(replace(idle, predicate_names=np.array(["open(microwave)"]))) is Bin.NO_OBJECT
    opened = np.zeros_like(idle.predicates)
    opened[30:60] = True
    assert failures.sort(replace(idle, predicates=opened, predicate_names=np.array(["open(microwave)"]))) is Bin.UNDONE


def test_the_place_a_thing_belongs_to_is_no_wrong_object_even_if_the_goal_names_only_a_region_of_it(make_runs: ModuleType) -> None:
    idle = make_runs.episode("idle", 0)
    bumped = idle.objects.copy()
    bumped[50:, 2, 0] += 0.05  # the plate
    for goal in ("on(soup, plate)", "in(soup, plate_contain_region)"):
        assert failures.sort(replace(idle, objects=bumped, predicate_names=np.array([goal]))) is Bin.NEVER_REACHED
    assert failures.sort(replace(idle, objects=bumped, predicate_names=np.array(["in(soup, plate2_region)"]))) is Bin.WRONG_OBJECT


@pytest.mark.parametrize(
    ("soup_m", "milk_m", "wanted"),
    [
        (0.001, 0.0, Bin.NEVER_REACHED),  # as far as things drift by themselves
        (0.008, 0.0, Bin.NOT_GRASPED),  # the fingers brushed it
        (0.008, 0.02, Bin.NOT_GRASPED),
        (0.14, 0.12, Bin.NOT_GRASPED),  # both were pushed, the right one farther
        (0.008, 0.12, Bin.WRONG_OBJECT),
        (0.0, 0.02, Bin.NEVER_REACHED),
    ],
)
def test_who_pushed_two_objects_is_judged_by_the_one_pushed_farther(
    make_runs: ModuleType, soup_m: float, milk_m: float, wanted: Bin
) -> None:
    idle = make_runs.episode("idle", 0)
    pushed = idle.objects.copy()
    pushed[40:, 0, 0] += soup_m
    pushed[40:, 1, 1] -= milk_m
    assert failures.sort(replace(idle, objects=pushed)) is wanted


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ([50], Bin.NOT_GRASPED),  # both fingers brushed it
        ([50, 51], Bin.NOT_GRASPED),
        ([30, 50, 70, 90], Bin.NOT_GRASPED),
        ([50, 51, 52], Bin.LOST),
        ([50, 52, 54], Bin.LOST),  # contact flickers
        ([119], Bin.NOT_GRASPED),
        ([118, 119, 120], Bin.NOT_PLACED),
    ],
    ids=str,
)
def test_a_grasp_lasts(make_runs: ModuleType, states: list[int], wanted: Bin) -> None:
    nudge = make_runs.episode("nudge", 0)
    held = nudge.held.copy()
    held[states, 0] = True
    assert failures.sort(replace(nudge, held=held)) is wanted


@pytest.mark.parametrize(
    ("axis", "degrees", "wanted"),
    [("z", 0, Bin.SLOW), ("z", 140, Bin.SLOW), ("x", 10, Bin.SLOW), ("x", 90, Bin.NOT_GRASPED), ("y", -90, Bin.NOT_GRASPED)],
)
def test_what_was_pushed_is_on_its_way_and_what_was_knocked_over_only_rolls(
    make_runs: ModuleType, axis: str, degrees: float, wanted: Bin
) -> None:
    idle = make_runs.episode("idle", 0)
    pushed = idle.objects.copy()
    pushed[-40:, 0, 0] += np.linspace(0, 0.1, 40, dtype=np.float32)
    start = Rotation.from_euler("xyz", [0.4, -1.2, 2.0])  # a body's own frame may stand in any way
    pushed[:, 0, 3:] = start.as_quat()
    pushed[-40:, 0, 3:] = (Rotation.from_euler(axis, degrees, degrees=True) * start).as_quat()
    assert failures.sort(replace(idle, objects=pushed)) is wanted


def test_where_the_goal_is_a_door_an_object_that_was_moved_instead_is_the_wrong_one(make_runs: ModuleType) -> None:
    wrong = make_runs.episode("wrong", 0)
    assert failures.sort(replace(wrong, predicate_names=np.array(["open(microwave)"]))) is Bin.WRONG_OBJECT


def test_the_second_of_two_conjuncts_decides_once_the_first_holds(make_runs: ModuleType) -> None:
    wrong = make_runs.episode("wrong", 0)  # carries the milk
    names = np.array(["on(milk, plate)", "on(soup, plate)"])
    met = np.zeros((len(wrong.predicates), 2), bool)
    met[70:, 0] = True
    assert failures.sort(replace(wrong, predicate_names=names, predicates=met)) is Bin.NEVER_REACHED  # the milk was wanted
    met[:] = False
    met[-5:, 0] = True
    assert failures.sort(replace(wrong, predicate_names=names, predicates=met)) is Bin.SLOW  # the first was only just placed


def test_every_episode_of_a_run_that_did_not_succeed_has_one_bin(make_runs: ModuleType, tmp_path: Path) -> None:
    ways = [*make_runs.TAUGHT, "error: RuntimeError: no GL context"]
    folder = make_runs.make_run(tmp_path, lambda task, trial: ways[(task + trial) % len(ways)], trials=9)
    found = failures.bins(folder)
    lost = [r for r in folder.records() if r.outcome != "success"]
    assert found.keys() == {(r.task, r.trial) for r in lost}
    assert {bin_.value for bin_ in found.values()} == {*make_runs.TAUGHT.values(), "harness error"} - {"success"}
    assert sum(sum(row.values()) for row in failures.by_task(found).values()) == len(lost)
    assert "| harness error |" in failures.failures_markdown(found)
    told = failures.failures_json(found)
    assert told["episodes"][0] == {"task": "shop@fair/0", "trial": 1, "bin": "never reached the object"}  # trial 0 succeeded
    assert sum(sum(row.values()) for row in told["by_task"].values()) == len(lost)


def test_lost_arrays_are_said_and_not_guessed(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path, lambda task, trial: "drop")
    folder.episode_path("shop@fair/0", 1).write_bytes(b"torn")
    assert failures.bins(folder)["shop@fair/0", 1] is Bin.UNREADABLE
    assert failures.bins(folder)["shop@fair/0", 2] is Bin.LOST
