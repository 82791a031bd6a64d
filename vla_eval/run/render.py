"""Video from recorded states, afterwards: any episode, camera and size, without running the policy again. H W pixels.

This draws, so it belongs into a process that holds no policy: the command line starts `vla-eval render` as one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from ..contract import Env, open_env
from ..registry import load_tasks
from ..results.film import beside, film
from ..results.folder import Episode, RunFolder
from ..types import BadRequest, EpisodeRecord, Image, Interface, Outcome

FONT_PX, LINE_PX, EDGE = 13, 17, 6
DARK, BRIGHT, DIM, TRUE, MARK = (24, 24, 27), (244, 244, 245), (140, 140, 150), (74, 222, 128), (250, 204, 21)

Colour = tuple[int, int, int]
Only = Literal["failures", "successes", "all"]
OUTCOMES: Mapping[Only, tuple[Outcome, ...]] = {
    "failures": ("failure",),
    "successes": ("success",),
    "all": ("success", "failure", "error"),
}


def chosen(folder: RunFolder, only: Only = "all", episodes: Sequence[tuple[int, int]] = ()) -> list[EpisodeRecord]:
    """The records of `episodes`, (task index, trial) each, or else of `only`'s outcomes. Raises BadRequest for what was not played."""
    played = {(int(record.task.rpartition("/")[2]), record.trial): record for record in folder.records()}
    for index, trial in episodes:
        if (index, trial) not in played:
            raise BadRequest(f"{folder.path}: no episode {index}/{trial} has been played; there are {_listed(sorted(played))}")
    if episodes:
        return [played[key] for key in dict.fromkeys(episodes)]
    # An episode that broke before its first step has no arrays: asked for by name it is refused, among all it is passed over.
    kept = (record for _, record in sorted(played.items()) if record.outcome in OUTCOMES[only])
    return [record for record in kept if folder.episode_path(record.task, record.trial).exists()]


def render(
    folder: RunFolder, records: Sequence[EpisodeRecord], *, cameras: Sequence[str] = (), size: int | None = None, fps: float | None = None
) -> Iterator[EpisodeRecord]:
    """Draw `episodes/<index>-<trial>.mp4` of each record; yields it with its `video` filled in, as the folder now has it.

    No cameras means every one of the environment's interface, no size the run's own, no fps real time. Raises BadRequest for what cannot
    be drawn, and while another process writes the run.
    """
    with folder.locked():
        for task_id in dict.fromkeys(record.task for record in records):
            with scene(folder, task_id, size) as env:
                hz = env.unwrapped.metadata["interface"].control_hz if fps is None else fps
                for record in (record for record in records if record.task == task_id):
                    episode = folder.episode(record.task, record.trial)
                    path = folder.episode_path(record.task, record.trial, ".mp4")
                    film(path, captioned(frames(env, episode, cameras), episode, _numbers(folder, task_id)["instruction"]), hz)
                    shown = replace(record, video=str(path.relative_to(folder.path)))
                    if shown != record:
                        folder.append(shown)
                    yield shown


@contextmanager
def scene(folder: RunFolder, task_id: str, size: int | None = None) -> Iterator[Env]:
    """The environment of a run's task, made with the run's numbers (`size` in pixels aside), for `frames`. One serves all its episodes."""
    # By name from an installed suite: a run folder from elsewhere does not get to say which module is imported.
    task = next((task for task in load_tasks(folder.manifest.suite) if task.id == task_id), None)
    if task is None:
        raise BadRequest(f"{folder.path}: no installed suite has task {task_id!r}; install the plug-in that the run was made with")
    kwargs = {**_numbers(folder, task_id)["env_kwargs"], **({} if size is None else {"size": size})}
    try:
        env = open_env(replace(task, env_kwargs=kwargs))
    except TypeError as error:
        raise BadRequest(f"{task_id}: its environment cannot be made with {', '.join(kwargs)} ({error})") from error
    with closing(env):
        for method in ("look", "restore"):
            if not hasattr(env.unwrapped, method):
                raise BadRequest(f"{task_id}: its environment has no {method}(), so nothing can be drawn afterwards; run it with --video")
        env.reset(seed=0)  # builds the scene; restore then says what is where
        yield env


