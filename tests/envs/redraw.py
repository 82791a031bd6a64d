"""Another process: draw recorded states again, then play the episode from its seed. `python redraw.py RECORDING.npz` prints JSON.

The environment is built and reset under another seed and trial first, so nothing of the recording's own run is here but the file.
`drawn` are pictures of restored states, `live` those of the episode while it is played.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from vla_eval.arrays import read_npz
from vla_eval.envs.libero import LiberoEnv


def main(path: Path) -> None:
    recording = read_npz(path)
    suite, task = str(recording["suite"]), int(recording["task"])
    env = LiberoEnv(suite, task, pictures="on_request")
    env.reset(seed=99, options={"trial": 17})
    fixtures = {key.removeprefix("fixture "): pose for key, pose in recording.items() if key.startswith("fixture ")}
    drawn, live = [], []
    for step in recording["looked"]:
        env.restore(recording["states"][step], fixtures)
        drawn.append(looked(env))
    env.reset(seed=int(recording["seed"]), options={"trial": int(recording["trial"])})
    states = [env.snapshot()]
    for step, action in enumerate(recording["actions"]):
        if step in recording["looked"]:
            live.append(looked(env))
        env.step(action)
        states.append(env.snapshot())
    if len(recording["actions"]) in recording["looked"]:
        live.append(looked(env))
    same = [state.tobytes() == recorded.tobytes() for state, recorded in zip(states, recording["states"], strict=True)]
    sys.stdout.write(json.dumps({"renderer": env.hardware()["renderer"], "drawn": drawn, "live": live, "same": same}))


def looked(env: LiberoEnv) -> str:
    return hashlib.sha256(b"".join(picture.tobytes() for picture in env.look().values())).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
