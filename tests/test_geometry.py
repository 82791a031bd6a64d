"""Axis-angle without folding. The table was made with scipy, the long way round where w < 0, and held against the simulator's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vla_eval.geometry import axis_angle

TABLE = json.loads((Path(__file__).parent / "cases" / "conventions" / "quaternions.json").read_text())


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["name"])
def test_a_quaternion_becomes_the_axis_angle_of_the_table_and_stays_unchanged(row: dict[str, object]) -> None:
    quaternion = np.array(row["quat_xyzw"])
    before = quaternion.copy()
    quaternion.setflags(write=False)
    assert axis_angle(quaternion) == pytest.approx(np.array(row["axis_angle"]), abs=TABLE["atol"])
    assert (quaternion == before).all()


def test_neighbours_on_both_sides_of_a_half_turn_stay_neighbours() -> None:
    rows = {row["name"]: np.array(row["quat_xyzw"]) for row in TABLE["rows"]}
    short, past = axis_angle(rows["just short of a half turn"]), axis_angle(rows["just past a half turn"])
    assert short[0] == pytest.approx(3.13998, abs=1e-5)
    assert past[0] == pytest.approx(3.14038, abs=1e-5)
