"""Three robots' requests in the model's terms, and its chunk in theirs. H actions, N numbers of the robot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vla_eval.types import InvalidObservation, Vector

from .contracts import Configuration
from .processor import picture

Array = NDArray[np.float64]
Layout = Literal["any", "CHW"]

# ALOHA: which joints turn the other way in the training data, and which of the 14 numbers are joints (the others are grippers)
FLIP = np.array([1, -1, -1, 1, 1, 1, 1] * 2, np.float64)
JOINTS = np.array([True] * 6 + [False] + [True] * 6 + [False])
GRIPPERS = ~JOINTS
SIDE = 256  # pixels of a picture that nobody took; the processor takes any size
_LINEAR = (0.01844, 0.05800)  # m, the gripper's opening closed and open
_ARM, _HORN = 0.036, 0.022  # m, of the linkage between motor and finger
_ANGLE = (0.5476, 1.6296)  # rad, the model's closed and open
_ROBOT = (-0.6213, 1.4910)  # rad, the robot's closed and open


@dataclass(frozen=True, slots=True)
class Seen:
    """A request in the model's terms."""

    pictures: Mapping[str, Vector]  # camera -> [H, W, 3] uint8, in the model's order of slots
    state: Array  # [N], adapted, not normalised
    prompt: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """How one robot's requests are read and what its steps around normalisation are."""

    state_keys: Mapping[str, int]  # key -> numbers
    camera_key: str  # "{}" stands for the camera's name
    pictures: Layout
    to_model: Callable[[Array], Array]  # state [N]
    to_robot: Callable[[Array, Array], Array]  # unnormalised chunk [H, N] and adapted state [N] -> robot units


def read(adapter: Adapter, c: Configuration, request: Mapping[str, Any]) -> Seen:
    """The request's pictures, state and text, checked. Raises InvalidObservation, naming the key, what it has and what is wanted."""
    names = list(request) if isinstance(request, Mapping) else [request]
    if strange := [name for name in names if not isinstance(name, str) or not isinstance(request, Mapping)]:
        raise InvalidObservation(f"the request holds {strange[0]!r}, wanted a table of arrays by their names, such as 'prompt'")
    flat = _flat(request)
    cameras = {adapter.camera_key.format(camera.name): camera for camera in c.cameras}
    ignored = {adapter.camera_key.format(name) for name in c.ignored}
    known = {*cameras, *ignored, *adapter.state_keys, "prompt"}
    needed = {key for key, camera in cameras.items() if camera.required} | {*adapter.state_keys, "prompt"}
    if missing := sorted(needed - set(flat)):
        raise InvalidObservation(f"the request lacks {', '.join(missing)}; it has {', '.join(sorted(flat)) or 'nothing'}")
    if strange := sorted(set(flat) - known):
        raise InvalidObservation(f"the request has {', '.join(strange)}, which {c.name} does not take; it takes {', '.join(sorted(known))}")
    pictures = {camera.name: _picture(key, flat[key], adapter.pictures) for key, camera in cameras.items() if key in flat}
    parts = [_numbers(key, flat[key], count) for key, count in adapter.state_keys.items()]
    return Seen(pictures, adapter.to_model(np.concatenate(parts)), _text(flat["prompt"]))


def specimen(adapter: Adapter, c: Configuration, rng: np.random.Generator, words: str) -> dict[str, Any]:
    """A request with every key that the robot sends: random pictures, and numbers that any of its joints and grippers may have."""
    shape = (3, SIDE, SIDE) if adapter.pictures == "CHW" else (SIDE, SIDE, 3)
    pictures = {adapter.camera_key.format(camera.name): rng.integers(0, 256, shape, np.uint8) for camera in c.cameras}
    return {**pictures, **{key: rng.uniform(0, 0.3, count) for key, count in adapter.state_keys.items()}, "prompt": words}


def aloha_state(state: Array) -> Array:
    """Joints turned as in training, grippers from linear opening in [0, 1] to the motor's angle, scaled."""
    adapted = FLIP * state
    adapted[GRIPPERS] = gripper_to_angle(adapted[GRIPPERS])
    return adapted