def frames(env: Env, episode: Episode, cameras: Sequence[str] = ()) -> Iterator[dict[str, Image]]:
    """The T+1 recorded states of an episode, each as camera -> [H, W, 3] uint8 RGB, upright; `env` comes from `scene`.

    The picture before action t is number t, bit-identical to the one that the policy got there, if it asked. Raises BadRequest for an
    episode without states.
    """
    simulated: Any = env.unwrapped
    offered: Interface = simulated.metadata["interface"]
    if episode.states.shape[1] == 0:
        raise BadRequest("the episode holds no simulator states, so it cannot be drawn afterwards; run it again with --video")
    for state in episode.states:
        simulated.restore(state, episode.fixtures)
        yield simulated.look(tuple(cameras) or tuple(offered.cameras))


def captioned(pictures: Iterable[Mapping[str, Image]], episode: Episode, instruction: str) -> Iterator[Image]:
    """Every camera side by side, and under them: the instruction, step and chunk, and each predicate of the goal (green: holds).

    A yellow bar marks the frames at which the policy was asked.
    """
    asked = episode.request_step.tolist()
    last = len(episode.states) - 1
    for step, views in enumerate(pictures):
        picture = beside(views.values())
        width = picture.shape[1]
        now = MARK if step in asked else DIM
        lines: list[tuple[str, Colour, bool | None]] = [(line, BRIGHT, None) for line in _wrapped(instruction, width - 2 * EDGE)]
        lines.append((f"step {step}/{last}  chunk {sum(first <= step for first in asked)}/{len(asked)}", now, None))
        for name, holds in zip(map(str, episode.predicate_names), map(bool, episode.predicates[step]), strict=True):
            first, *more = _wrapped(name, width - 2 * EDGE - FONT_PX)
            lines += [(first, TRUE if holds else DIM, holds), *((line, TRUE if holds else DIM, None) for line in more)]
        yield np.concatenate([picture, _bar(width, lines, MARK if step in asked else DARK)])


def _bar(width: int, lines: Sequence[tuple[str, Colour, bool | None]], edge: Colour) -> Image:
    """Lines of text under an edge; a line that is true or false has a box, full or empty, before it."""
    bar = Pillow.new("RGB", (width, LINE_PX * len(lines) + EDGE + 2), DARK)
    draw = ImageDraw.Draw(bar)
    draw.rectangle((0, 0, width, 3), edge)
    for row, (line, colour, box) in enumerate(lines):
        left, top = EDGE, 4 + row * LINE_PX
        if box is not None:
            left += FONT_PX
            draw.rectangle((EDGE, top + 3, EDGE + FONT_PX - 4, top + FONT_PX - 1), fill=TRUE if box else None, outline=colour)
        draw.text((left, top), line, colour, _font())
    return np.asarray(bar)


def _numbers(folder: RunFolder, task_id: str) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = folder.manifest.protocol["tasks"][task_id]
    except KeyError:
        raise BadRequest(f"{folder.path}: its manifest says nothing about task {task_id!r}; it is no whole run folder") from None
    return found


def _listed(played: Sequence[tuple[int, int]]) -> str:
    names = [f"{index}/{trial}" for index, trial in played]
    return "none yet" if not names else ", ".join(names) if len(names) <= 10 else f"{len(names)}, {names[0]} to {names[-1]}"


def _wrapped(text: str, width: int) -> list[str]:
    """Lines that fit: broken between words, and inside a word that is too long for a line."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if _font().getlength(longer) <= width:
            lines[-1] = longer
            continue
        lines += [""] if lines[-1] else []
        for letter in word:
            if lines[-1] and _font().getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines


@cache
def _font() -> Any:
    return ImageFont.load_default(FONT_PX)  # comes with Pillow: the same caption on every machine
