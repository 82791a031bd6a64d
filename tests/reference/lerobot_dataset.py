"""Current LeRobot reads our v3.0 export: every row, every frame, every instruction.

Not collected by itself, since it needs an interpreter that has lerobot 0.4 (torch, datasets and PyAV come with it):

    LEROBOT_PYTHON=~/lerobot/.venv/bin/python pytest tests/reference/lerobot_dataset.py

Its reader is used as it is, but for the picture decoder, which is PyAV picking frames by their times.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from vla_eval.policies.baseline import random
from vla_eval.registry import load_tasks
from vla_eval.results.folder import Episode, RunFolder, open_run
from vla_eval.results.lerobot import Draw, write
from vla_eval.run import render
from vla_eval.run.loop import start

READER = """
import json, sys
import av, numpy as np, torch
import lerobot.datasets.lerobot_dataset as module

def frames_at(path, times, tolerance, backend=None):
    found = []
    with av.open(str(path)) as film:
        shown = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in film.decode(video=0)]
    for time in times:
        at, picture = min(shown, key=lambda one: abs(one[0] - time))
        assert abs(at - time) < tolerance, (at, time)
        found.append(torch.from_numpy(picture.copy()).permute(2, 0, 1) / 255)
    return torch.stack(found)

module.decode_video_frames = frames_at
data = module.LeRobotDataset("ours/toy", root=sys.argv[1])
items = [data[i] for i in range(len(data))]
cameras = data.meta.camera_keys
print(json.dumps({
    "episodes": data.num_episodes, "fps": data.fps, "robot": data.meta.robot_type, "cameras": cameras,
    "state": [item["observation.state"].tolist() for item in items], "action": [item["action"].tolist() for item in items],
    "task": [item["task"] for item in items], "episode": [int(item["episode_index"]) for item in items],
    "pictures": {camera: [(item[camera].mean(dim=(1, 2)) * 255).tolist() for item in items] for camera in cameras},
    "stats": {name: {field: np.asarray(values).shape for field, values in fields.items()} for name, fields in data.meta.stats.items()},
}))
"""


@pytest.fixture(scope="session")
def python() -> str:
    path = os.environ.get("LEROBOT_PYTHON", "")
    if not Path(path).expanduser().is_file():
        pytest.fail("set LEROBOT_PYTHON to an interpreter that has lerobot 0.4")
    return str(Path(path).expanduser())


class _Studio:
    """Draws a run's episodes with its own environment."""

    def __init__(self, folder: RunFolder, task: str, size: int) -> None:
        self._scene = render.scene(folder, task, size)

    def __enter__(self) -> Draw:
        env = self._scene.__enter__()

        def draw(episode: Episode):  # type: ignore[no-untyped-def]
            return render.frames(env, episode)

        return draw

    def __exit__(self, *raised: object) -> None:
        self._scene.__exit__(*raised)  # type: ignore[arg-type]


def test_lerobot_reads_the_v3_export(python: str, tmp_path: Path) -> None:
    with start(random(horizon=4), load_tasks("toy@v1")[:2], trials=2, seed=3, workers=0, out=tmp_path / "runs") as run:
        list(run)
        assert run.folder is not None
    folder = open_run(run.folder.path)
    write([folder], tmp_path / "v3", convention="env", size=64, studio=_Studio, version="v3.0")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([python, "-c", READER, str(tmp_path / "v3")], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])

    assert (seen["episodes"], seen["fps"], seen["robot"]) == (4, 20, "panda")
    played = [(f"toy@v1/{task}", trial) for task in (0, 1) for trial in (0, 1)]
    episodes = [folder.episode(*one) for one in played]
    assert np.array_equal(np.array(seen["state"], np.float32), np.concatenate([episode.proprio[:-1] for episode in episodes]))
    assert np.array_equal(np.array(seen["action"], np.float32), np.concatenate([episode.actions for episode in episodes]))
    assert seen["episode"] == [index for index, episode in enumerate(episodes) for _ in episode.actions]
    texts = {task.id: task.instruction for task in load_tasks("toy@v1")}
    assert seen["task"] == [texts[task] for (task, _), episode in zip(played, episodes, strict=True) for _ in episode.actions]
    assert seen["cameras"] == ["observation.images.agentview", "observation.images.robot0_eye_in_hand"]
    assert seen["stats"]["action"]["mean"] == [7]
    assert seen["stats"]["observation.images.agentview"]["std"] == [3, 1, 1]
    for camera in ("agentview", "robot0_eye_in_hand"):
        means = []
        for (task, _), episode in zip(played, episodes, strict=True):
            with render.scene(folder, task, 64) as env:
                means += [views[camera].mean(axis=(0, 1)) for views in list(render.frames(env, episode))[:-1]]
        # The mean of a picture survives H.264 to a grey level or two; neighbours of another episode differ by more.
        assert np.abs(np.array(seen["pictures"][f"observation.images.{camera}"]) - np.array(means)).max() < 3
