"""H.264 in mp4, frame by frame: padded to even sizes, never rescaled, whole or not there. H W pixels."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np

from ..types import BadRequest, Image

CRF = "18"  # libx264's constant rate factor; above 40 dB on rendered scenes
MOST_FPS = 1000.0


class Film:
    """A film being written: a context manager that keeps the old file, or none, if it is left by an exception.

    Raises BadRequest, with ffmpeg's own words, if the film cannot be written.
    """

    def __init__(self, path: Path, fps: float) -> None:
        if not 0 < fps <= MOST_FPS:
            raise BadRequest(f"{fps} frames a second cannot be filmed; give a rate above 0 and up to {MOST_FPS:g}")
        self._path, self._fps = path, fps
        self._temporary = path.with_name(f".{path.stem}.{os.getpid()}.part.mp4")
        self._ffmpeg: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by drop; a pipe that nobody reads would fill and stop it

    def add(self, picture: Image) -> None:
        """The next frame, [H, W, 3]; an odd width or height gets one more column at the right or row at the bottom."""
        even = np.pad(picture, ((0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)), mode="edge")
        if self._ffmpeg is None:
            self._ffmpeg = self._started(even.shape[1], even.shape[0])
        assert self._ffmpeg.stdin is not None
        try:
            self._ffmpeg.stdin.write(even.tobytes())
        except OSError:  # it has ended before its time
            self._ended()

    def close(self) -> None:
        """Finish the film and put it in its place."""
        if self._ffmpeg is None:
            raise BadRequest(f"{self._path}: an episode without frames makes no film")
        self._ended()
        self._temporary.replace(self._path)

    def __enter__(self) -> Film:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.drop()

    def drop(self) -> None:
        """Leave nothing of an unfinished film; after `close` this does nothing."""
        if self._ffmpeg is not None:
            with contextlib.suppress(OSError), self._ffmpeg:  # closes the pipe and waits
                self._ffmpeg.kill()
        self._temporary.unlink(missing_ok=True)
        self._said.close()

    def _started(self, width: int, height: int) -> subprocess.Popen[bytes]:
        from imageio_ffmpeg import get_ffmpeg_exe

        command = [
            get_ffmpeg_exe(), "-y", "-nostdin", "-loglevel", "error",
            "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self._fps:.6g}", "-i", "pipe:0",
            "-an", "-c:v", "libx264", "-crf", CRF, "-pix_fmt", "yuv420p", "-movflags", "+faststart", str(self._temporary.absolute()),
        ]  # fmt: skip
        # In a group of its own: Ctrl-C is ours to deal with.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said, process_group=0)

    def _ended(self) -> None:
        assert self._ffmpeg is not None
        with contextlib.suppress(OSError):
            self._ffmpeg.communicate()
        if self._ffmpeg.returncode != 0:
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").strip().splitlines()
            raise BadRequest(
                f"{self._path}: the film cannot be written ({lines[-1] if lines else 'ffmpeg was stopped'}); is the disk full?"
            )


def film(path: Path, pictures: Iterable[Image], fps: float) -> None:
    """Write all frames as one film."""
    with Film(path, fps) as writing:
        for picture in pictures:
            writing.add(picture)


def beside(pictures: Iterable[Image]) -> Image:
    """Pictures from left to right, black below the lower ones."""
    row = list(pictures)
    height = max(picture.shape[0] for picture in row)
    return np.concatenate([np.pad(p, ((0, height - p.shape[0]), (0, 0), (0, 0))) for p in row], axis=1)
