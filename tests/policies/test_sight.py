"""What the card does to pictures, in numpy: OpenCV's, Pillow's and the processors' own bytes and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines import kernels
from vla_eval.images import fit_with_border, stretch_area
from vla_eval.policies import sight
from vla_eval.policies.gr00t import processor as gr00t
from vla_eval.policies.gr00t.contract import Pictures as How
from vla_eval.policies.pi05 import processor as pi05

LIBERO = How(resize="area", edge=256, target=(256, 256), crop=0.95)


def pictures(height: int, width: int) -> NDArray[np.uint8]:
    """[5, H, W, 3]: noise, nothing but black and white, white, nearly white, a slope."""
    rng = np.random.default_rng(height * 7 + width)
    slope = np.add.outer(np.arange(height) * 2, np.arange(width)) % 256
    return np.stack(
        [
            rng.integers(0, 256, (height, width, 3), np.uint8), rng.choice(np.array([0, 255], np.uint8), (height, width, 3)),
            np.full((height, width, 3), 255, np.uint8), np.full((height, width, 3), 254, np.uint8),
            np.repeat(slope[:, :, None], 3, 2).astype(np.uint8),
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "wanted"), [((243, 243), (256, 256)), ((121, 243), (256, 256)), ((255, 256), (256, 257)), ((5, 7), (64, 32)), ((1, 1), (8, 8))]
)
def test_enlarging_in_whole_numbers_gives_opencvs_bytes(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    by, seen = sight.area(size, wanted), pictures(*size)
    assert by is not None
    assert np.array_equal(kernels.stretch(seen, by), np.stack([stretch_area(picture, *wanted) for picture in seen]))


@pytest.mark.parametrize("size", [(256, 256), (480, 640), (720, 1280), (640, 480), (100, 100), (224, 100), (7, 9), (1, 5)])
def test_fitting_in_whole_numbers_gives_pillows_bytes(size: tuple[int, int]) -> None:
    by, seen = sight.bordered(size, 224), pictures(*size)
    assert by is not None
    assert np.array_equal(kernels.stretch(seen, by), np.stack([fit_with_border(picture, 224, 224) for picture in seen]))


def test_shrinking_by_averages_is_left_to_opencv() -> None:
    assert sight.area((300, 300), (256, 256)) is None
    assert sight.area((300, 200), (256, 256)) is None


def test_a_picture_with_very_many_pixels_is_left_to_pillow() -> None:
    assert sight.bordered((2049, 16), 224) is None
    assert sight.bordered((16, 2049), 224) is None


def other(how: Callable[..., Any]) -> Callable[..., Any]:
    """A library that is one grey level off in one pixel."""

    def off(picture: NDArray[np.uint8], *size: int) -> NDArray[np.uint8]:
        made = np.array(how(picture, *size))
        made[0, 0, 0] ^= 1
        return made

    return off


def test_a_library_that_stretches_otherwise_stretches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list(pictures(256, 256)[:2])
    sight.area.cache_clear()
    sight.bordered.cache_clear()
    monkeypatch.setattr(sight, "stretch_area", other(stretch_area))
    monkeypatch.setattr(sight, "fit_with_border", other(fit_with_border))
    try:
        assert sight.area((243, 243), (256, 256)) is None
        assert sight.bordered((256, 256), 224) is None
        for left, done in (
            (gr00t.unpacked(seen, LIBERO), [gr00t.see(one, LIBERO) for one in seen]),
            (pi05.unpacked(seen, 224), [fit_with_border(one, 224, 224) for one in seen]),
        ):
            assert np.array_equal(np.stack(left.views), np.stack(done))
    finally:
        sight.area.cache_clear()
        sight.bordered.cache_clear()


@pytest.mark.parametrize(
    "how",
    [
        LIBERO, How("area", None, (256, 320), (250, 250)), How("torchvision", 256, (256, 256), 0.95), How("area", 224, (224, 224), 0.95),
        How("area", 256, (256, 256), 1.0),
    ],
    ids=["libero", "a cut of its own", "torchvision", "enlarged for Qwen", "nothing cut"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gr00ts_pictures_become_the_numbers_that_the_host_packs(how: How, dtype: str) -> None:
    for size in ((256, 256), (480, 640), (128, 128)):
        seen = list(pictures(*size))
        wanted = gr00t.pack([gr00t.see(picture, how) for picture in seen])
        rows, columns = gr00t.seen_grid(how)
        left, reading = gr00t.unpacked(seen, how), gr00t.reading((rows * 16, columns * 16))
        by = None if left.size == reading.size else sight.area(left.size, reading.size)
        assert same_numbers(left, by, reading, wanted, dtype)


@pytest.mark.parametrize("size", [(256, 256), (224, 224), (480, 640), (90, 60)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pi05s_pictures_become_the_numbers_that_the_host_packs(size: tuple[int, int], dtype: str) -> None:
    seen = list(pictures(*size))
    left, reading = pi05.unpacked(seen, 224), pi05.reading(224)
    by = None if left.size == reading.size else sight.bordered(left.size, 224)
    assert same_numbers(left, by, reading, pi05.pixels(seen, 224), dtype)


def same_numbers(left: sight.Pictures, by: kernels.Stretch | None, reading: sight.Reading, wanted: NDArray[np.float32], dtype: str) -> bool:
    """As the kernels do it, bit for bit the host's."""
    seen = np.stack(left.views)
    numbers = reading.numbers if dtype == "float32" else kernels.narrow(reading.numbers, dtype)
    found = kernels.look_up(seen if by is None else kernels.stretch(seen, by), reading.order, numbers)
    return found.tobytes() == (wanted if dtype == "float32" else kernels.narrow(wanted, dtype)).tobytes()
