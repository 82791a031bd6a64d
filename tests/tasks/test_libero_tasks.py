"""LIBERO's suites and protocols: every number a score depends on, and a list that needs no simulator."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

import vla_eval
from vla_eval.envs import libero as environment
from vla_eval.registry import suites
from vla_eval.tasks import libero as tasks
from vla_eval.types import BadRequest

SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
PROTOCOLS = ["openpi", "openpi-ordered", "gr00t", "lerobot"]


@pytest.mark.parametrize(("suite", "count"), SUITES.items())
def test_each_suite_lists_its_tasks_under_four_protocols_openpi_first(suite: str, count: int) -> None:
    assert suites()[suite] == [f"{suite}@{name}" for name in PROTOCOLS]
    for name in PROTOCOLS:
        assert [task.id for task in vla_eval.load_tasks(f"{suite}@{name}")] == [f"{suite}@{name}/{k}" for k in range(count)]
    assert vla_eval.load_tasks(suite) == vla_eval.load_tasks(f"{suite}@openpi")


@pytest.mark.parametrize(
    ("protocol", "limits", "settle", "start", "seeding", "trials", "pi05"),
    [
        ("openpi", (220, 280, 300, 520, 400), 10, "rows", "episode", 50, 5),
        ("openpi-ordered", (220, 280, 300, 520, 400), 10, "rows", "ordered", 50, 5),
        ("gr00t", (720,) * 5, 0, "placement", "episode", None, 5),
        ("lerobot", (280, 280, 300, 520, 400), 10, "rows", "episode", 50, 10),
    ],
)
def test_a_protocol_is_these_numbers_and_the_environment_gets_them_all(
    protocol: str, limits: tuple[int, ...], settle: int, start: str, seeding: str, trials: int | None, pi05: int
) -> None:
    for suite, limit in zip(SUITES, limits, strict=True):
        for index, task in enumerate(vla_eval.load_tasks(f"{suite}@{protocol}")):
            assert task.max_steps == limit
            assert task.trials == trials
            assert task.replan == {"pi05": pi05, "gr00t": 8}
            assert task.env_kwargs == {
                "suite": suite, "task": index, "max_steps": limit, "settle_steps": settle, "start": start, "seeding": seeding,
                "size": 256, "pictures": "on_request",
            }  # fmt: skip
    accepted = set(signature(environment.LiberoEnv).parameters)
    assert accepted - set(task.env_kwargs) == {"render_device"}  # which card draws is the machine's, all else the task's


def test_a_bare_environment_evaluates_as_openpi_does() -> None:
    openpi = vla_eval.load_tasks("libero_10@openpi")[0].env_kwargs
    defaults = {name: p.default for name, p in signature(environment.LiberoEnv).parameters.items()}
    assert {name: defaults[name] for name in ("settle_steps", "start", "seeding", "size")} == {
        name: openpi[name] for name in ("settle_steps", "start", "seeding", "size")
    }
    assert {suite: vla_eval.load_tasks(suite)[0].max_steps for suite in SUITES} == environment.STEP_LIMITS


def test_instructions_are_lower_case_without_a_full_stop_and_told_apart() -> None:
    for suite, count in SUITES.items():
        instructions = [task.instruction for task in vla_eval.load_tasks(suite)]
        assert all(text == text.lower().strip() and text and not text.endswith(".") for text in instructions)
        if suite != "libero_90":  # which asks for some things in more than one scene
            assert len(set(instructions)) == count
    assert vla_eval.load_tasks("libero_goal")[7].instruction == "turn on the stove"
    assert vla_eval.load_tasks("libero_10")[8].instruction == "put both moka pots on the stove"


def test_a_misspelt_suite_or_protocol_gets_the_near_miss() -> None:
    with pytest.raises(BadRequest, match=r"did you mean 'libero_goal'\?"):
        vla_eval.load_tasks("libero_gaol")
    with pytest.raises(BadRequest, match=r"unknown protocol 'gr00' of suite 'libero_10'; did you mean 'gr00t'\?"):
        vla_eval.load_tasks("libero_10@gr00")


def test_listing_the_tasks_imports_no_simulator() -> None:
    script = """
import sys, vla_eval
assert len(vla_eval.load_tasks("libero_90")) == 90
print(sorted({"mujoco", "robosuite", "libero", "cv2", "OpenGL", "numba"} & set(sys.modules)))
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout == "[]\n"


@pytest.mark.libero
def test_the_table_is_the_installed_benchmarks() -> None:
    from libero.libero import benchmark

    installed = {suite: [task.language for task in benchmark.task_maps[suite].values()] for suite in SUITES}
    assert tasks._instructions() == installed
    built = benchmark.get_benchmark_dict()["libero_10"]()  # upstream's own order
    assert [built.get_task(k).language for k in range(10)] == installed["libero_10"]


@pytest.mark.libero
def test_every_task_has_as_many_stored_starts_as_the_protocols_say() -> None:
    from libero.libero import benchmark, get_libero_path

    from vla_eval.arrays import read_npz

    folder = Path(get_libero_path("init_states"))
    for suite in SUITES:
        for task in benchmark.task_maps[suite].values():
            assert read_npz(folder / suite / f"{task.init_states_file}.npz")["states"].shape[0] == tasks.STARTS
