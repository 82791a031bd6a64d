"""Video from recorded states, afterwards: any episode, camera and size, without running the policy again. H W pixels.

This draws, so it belongs into a process that holds no policy: the command line starts `vla-eval render` as one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from imageio_ffmpeg import count_frames_and_secs, write_frames
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from ..registry import load_tasks
from ..results.folder import Episode, RunFolder
from ..types import BadRequest, EpisodeRecord, Image, Interface, Task, VlaEvalError

CRF = "18"  # libx264's quality: above 40 dB on rendered scenes
FONT_PX = 13
DARK, BRIGHT, DIM, TRUE, MARK = (24, 24, 27), (244, 244, 245), (140, 140, 150), (74, 222, 128), (250, 204, 21)

Only = Literal["failures", "successes", "all"]


def render(
    folder: RunFolder,
    *,
    only: Only = "all",
    episodes: Sequence[tuple[int, int]] = (),
    cameras: Sequence[str] = (),
    size: int | None = None,
    fps: float | None = None,
    watch: Callable[[EpisodeRecord, int, int], None] = lambda record, frame, frames: None,
) -> Iterator[EpisodeRecord]:
    """Draw `episodes/<index>-<trial>.mp4` for the chosen episodes; yields each record with its `video` filled in, as the folder now has it.

    `episodes` are (task index, trial); without any, `only` chooses. No cameras means every one of the environment's interface, no size the
    run's own, no fps real time. `watch` is told of every frame. Raises BadRequest for what the run does not have.
    """
    with folder.locked():
        chosen = _chosen(folder, only, episodes)
        for task_id in dict.fromkeys(record.task for record in chosen):
            with scene(folder, task_id, size) as env:
                for record in (record for record in chosen if record.task == task_id):
                    episode = folder.episode(record.task, record.trial)
                    path = folder.episode_path(record.task, record.trial, ".mp4")
                    drawn = captioned(frames(env, episode, cameras), episode, _task(folder, task_id).instruction)
                    total = len(episode.states)
                    film(path, _watched(drawn, record, total, watch), fps or env.unwrapped.metadata["interface"].control_hz)
                    shown = replace(record, video=str(path.relative_to(folder.path)))
                    if shown != record:
                        folder.append(shown)
                    yield shown


@contextmanager
def scene(folder: RunFolder, task_id: str, size: int | None = None) -> Iterator[gymnasium.Env[Any, Any]]:
    """The environment of a run's task, made as the run made it (`size` in pixels aside), for `frames`. One serves all its episodes."""
    task = _task(folder, task_id)
    kwargs = {**task.env_kwargs, **({} if size is None else {"size": size})}
    try:
        env = gymnasium.make(task.env, disable_env_checker=True, **kwargs)
    except TypeError as error:
        raise BadRequest(f"{task.env} cannot be made with {', '.join(kwargs)}: {error}") from error
    try:
        for method in ("look", "restore"):
            if not hasattr(env.unwrapped, method):
                raise BadRequest(
                    f"{task_id}: its environment offers no {method}(), so nothing can be drawn afterwards; run it with --video"
                )
        env.reset(seed=0)  # whatever it draws is overwritten by restore
        yield env
    finally:
        env.close()


def frames(env: gymnasium.Env[Any, Any], episode: Episode, cameras: Sequence[str] = ()) -> Iterator[dict[str, Image]]:
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
    steps = len(episode.states) - 1
    names = [str(name) for name in episode.predicate_names]
    for step, views in enumerate(pictures):
        picture = beside(list(views.values()))
        width = picture.shape[1]
        lines = _wrapped(instruction, width - 12)
        line_px = FONT_PX + 4
        bar = Pillow.new("RGB", (width, line_px * (len(lines) + 1 + len(names)) + 8), DARK)
        draw = ImageDraw.Draw(bar)
        if step in asked:
            draw.rectangle((0, 0, width, 3), MARK)
        for row, line in enumerate(lines):
            draw.text((6, 4 + row * line_px), line, BRIGHT, _font())
        chunk = sum(first <= step for first in asked)
        draw.text(
            (6, 4 + len(lines) * line_px), f"step {step}/{steps}  chunk {chunk}/{len(asked)}", MARK if step in asked else DIM, _font()
        )
        for row, name in enumerate(names, len(lines) + 1):
            holds = bool(episode.predicates[step, row - len(lines) - 1])
            top = 4 + row * line_px
            draw.rectangle((6, top + 3, 6 + FONT_PX - 4, top + FONT_PX - 1), fill=TRUE if holds else None, outline=TRUE if holds else DIM)
            draw.text((6 + FONT_PX, top), name, TRUE if holds else DIM, _font())
        yield np.concatenate([picture, np.asarray(bar)])


