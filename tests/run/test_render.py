"""Films: what is drawn is what was played, and what is written is what was drawn."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe

from vla_eval import ActionChunk, Interface, Request, load_policy, load_tasks
from vla_eval.results.folder import RunFolder, open_run
from vla_eval.run import loop, render
from vla_eval.types import ARM_ACTION, ARM_STATE, BadRequest, Image

CAMERAS = {"agentview": (64, 64), "robot0_eye_in_hand": (64, 64)}


@dataclass(frozen=True)
class Watching:
    """Acts at random, and keeps every picture it was shown."""

    seen: dict[tuple[str, int, int], dict[str, Image]] = field(default_factory=dict)
    name: str = "watching"
    needs: Interface = field(default=Interface(cameras=CAMERAS, state=ARM_STATE, action=ARM_ACTION, control_hz=20))
    horizon: int = 8

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        for request in batch:
            self.seen[request.task, request.trial, request.step] = {k: v.copy() for k, v in request.observation["images"].items()}
        return [ActionChunk(np.random.default_rng(request.seed).uniform(-1, 1, (8, 7))) for request in batch]


def played(out: Path, policy: Any, tasks: int = 3, trials: int = 2) -> RunFolder:
    with loop.start(policy, load_tasks("toy")[:tasks], trials=trials, workers=0, out=out) as run:
        list(run)
        assert run.folder is not None
        return open_run(run.folder.path)


def decoded(path: Path) -> tuple[np.ndarray, float]:
    """[N, H, W, 3] frames, and frames a second."""
    command = [get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    found = re.search(r", (\d+)x(\d+).* ([\d.]+) fps", done.stderr.decode())  # of the file: what comes out is said after it
    assert found
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, int(found[2]), int(found[1]), 3), float(found[3])


def test_what_is_drawn_from_the_file_is_what_the_policy_saw(tmp_path: Path) -> None:
    policy = Watching()
    folder = played(tmp_path, policy)
    compared = 0
    for record in folder.records():
        episode = folder.episode(record.task, record.trial)
        with render.scene(folder, record.task) as env:
            drawn = list(render.frames(env, episode))
        assert len(drawn) == record.steps + 1
        for step in episode.request_step:
            for camera, picture in policy.seen[record.task, record.trial, int(step)].items():
                assert np.array_equal(drawn[step][camera], picture)
                compared += 1
    assert compared == 2 * len(policy.seen)


def test_every_episode_has_a_film_of_its_own_and_its_record_says_so(tmp_path: Path) -> None:
    folder = played(tmp_path, load_policy("random"), tasks=2)
    drawn = list(render.render(folder, render.chosen(folder)))
    found = {(record.task, record.trial): record.video for record in open_run(folder.path).records()}
    assert found == {(record.task, record.trial): record.video for record in drawn}
    assert sorted(map(str, found.values())) == [f"episodes/{index}-{trial}.mp4" for index in range(2) for trial in range(2)]
    assert len({(folder.path / str(video)).read_bytes() for video in found.values()}) == 4
    for record in drawn:
        pictures, fps = decoded(folder.path / str(record.video))
        assert fps == 20
        assert len(pictures) == record.steps + 1
    assert not [path for path in folder.episodes.iterdir() if path.name.startswith(".")]


def test_drawing_again_changes_no_record(tmp_path: Path) -> None:
    folder = played(tmp_path, load_policy("zero"), tasks=2, trials=1)
    list(render.render(folder, render.chosen(folder)))
    lines = (folder.path / "episodes.jsonl").read_text()
    list(render.render(folder, render.chosen(folder)))
    assert (folder.path / "episodes.jsonl").read_text() == lines


def test_a_second_run_into_the_same_folder_replaces_nothing(tmp_path: Path) -> None:
    first = played(tmp_path, load_policy("random"), tasks=1, trials=1)
    list(render.render(first, render.chosen(first)))
    before = {path: path.read_bytes() for path in first.path.rglob("*.mp4")}
    second = played(tmp_path, load_policy("zero"), tasks=1, trials=1)
    list(render.render(second, render.chosen(second)))
    assert {path: path.read_bytes() for path in first.path.rglob("*.mp4")} == before
    assert len(list(tmp_path.rglob("*.mp4"))) == 2


def test_a_film_shows_the_pictures_the_goal_and_where_the_policy_was_asked(tmp_path: Path) -> None:
    folder = played(tmp_path, load_policy("random"), trials=1)
    record = next(record for record in folder.records() if record.task == "toy@v1/2")
    episode = folder.episode(record.task, record.trial)
    with render.scene(folder, record.task, size=128) as env:
        views = list(render.frames(env, episode))
        films = list(render.captioned(iter(views), episode, "put the red block on the pad"))
    assert len({picture.shape for picture in films}) == 1
    for step, (picture, view) in enumerate(zip(films, views, strict=True)):
        assert np.array_equal(picture[:128, :128], view["agentview"])
        assert np.array_equal(picture[:128, 128:], view["robot0_eye_in_hand"])
        assert bool((picture[128, 0] == render.MARK).all()) == (step in episode.request_step)
    held = replace(episode, predicates=np.ones_like(episode.predicates))
    (green, *_) = render.captioned(iter(views), held, "put the red block on the pad")
    assert not np.array_equal(green, films[0])
    assert (green[128:] == render.TRUE).all(axis=2).any()
    assert not (films[0][128:] == render.TRUE).all(axis=2).any()


def test_a_caption_is_wrapped_and_not_cut(tmp_path: Path) -> None:
    for text in (
        "go",
        "pick up the red block and put it down again",
        "an_endless_name_" * 9,
        "in(chocolate_pudding_1, basket_1_contain_region)",
    ):
        lines = render._wrapped(text, 90)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert max(render._font().getlength(line) for line in lines) <= 90
    folder = played(tmp_path, load_policy("zero"), trials=1)
    record = folder.records()[0]
    episode = folder.episode(record.task, record.trial)
    blank = [{"a": np.zeros((64, 200, 3), np.uint8)}] * len(episode.states)
    short, long = (next(render.captioned(iter(blank), episode, text)) for text in ("go", "go to the " + "far and distant " * 12))
    assert long.shape[1] == short.shape[1] == 200
    assert long.shape[0] > short.shape[0] + 60


def test_cameras_and_size_are_chosen(tmp_path: Path) -> None:
    folder = played(tmp_path, load_policy("zero"), trials=1)
    (record,) = render.chosen(folder, episodes=[(1, 0)])
    (shown,) = render.render(folder, [record], cameras=["robot0_eye_in_hand"], size=97, fps=5)
    pictures, fps = decoded(folder.path / str(shown.video))
    assert pictures.shape[2] == 98
    assert fps == 5
    with pytest.raises(BadRequest, match="wrist"):
        list(render.render(folder, [record], cameras=["wrist"]))
    with pytest.raises(BadRequest, match="0 frames a second"):
        list(render.render(folder, [record], fps=0))


def test_only_chooses_by_outcome(tmp_path: Path) -> None:
    folder = played(tmp_path, load_policy("random"), trials=4)
    outcomes = {name: {record.outcome for record in render.chosen(folder, name)} for name in ("failures", "successes")}
    assert outcomes["failures"] <= {"failure"}
    assert outcomes["successes"] <= {"success"}
    assert len(render.chosen(folder, "failures")) + len(render.chosen(folder, "successes")) == len(render.chosen(folder)) == 12
    assert render.chosen(folder, "failures")


def test_an_episode_that_was_not_played_is_refused_with_what_there_is(tmp_path: Path) -> None:
    folder = played(tmp_path, load_policy("zero"), trials=1)
    with pytest.raises(BadRequest, match=r"no episode 0/7 has been played; there are 0/0, 1/0, 2/0"):
        render.chosen(folder, episodes=[(0, 7)])


def test_a_run_that_is_being_written_is_not_drawn(tmp_path: Path) -> None:
    folder = played(tmp_path, load_policy("zero"), trials=1)
    with folder.locked(), pytest.raises(BadRequest, match="another process"):
        list(render.render(folder, render.chosen(folder)))


def test_a_run_folder_does_not_say_which_module_is_imported(tmp_path: Path) -> None:
    folder = played(tmp_path, load_policy("zero"), tasks=1, trials=1)
    manifest = json.loads((folder.path / "manifest.json").read_text())
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    for task in manifest["protocol"]["tasks"].values():
        task["env"] = "evil:Evil-v0"
    (folder.path / "manifest.json").write_text(json.dumps(manifest))
    again = open_run(folder.path)
    assert list(render.render(again, render.chosen(again)))


def test_an_environment_that_cannot_draw_afterwards_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = played(tmp_path, load_policy("zero"), trials=1)

    class Plain(gymnasium.Env[Any, Any]):
        pass

    monkeypatch.setattr(render, "open_env", lambda task: Plain())
    with pytest.raises(BadRequest, match=r"no look\(\), so nothing can be drawn afterwards"):
        list(render.render(folder, render.chosen(folder)))
