"""Video files of a dataset: written frame by frame, and decoded whole to see what is in them. H W pixels."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..types import BadRequest, Image

CODEC, PIXELS = "h264", "yuv420p"
_KEY_FRAME_EVERY = 10  # training reads single frames: a reader decodes at most so many for one
_QUALITY = "18"  # x264's constant rate factor; 18 is hard to tell from the original
_LIMIT_SECONDS = 600  # to decode one episode's video


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a decoder found in a video file."""

    frames: int
    width: int
    height: int
    fps: float | None  # from the pictures' own times; None with fewer than two


def write_videos(paths: Mapping[str, Path], pictures: Iterable[Mapping[str, Image]], fps: float) -> int:
    """H.264 in mp4, one file a camera, from pictures [H, W, 3] of one size; returns the number of frames. One frame is held at a time.

    The same pictures give the same bytes. Raises BadRequest for odd sizes, which the codec does not have.
    """
    writers: dict[str, Any] = {}
    count = 0
    try:
        for views in pictures:
            for camera, path in paths.items():
                if camera not in writers:
                    writers[camera] = _writer(path, views[camera].shape, fps)
                writers[camera].send(np.ascontiguousarray(views[camera]))
            count += 1
    finally:
        for writer in writers.values():
            writer.close()
    return count


def _writer(path: Path, shape: tuple[int, ...], fps: float) -> Any:
    from imageio_ffmpeg import write_frames

    height, width = shape[:2]
    if height % 2 or width % 2:
        raise BadRequest(f"pictures of {width}x{height} cannot be stored as {CODEC}; choose an even --size")
    path.parent.mkdir(parents=True, exist_ok=True)
    options = [
        "-crf",
        _QUALITY,
        "-g",
        str(_KEY_FRAME_EVERY),
        "-sc_threshold",
        "0",
        "-threads",
        "1",
        "-fflags",
        "+bitexact",
        "-movflags",
        "+faststart",
    ]
    writer = write_frames(
        str(path), (width, height), fps=fps, codec="libx264", quality=None, macro_block_size=1, pix_fmt_in="rgb24", pix_fmt_out=PIXELS,
        output_params=options, ffmpeg_log_level="error",
    )  # fmt: skip
    writer.send(None)
    return writer


def decode(path: Path) -> Decoded:
    """Decode every frame. Raises ValueError, saying why, for a file that is no video or breaks off.

    Only the mp4 reader runs and only on this file: a "video" that is a playlist reaches neither the network nor other files.
    """
    from imageio_ffmpeg import get_ffmpeg_exe

    command = [
        get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-loglevel", "error", "-xerror", "-err_detect", "explode", "-threads", "1",
        "-protocol_whitelist", "file", "-f", "mov", "-i", str(path.absolute()),
        "-map", "0:v:0", "-fps_mode", "passthrough", "-f", "framecrc", "-",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"was not decoded within {_LIMIT_SECONDS} s") from error
    if done.returncode != 0:
        raise ValueError((done.stderr.strip().splitlines() or [f"the decoder stopped with {done.returncode}"])[-1])
    times: list[int] = []
    head: dict[str, str] = {}
    for line in done.stdout.splitlines():  # "#dimensions 0: 256x256", "#tb 0: 1/20", then a line a frame: stream, dts, pts, …
        if line.startswith("#"):
            key, _, value = line[1:].partition(" 0: ")
            head[key] = value
        else:
            times.append(int(line.split(",")[2]))
    width, _, height = head.get("dimensions", "0x0").partition("x")
    above, _, below = head.get("tb", "1/1").partition("/")
    span = (max(times) - min(times)) * int(above) / int(below) if times else 0.0
    return Decoded(len(times), int(width), int(height), (len(times) - 1) / span if span > 0 else None)
