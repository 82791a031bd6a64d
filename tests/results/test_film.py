"""Films on the disk: whole or not there, every pixel where it was."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe

from vla_eval.results.film import Film, beside, film
from vla_eval.types import BadRequest, Image

CASES = Path(__file__).parent.parent / "cases" / "video"
BLACK: Image = np.zeros((16, 16, 3), np.uint8)


def decoded(path: Path) -> tuple[np.ndarray, float]:
    """[N, H, W, 3] frames, and frames a second."""
    command = [get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    found = re.search(r", (\d+)x(\d+).* ([\d.]+) fps", done.stderr.decode())  # of the file: what comes out is said after it
    assert found
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, int(found[2]), int(found[1]), 3), float(found[3])


def decibels(found: np.ndarray, wanted: np.ndarray) -> float:
    """Peak signal to noise."""
    return float(10 * np.log10(255**2 / max(float(np.mean((found.astype(float) - wanted.astype(float)) ** 2)), 1e-9)))


@pytest.mark.parametrize(
    ("name", "size"), [("both_odd", (256, 258)), ("height_odd", (256, 256)), ("width_odd", (256, 258)), ("one_pixel", (2, 2))]
)
def test_odd_sizes_are_padded_at_the_right_and_bottom_and_never_rescaled(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    frames = np.load(CASES / "odd_frames.npz")[name]
    film(tmp_path / "a.mp4", iter(frames), 20)
    found, fps = decoded(tmp_path / "a.mp4")
    assert found.shape == (len(frames), *size, 3)
    assert fps == 20
    height, width = frames.shape[1:3]
    assert decibels(found[:, :height, :width], frames) >= 35  # padding gives 40 and more here, any rescaling below 19


def test_an_interrupted_film_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")

    def frames() -> Iterator[Image]:
        yield BLACK
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        film(path, frames(), 20)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.mp4", b"old")]


@pytest.mark.parametrize("fps", [0, -1, float("nan"), 1e9])
def test_a_film_needs_a_rate(tmp_path: Path, fps: float) -> None:
    with pytest.raises(BadRequest, match="frames a second"):
        film(tmp_path / "a.mp4", iter([BLACK]), fps)


def test_a_film_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be written"):
        film(tmp_path / "nowhere" / "a.mp4", iter([BLACK] * 3), 20)


def test_a_film_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="without frames"):
        film(tmp_path / "a.mp4", iter(()), 20)


def test_a_film_that_did_not_fit_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; import numpy as np; from vla_eval.results.film import film\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "noise = np.random.default_rng(0).integers(0, 255, (30, 64, 64, 3), np.uint8)\n"
        "film(Path('a.mp4'), iter(noise), 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "BadRequest: a.mp4: the film cannot be written" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_frames_of_two_sizes_stand_side_by_side() -> None:
    picture = beside([np.full((4, 2, 3), 9, np.uint8), np.full((2, 3, 3), 7, np.uint8)])
    assert picture.shape == (4, 5, 3)
    assert (picture[:, :2] == 9).all()
    assert (picture[:2, 2:] == 7).all()
    assert (picture[2:, 2:] == 0).all()


def test_a_film_left_open_is_dropped_without_a_trace(tmp_path: Path) -> None:
    writing = Film(tmp_path / "a.mp4", 20)
    writing.add(BLACK)
    writing.drop()
    assert list(tmp_path.iterdir()) == []
