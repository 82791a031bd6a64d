"""A dataset against a real bundle: NVIDIA's own LIBERO statistics fit the golden checkpoint's bounds, and planted faults do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vla_eval import cli
from vla_eval.results.lerobot_check import check
from vla_eval.results.lerobot_policy import read_needs
from vla_eval.results.lerobot_rules import Finding

DEMO = Path(__file__).parents[2] / "golden/gr00t_demos/libero_demo"
FIELDS = ("mean", "std", "min", "max", "q01", "q99")
# The golden checkpoint has one bound of no width on purpose; the set's second finger runs beside it.
STUCK_FINGER = "state.gripper[1] runs -0.04001…-0.00176 (q01…q99), the policy's bounds are -0.04…-0.04"
Change = Callable[[dict[str, Any]], object]


def planted(tiny: Callable[..., Path], tmp_path: Path, change: Change, file: str = "stats.json") -> list[Finding]:
    """What the bundle has against the set after a change to one of its files."""
    root = Path(shutil.copytree(DEMO, tmp_path / "set"))
    data = json.loads((root / "meta" / file).read_text())
    change(data)
    (root / "meta" / file).write_text(json.dumps(data))
    findings = check(root, needs=read_needs(tiny()), videos=False)
    return [finding for finding in findings if finding.rule.startswith("policy") and finding.text != STUCK_FINGER]


def scaled(column: str, dimensions: list[int], turn: Callable[[float], float]) -> Change:
    def change(stats: dict[str, Any]) -> None:
        for dimension in dimensions:
            for field in FIELDS:
                stats[column][field][dimension] = turn(stats[column][field][dimension])

    return change


def test_the_statistics_of_the_published_libero_set_fit(tiny: Callable[..., Path], tmp_path: Path) -> None:
    findings = [finding for finding in check(DEMO, needs=read_needs(tiny()), videos=False) if finding.rule.startswith("policy")]
    assert [(finding.rule, finding.text) for finding in findings] == [("policy-range", STUCK_FINGER)]


def test_degrees_are_found_in_every_angle(tiny: Callable[..., Path], tmp_path: Path) -> None:
    findings = planted(tiny, tmp_path, scaled("observation.state", [3, 4, 5], lambda angle: angle * 57.29578))
    assert [finding.rule for finding in findings] == ["policy-scale"] * 3
    for finding, group in zip(findings, ("roll", "pitch", "yaw"), strict=True):
        assert finding.text.startswith(f"state.{group}[0] runs ")
        assert finding.text.endswith("degrees against radians?")


def test_the_environment_s_gripper_is_found(tiny: Callable[..., Path], tmp_path: Path) -> None:
    def turned(stats: dict[str, Any]) -> None:
        stats["action"]["q01"][6], stats["action"]["q99"][6] = -1.0, 1.0

    (finding,) = planted(tiny, tmp_path, turned)
    assert (finding.rule, finding.severity) == ("policy-scale", "error")
    assert finding.text.startswith("action.gripper[0] runs -1…1 (q01…q99), the policy's bounds are 0…1")
    assert finding.text.endswith("the environment's gripper against the policy's?")


def test_the_heights_of_another_suite_are_found(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """libero_object stands on the floor: its hand moves between 1 and 26 cm, where this policy knows 45 cm to 1.26 m."""

    def floor(stats: dict[str, Any]) -> None:
        stats["observation.state"]["q01"][2], stats["observation.state"]["q99"][2] = 0.0106, 0.2632

    (finding,) = planted(tiny, tmp_path, floor)
    assert (finding.rule, finding.text.partition(" ")[0]) == ("policy-range", "state.z[0]")


def test_an_instruction_under_another_name_is_found(tiny: Callable[..., Path], tmp_path: Path) -> None:
    findings = planted(tiny, tmp_path, lambda data: data.update(annotation={"human.task": {"original_key": "task_index"}}), "modality.json")
    assert [finding.rule for finding in findings] == ["policy-language"]


def test_another_robot_s_bundle_misses_every_group_and_its_camera(
    tiny: Callable[..., Path], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = shutil.copytree(DEMO, tmp_path / "set")
    code = cli.main(["dataset", "check", str(root), "--no-video", "--json", "--against", str(tiny("simpler_env_widowx"))])
    found = [(one["rule"], one["text"].partition(" ")[0]) for one in json.loads(capfd.readouterr().out)["findings"]]
    assert code == 1
    assert [name for rule, name in found if rule == "policy-group"] == [
        "state.arm", "state.wrist_angle", "state.pad", "state.finger", "action.arm", "action.finger"
    ]  # fmt: skip
    assert [rule for rule, _ in found if rule.startswith("policy") and rule != "policy-group"] == ["policy-camera"]
