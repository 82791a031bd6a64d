"""What an environment offers against what a policy needs: each difference has a sentence of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vla_eval.contract import check_contract
from vla_eval.types import ARM_ACTION, ARM_STATE, ContractMismatch, Interface, Meaning

OFFERS = Interface(
    cameras={"agentview": (256, 256), "robot0_eye_in_hand": (256, 256)}, state=ARM_STATE, action=ARM_ACTION, control_hz=20, privileged=True
)
NEEDS = replace(OFFERS, cameras={"agentview": (256, 256)}, state={"eef_pos": Meaning.EEF_POS_WORLD_M}, privileged=False)


@pytest.mark.parametrize(
    "change", [{}, {"control_hz": 0}, {"cameras": {}, "state": {}}, {"privileged": True}, {"action": list(ARM_ACTION)}], ids=str
)
def test_less_than_what_is_offered_is_fine(change: dict[str, Any]) -> None:
    check_contract("mine", replace(NEEDS, **change), "toy@v1/0", OFFERS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"cameras": {"wrist": (224, 224)}},
            r"mine needs camera 'wrist' \(224, 224\); toy@v1/0 offers agentview, robot0_eye_in_hand\. Choose",
        ),
        (
            {"cameras": {"agentview": (224, 224)}},
            r"mine needs camera 'agentview' at \(224, 224\); toy@v1/0 draws it at \(256, 256\)\. Choose",
        ),
        (
            {"state": {"joints": Meaning.EEF_POS_WORLD_M}},
            r"mine needs state 'joints' \(eef_pos_world_m\); toy@v1/0 offers eef_pos, eef_rot, gripper",
        ),
        (
            {"state": {"eef_pos": Meaning.GRIPPER_FINGERS_M}},
            "mine takes state 'eef_pos' as gripper_fingers_m; toy@v1/0 gives eef_pos_world_m",
        ),
        ({"action": ARM_ACTION[:6]}, "mine and toy@v1/0 do not mean the same actions: 6 numbers against 7"),
        ({"action": (*ARM_ACTION[:2], Meaning.DELTA_RX_WORLD, *ARM_ACTION[3:])}, "number 2 is delta_rx_world against delta_z_world"),
        ({"control_hz": 10}, "mine acts at 10 Hz; toy@v1/0 takes actions at 20 Hz"),
    ],
    ids=str,
)
def test_each_difference_is_named_and_says_what_to_do(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ContractMismatch, match=says) as mismatch:
        check_contract("mine", replace(NEEDS, **change), "toy@v1/0", OFFERS)
    assert str(mismatch.value).endswith(".")


def test_a_privileged_policy_needs_an_environment_that_tells() -> None:
    with pytest.raises(ContractMismatch, match=r"mine needs the simulator's truth; toy@v1/0 has no `privileged\(\)`"):
        check_contract("mine", replace(NEEDS, privileged=True), "toy@v1/0", replace(OFFERS, privileged=False))
