"""Write envs/certificate.json and envs/certificate.npz: what an installation that scores right does, for `vla-eval doctor --certify`.

`python tools/make_certificate.py` records one task of each suite: an episode of the oracle that succeeds, and the pictures of its start.
`--pictures` draws the recorded starts again and adds the digests under this machine's mujoco and renderer to those of others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from vla_eval.arrays import write_npz
from vla_eval.envs.certificate import FIXTURE, PROTOCOL, digest, drawn_by, recordings, shrunk
from vla_eval.envs.libero import CAMERAS, LiberoEnv
from vla_eval.registry import load_policy, load_tasks
from vla_eval.results.folder import read_episode
from vla_eval.run.episode import episode_seed, in_process, rollout
from vla_eval.run.recorders import ArrayRecorder
from vla_eval.types import Vector

SEED, TRIAL = 0, 0
# Suite -> task and an object that is easily seen. Each suite shows another predicate: On, In, Open, Turnon and On, Close.
TASKS = {
    "libero_spatial": (5, "akita_black_bowl_1"),
    "libero_object": (0, "alphabet_soup_1"),
    "libero_goal": (0, "akita_black_bowl_1"),
    "libero_10": (2, "moka_pot_1"),
    "libero_90": (0, "akita_black_bowl_1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true", help="add this machine's mujoco and renderer; record nothing else")
    path = Path(__file__).parents[1] / "envs" / "certificate.json"
    if parser.parse_args().pictures:
        words: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for suite, recorded in recordings().items():
            with closing(LiberoEnv(**recorded.played.env_kwargs)) as env:
                env.reset(seed=recorded.seed, options={"trial": recorded.trial})
                words[suite]["pictures"] |= drawn(env, recorded.start, dict(recorded.fixtures))[0]
    else:
        words = {}
        arrays: dict[str, Vector] = {}
        for suite, (task, name) in TASKS.items():
            words[suite], own = record(suite, task, name)
            arrays |= {f"{suite} {key}": array for key, array in own.items()}
        write_npz(path.with_suffix(".npz"), arrays)
    path.write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")


def record(suite: str, number: int, name: str) -> tuple[dict[str, Any], dict[str, Vector]]:
    """What the files say of a suite: words and arrays."""
    task, policy = load_tasks(f"{suite}@{PROTOCOL}")[number], load_policy("oracle")
    with tempfile.TemporaryDirectory() as folder, closing(LiberoEnv(**task.env_kwargs)) as env:
        file = Path(folder, "episode.npz")
        ask, recorder = in_process(policy), ArrayRecorder(file)
        played = rollout(env, ask, task, policy.needs, trial=TRIAL, seed=SEED, replan=policy.horizon, recorders=[recorder])
        assert played.outcome == "success", played
        episode = read_episode(file)
        pictures, small = drawn(env, episode.states[0], episode.fixtures)
    words = {
        "task": number,
        "trial": TRIAL,
        "seed": episode_seed(SEED, task.id, TRIAL),
        "object": name,
        "max_steps": task.max_steps,
        "pictures": pictures,
    }
    fixtures = {f"{FIXTURE}{fixture}": pose for fixture, pose in episode.fixtures.items()}
    return words, {"actions": episode.actions, "start": episode.states[0], "end": episode.states[-1], **small, **fixtures}


def drawn(env: LiberoEnv, start: Vector, fixtures: dict[str, Vector]) -> tuple[dict[str, dict[str, str]], dict[str, Vector]]:
    """Mujoco and renderer -> camera -> digest, and camera -> what the picture looks like."""
    env.restore(start, fixtures)
    pictures = env.look(CAMERAS)
    digests = {camera: digest(picture) for camera, picture in pictures.items()}
    return {drawn_by(env): digests}, {camera: shrunk(picture) for camera, picture in pictures.items()}


if __name__ == "__main__":
    main()