def aloha_actions(chunk: Array, state: Array) -> Array:
    """Unnormalised [H, 14] to robot units: the state is added to the joints, then signs, then grippers, which are absolute."""
    robot = chunk + np.where(JOINTS, state, 0.0)
    robot *= FLIP
    robot[:, GRIPPERS] = (robot[:, GRIPPERS] + _ANGLE[0] - _ROBOT[0]) / (_ROBOT[1] - _ROBOT[0])
    return robot


def gripper_to_angle(opening: Array) -> Array:
    """Linear opening in [0, 1] -> angle in the model's scale; the way back (`aloha_actions`) is not its inverse, as in the reference."""
    length = opening * (_LINEAR[1] - _LINEAR[0]) + _LINEAR[0]
    cosine = (_HORN**2 + length**2 - _ARM**2) / (2 * _HORN * length)
    angle = np.arcsin(np.clip(cosine, -1.0, 1.0))
    scaled: Array = (angle - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0])
    return scaled


def _as_it_is(state: Array) -> Array:
    return state


def _unchanged(chunk: Array, state: Array) -> Array:
    return chunk


ADAPTERS: Mapping[str, Adapter] = {
    "libero": Adapter({"observation/state": 8}, "observation/{}", "any", _as_it_is, _unchanged),
    "droid": Adapter({"observation/joint_position": 7, "observation/gripper_position": 1}, "observation/{}", "any", _as_it_is, _unchanged),
    "aloha": Adapter({"state": 14}, "images/{}", "CHW", aloha_state, aloha_actions),
}


def _flat(request: Mapping[str, Any]) -> dict[str, Any]:
    """`images` may be a table of its own, as openpi's ALOHA client sends it. Raises InvalidObservation for a camera that comes twice."""
    flat: dict[str, Any] = {}
    for key, value in request.items():
        for name, part in {f"{key}/{name}": part for name, part in value.items()}.items() if isinstance(value, Mapping) else [(key, value)]:
            if name in flat:
                raise InvalidObservation(f"the request has {name} twice")
            flat[name] = part
    return flat


def _picture(key: str, value: Any, layout: Layout) -> Vector:
    if not isinstance(value, np.ndarray) or value.ndim != 3 or not value.size:
        raise InvalidObservation(f"{key} is {_has(value)}, wanted a picture {'[3, H, W]' if layout == 'CHW' else '[H, W, 3]'}")
    first, last = value.shape[0] == 3, value.shape[-1] == 3
    if not (first if layout == "CHW" else first or last):
        raise InvalidObservation(f"{key} is {_has(value)}, wanted {'[3, H, W]' if layout == 'CHW' else '[H, W, 3]'}")
    if value.dtype != np.uint8 and not np.issubdtype(value.dtype, np.floating):
        raise InvalidObservation(f"{key} is {_has(value)}, wanted uint8, or floats from 0 to 1")
    if value.dtype != np.uint8 and not (np.isfinite(value).all() and value.min() >= 0 and value.max() <= 1):
        raise InvalidObservation(f"{key} holds floats outside 0 … 1, or NaN; wanted uint8, or floats from 0 to 1")
    return picture(value)


def _numbers(key: str, value: Any, count: int) -> Array:
    numbers = np.asarray(value) if isinstance(value, np.ndarray | np.number | float | int) and not isinstance(value, bool) else None
    if numbers is not None and count == 1 and numbers.ndim == 0:
        numbers = numbers[None]  # a gripper may come as a plain number
    if numbers is None or numbers.dtype.kind not in "fiu" or numbers.shape != (count,):
        raise InvalidObservation(f"{key} is {_has(value)}, wanted {count} numbers [{count}]")
    if not np.isfinite(numbers).all():
        raise InvalidObservation(f"{key} holds NaN or infinity")
    return numbers.astype(np.float64)


def _text(value: Any) -> str:
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    if not isinstance(text, str) or text.encode("utf-8", "ignore").decode() != text:
        raise InvalidObservation(f"prompt holds {value!r}, which is no text")
    if not any(character.isalnum() for character in text):
        raise InvalidObservation(f"prompt is {text!r}; every request needs an instruction in words")
    return text


def _has(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