def beside(pictures: Sequence[Image]) -> Image:
    """Pictures from left to right, black below the lower ones."""
    height = max(picture.shape[0] for picture in pictures)
    return np.concatenate([np.pad(p, ((0, height - p.shape[0]), (0, 0), (0, 0))) for p in pictures], axis=1)


def film(path: Path, pictures: Iterable[Image], fps: float) -> None:
    """Write [H, W, 3] frames as H.264 in mp4, padded at the right and bottom to even sizes, never rescaled.

    Under a temporary name first: an interrupted film leaves the old file or none. Raises BadRequest if it cannot be written.
    """
    if not 0 < fps <= 1000:
        raise BadRequest(f"{fps} frames a second cannot be filmed; give a rate above 0 and up to 1000")
    temporary = path.with_name(f".{path.stem}.part.mp4")
    writer, sent = None, 0
    try:
        for picture in pictures:
            even = np.pad(picture, ((0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)), mode="edge")
            if writer is None:
                size = (even.shape[1], even.shape[0])
                writer = write_frames(
                    temporary, size, fps=fps, codec="libx264", quality=None, macro_block_size=2, ffmpeg_log_level="fatal",
                    output_params=["-crf", CRF, "-movflags", "+faststart"],
                )  # fmt: skip
                writer.send(None)
            writer.send(np.ascontiguousarray(even))
            sent += 1
        if writer is None:
            raise BadRequest(f"{path}: an episode without frames makes no film")
        writer.close()
        if (written := count_frames_and_secs(str(temporary))[0]) != sent:
            raise VlaEvalError(f"{path}: ffmpeg wrote {written} of {sent} frames; is the disk full?")
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        raise BadRequest(f"{path}: the film cannot be written ({str(error).strip().splitlines()[0]}); is the disk full?") from error
    finally:
        if writer is not None:
            writer.close()
        temporary.unlink(missing_ok=True)


def _chosen(folder: RunFolder, only: Only, episodes: Sequence[tuple[int, int]]) -> list[EpisodeRecord]:
    played = {(int(record.task.rpartition("/")[2]), record.trial): record for record in folder.records()}
    for index, trial in episodes:
        if (index, trial) not in played:
            raise BadRequest(f"{folder.path}: no episode {index}/{trial} has been played; it has {_listed(played)}")
    if episodes:
        return [played[key] for key in dict.fromkeys(episodes)]
    outcomes = {"failures": ("failure",), "successes": ("success",), "all": ("success", "failure", "error")}[only]
    # An episode that broke before its first step has no arrays; asked for by name it is refused, among all it is passed over.
    return [r for _, r in sorted(played.items()) if r.outcome in outcomes and folder.episode_path(r.task, r.trial).exists()]


def _listed(played: Mapping[tuple[int, int], EpisodeRecord]) -> str:
    keys = [f"{index}/{trial}" for index, trial in sorted(played)]
    return "none yet" if not keys else ", ".join(keys) if len(keys) <= 10 else f"{keys[0]} to {keys[-1]}"


def _task(folder: RunFolder, task_id: str) -> Task:
    for task in load_tasks(folder.manifest.suite):
        if task.id == task_id:
            return task
    raise BadRequest(f"{folder.path}: task {task_id!r} is in no installed suite; install the plug-in that the run was made with")


def _watched(
    pictures: Iterator[Image], record: EpisodeRecord, total: int, watch: Callable[[EpisodeRecord, int, int], None]
) -> Iterator[Image]:
    for number, picture in enumerate(pictures, 1):
        yield picture
        watch(record, number, total)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _font().getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


@cache
def _font() -> Any:
    return ImageFont.load_default(FONT_PX)  # comes with Pillow: the same caption on every machine
