"""A dataset against a real pi0.5 bundle: what was trained on the environment's gripper says so of a dataset with another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vla_eval.results.lerobot_check import check
from vla_eval.results.lerobot_policy import read_needs
from vla_eval.results.lerobot_rules import Finding
from vla_eval.types import BadRequest

DEMO = Path(__file__).parents[2] / "golden/gr00t_demos/libero_demo"
# The golden statistics have one finger that never moved.
STUCK_FINGER = "observation.state[7] runs"


def about_the_policy(root: Path, bundle: Path) -> list[Finding]:
    findings = check(root, needs=read_needs(bundle), videos=False)
    return [one for one in findings if one.rule.startswith("policy") and not one.text.startswith(STUCK_FINGER)]


def test_gr00t_s_libero_set_has_another_gripper_than_pi05_and_all_else_alike(tiny: Callable[..., Path], tmp_path: Path) -> None:
    (finding,) = about_the_policy(DEMO, tiny())
    assert (finding.rule, finding.severity) == ("policy-scale", "error")
    assert finding.text == (
        "action[gripper] runs 0…1 (q01…q99), the policy's bounds are -1…0.9996; 0…1 against -1…1: another gripper than the policy's?"
    )
    root = Path(shutil.copytree(DEMO, tmp_path / "set"))
    stats = json.loads((root / "meta/stats.json").read_text())
    stats["action"]["q01"][6] = -1.0
    (root / "meta/stats.json").write_text(json.dumps(stats))
    assert about_the_policy(root, tiny()) == []


def test_a_column_of_another_width_and_a_missing_camera_are_found(tiny: Callable[..., Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(DEMO, tmp_path / "set"))
    info, modality = (json.loads((root / "meta" / file).read_text()) for file in ("info.json", "modality.json"))
    info["features"]["action"]["shape"] = [8]
    del modality["video"]["wrist_image"]
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/modality.json").write_text(json.dumps(modality))
    assert [(one.rule, one.text) for one in about_the_policy(root, tiny())] == [
        ("policy-width", "action is 8 wide; the policy has 7"),
        ("policy-camera", "camera 'wrist_image' is missing: the policy looks through image, wrist_image; there are image"),
    ]


def test_a_robot_that_learns_changes_of_joints_is_not_compared(tiny: Callable[..., Path]) -> None:
    with pytest.raises(BadRequest, match="adapter 'aloha'"):
        read_needs(tiny("pi05_aloha"))
