"""The picture in the README: four moments of a recorded episode, captioned. `python tools/rollout_picture.py RUN TASK/TRIAL OUT.jpg`."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from vla_eval.results.folder import open_run
from vla_eval.run import render


def picture(run: Path, index: int, trial: int, out: Path, camera: str = "agentview", size: int = 320, moments: int = 4) -> None:
    """`moments` evenly spaced frames of the episode's film, side by side, as a JPEG."""
    folder = open_run(run)
    (record,) = render.chosen(folder, episodes=[(index, trial)])
    episode = folder.episode(record.task, record.trial)
    steps = np.linspace(0, len(episode.actions), moments).round().astype(int)
    instruction = folder.manifest.protocol["tasks"][record.task]["instruction"]
    with render.scene(folder, record.task, size) as env:
        film = render.captioned(render.frames(env, episode, [camera]), episode, instruction)
        shown = [frame for step, frame in enumerate(islice(film, int(steps[-1]) + 1)) if step in steps]
    Image.fromarray(np.concatenate(shown, axis=1)).save(out, quality=88, optimize=True)


if __name__ == "__main__":
    where, episode, file = sys.argv[1:]
    task, number = episode.split("/")
    picture(Path(where), int(task), int(number), Path(file))
