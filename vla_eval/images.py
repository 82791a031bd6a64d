"""Resize, pad and crop pictures, each function named for exactly what it does. H W pixels; a picture is [H, W, 3] uint8 RGB."""

from __future__ import annotations

from typing import Literal

import cv2
import numpy as np

from .types import Image

Filter = Literal["bilinear", "bicubic"]


def mirror(picture: Image) -> Image:
    """Left and right exchanged. An upright picture becomes the renderer's, turned by 180°."""
    return np.asarray(cv2.flip(picture, 1), np.uint8)


def pad_to_square(picture: Image) -> Image:
    """Black borders along the shorter sides, the picture in the middle; an odd pixel goes to the right or to the bottom."""
    height, width = picture.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    if top == left == 0 and height == width:
        return picture
    padded = np.zeros((side, side, 3), np.uint8)
    padded[top : top + height, left : left + width] = picture
    return padded


def crop_centre(picture: Image, height: int, width: int) -> Image:
    """The middle [height, width] pixels, as a view; an odd pixel is left over at the right or at the bottom."""
    top, left = (picture.shape[0] - height) // 2, (picture.shape[1] - width) // 2
    if top < 0 or left < 0:
        raise ValueError(f"cannot crop {height}x{width} out of {picture.shape[0]}x{picture.shape[1]}")
    return picture[top : top + height, left : left + width]


def stretch_area(picture: Image, height: int, width: int) -> Image:
    """Resized to exactly [height, width] by OpenCV's INTER_AREA, which averages when shrinking; the aspect ratio is not kept.

    When enlarging, INTER_AREA is neither nearest nor bilinear: up to 13 grey levels away from INTER_LINEAR.
    """
    if picture.shape[:2] == (height, width):
        return picture
    # OpenCV copies views anyway; asking numpy for it keeps the types plain.
    return np.asarray(cv2.resize(np.ascontiguousarray(picture), (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def stretch_antialiased(picture: Image, height: int, width: int, how: Filter = "bilinear") -> Image:
    """Resized to exactly [height, width] by Pillow, whose filters widen when shrinking (antialias); the aspect ratio is not kept."""
    from PIL import Image as Pillow

    if picture.shape[:2] == (height, width):
        return picture
    resampling = {"bilinear": Pillow.Resampling.BILINEAR, "bicubic": Pillow.Resampling.BICUBIC}[how]
    return np.asarray(Pillow.fromarray(np.ascontiguousarray(picture)).resize((width, height), resampling))


def stretch_antialiased_float(picture: Image, height: int, width: int) -> Image:
    """As `stretch_antialiased`, bilinear, but rounded once at the end instead of after each direction: what torchvision does to a batch."""
    from PIL import Image as Pillow

    if picture.shape[:2] == (height, width):
        return picture
    planes = np.moveaxis(picture, 2, 0).astype(np.float32)
    stretched = [np.asarray(Pillow.fromarray(plane).resize((width, height), Pillow.Resampling.BILINEAR)) for plane in planes]
    rounded: Image = np.rint(np.stack(stretched, axis=-1)).astype(np.uint8)  # weights are positive and sum to one: nothing leaves 0…255
    return rounded


def fit_with_border(picture: Image, height: int, width: int) -> Image:
    """The whole picture inside [height, width]: aspect ratio kept, bilinear with antialias, black borders, in the middle."""
    if picture.shape[:2] == (height, width):
        return picture
    inner_height, inner_width = inner_size((picture.shape[0], picture.shape[1]), height, width)
    fitted = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    fitted[top : top + inner_height, left : left + inner_width] = stretch_antialiased(picture, inner_height, inner_width)
    return fitted


def inner_size(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Height and width of a picture of that size inside the borders of `fit_with_border`."""
    ratio = max(size[1] / width, size[0] / height)
    return max(1, int(size[0] / ratio)), max(1, int(size[1] / ratio))
