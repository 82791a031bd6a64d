"""The one rotation formula that scipy lacks: quaternion to axis-angle without folding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """[4] x y z w -> [3] rad, the angle in 0…2π and never shortened: at the arm's rest w is nearly 0, and training data has one branch.

    robosuite's formula: angle = 2 acos(w), axis = xyz / sin(angle / 2). scipy's `as_rotvec` folds w < 0 and would jump by 2π.
    """
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    if sine == 0.0:
        return np.zeros(3)
    turned: NDArray[np.float64] = np.asarray(quaternion[:3], dtype=np.float64) * (2.0 * np.arccos(w) / sine)
    return turned
