"""Pictures resized, padded and cropped against values made by other libraries, and what must hold for any picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vla_eval import images
from vla_eval.arrays import read_npz

CASES = read_npz(Path(__file__).parent / "cases/conventions/pictures.npz")  # [H, W] grey zone plates, and both models' results
SIZES = ["128x128", "224x224", "256x256", "120x160"]


def rgb(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.repeat(plane[..., None], 3, axis=2)


@pytest.mark.parametrize("size", SIZES)
def test_fit_with_border_is_pillows_antialiased_bilinear(size: str) -> None:
    fitted = images.fit_with_border(rgb(CASES[f"in_{size}"]), 224, 224)
    np.testing.assert_array_equal(fitted, rgb(CASES[f"pi05_{size}"]))


@pytest.mark.parametrize("size", SIZES)
def test_stretch_area_twice_is_the_letterboxed_centre_crop(size: str) -> None:
    square = images.stretch_area(images.pad_to_square(rgb(CASES[f"in_{size}"])), 256, 256)
    seen = images.stretch_area(images.crop_centre(square, 243, 243), 256, 256)
    np.testing.assert_array_equal(seen, rgb(CASES[f"gr00t_{size}"]))


def test_other_filters_are_far_from_the_area_filter() -> None:
    square = images.crop_centre(rgb(CASES["in_256x256"]), 243, 243)
    bilinear = images.stretch_antialiased(square, 256, 256).astype(int)  # enlarging: no antialias, plain bilinear
    assert np.abs(bilinear - CASES["gr00t_256x256"][..., None]).max() > 10


def test_an_odd_pixel_goes_to_the_right_and_to_the_bottom() -> None:
    white = np.full((5, 2, 3), 255, np.uint8)
    assert images.pad_to_square(white)[0, :, 0].tolist() == [0, 255, 255, 0, 0]
    numbered = np.arange(5, dtype=np.uint8)[:, None, None].repeat(5, 1).repeat(3, 2)
    assert images.crop_centre(numbered, 2, 5)[:, 0, 0].tolist() == [1, 2]


def test_mirror_exchanges_left_and_right_only() -> None:
    shape = read_npz(Path(__file__).parent / "cases/conventions/l_shape.npz")
    np.testing.assert_array_equal(images.mirror(shape["upright"]), shape["policy"])
    np.testing.assert_array_equal(shape["raw"][::-1], shape["upright"])


def test_a_crop_larger_than_the_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot crop 6x4 out of 5x5"):
        images.crop_centre(np.zeros((5, 5, 3), np.uint8), 6, 4)


sides = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(sides, sides, sides, sides, st.integers(0, 255))
def test_every_resize_keeps_a_flat_picture_flat_and_gives_the_size_asked_for(h: int, w: int, tall: int, wide: int, grey: int) -> None:
    picture = np.full((h, w, 3), grey, np.uint8)
    for resize in (images.stretch_area, images.stretch_antialiased, images.stretch_antialiased_float):
        assert (resize(picture, tall, wide) == np.full((tall, wide, 3), grey)).all()
    fitted = images.fit_with_border(picture, tall, wide)
    assert fitted.shape == (tall, wide, 3)
    assert set(np.unique(fitted)) <= {0, grey}


@settings(max_examples=60, deadline=None)
@given(sides, sides, st.integers(0, 2**32 - 1))
def test_padding_and_cropping_back_lose_nothing(h: int, w: int, seed: int) -> None:
    picture = np.random.default_rng(seed).integers(0, 256, (h, w, 3), np.uint8)
    square = images.pad_to_square(picture)
    assert square.shape == (max(h, w), max(h, w), 3)
    top, left = (max(h, w) - h) // 2, (max(h, w) - w) // 2
    np.testing.assert_array_equal(square[top : top + h, left : left + w], picture)
    assert square.sum(dtype=np.int64) == picture.sum(dtype=np.int64)  # the border is black
    np.testing.assert_array_equal(images.mirror(images.mirror(picture)), picture)
