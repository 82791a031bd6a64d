"""Canonical tensors to a normalised chunk: order, scale and the denoise loop. B rows, V views, T prompt tokens, S = V·P + T, H actions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.bundle import Bundle
from vla_eval.engines.engine import Engine, Tensor, to_host
from vla_eval.types import BadRequest, InvalidObservation, Vector, VlaEvalError

from ..components import Buffer, Components, Kernels, Own, most, position_ids
from ..flow import Stopwatch, full_batches, integrate
from ..on_rows import own
from ..sight import Pictures
from .configuration import VIEWS, geometry_from
from .expert import PACKED, ExpertEngine
from .prefix import Prefix
from .processor import rotary, schedule
from .vision import Vision

if TYPE_CHECKING:
    from .device import Pi05OnDevice

COMPONENTS = ("visual", "prefix", "action")  # and "cond", where the time's part is hoisted out of the action
STEPS = 10  # of the flow, as published
_PART = 256  # rows of the token table that one thread scales at once


@dataclass(frozen=True, slots=True)
class Inputs:
    """One row: what the network sees, with nothing of the robot left in it."""

    pixels: NDArray[np.float32] | Pictures  # [V, 3, side, side] in [-1, 1], only views that are there; or pictures, where a card packs them
    token_ids: NDArray[np.int64]  # [T], no padding
    noise: NDArray[np.float32]  # [H, 32]

    @property
    def shape(self) -> Shape:
        """What rows of one batch have in common."""
        if isinstance(self.pixels, Pictures):
            return Shape(len(self.pixels.views), self.token_ids.size, self.pixels.size)
        return Shape(len(self.pixels), self.token_ids.size, None)


class Shape(NamedTuple):
    """What a batch, and a captured request, is good for."""

    views: int
    text: int
    size: tuple[int, int] | None  # of pictures that the card packs


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one row."""

    chunk: NDArray[np.float32]  # [H, 32], normalised
    seconds: Mapping[str, float]  # of the whole batch it was in


class Pi05Runtime:
    """The engines of a bundle and the loop around them. Knows no camera, no robot and no embodiment; not thread-safe."""

    def __init__(
        self, bundle: Bundle, *, backend: str = "auto", steps: int | None = None, kernels: str = "auto",
        engines: Mapping[str, Engine] | None = None,
    ) -> None:  # fmt: skip
        """`steps` of the flow, by default 10; `engines` replaces loading them.

        `kernels` is what answers on a GPU: "yes" our kernels, "no" TensorRT's plans, "auto" kernels where they can.

        Raises BadRequest for more steps than the bundle takes and for kernels that cannot run, ContractMismatch for engines that do not
        fit together.
        """
        self.geometry = geometry_from(bundle.options["geometry"])
        self.batch = int(bundle.options["batch"])
        self.hoisted = bool(bundle.component("action").config["builder_config"].get("hoisted_adarms_cond", False))
        self.max_steps = int(bundle.options["max_steps"])
        self.steps = min(STEPS, self.max_steps) if steps is None else steps
        if not 1 <= self.steps <= self.max_steps:
            raise BadRequest(
                f"{bundle.path} takes 1 to {self.max_steps} denoise steps, not {self.steps}; "
                f"export it with --max-steps {max(self.steps, 1)} to take more"
            )
        names = (*COMPONENTS, "cond") if self.hoisted else COMPONENTS
        prefix = bundle.component("prefix")
        tables = prefix.ahead("embed_tokens.safetensors")
        ours = {
            "visual": own(Vision.read), "prefix": own(Prefix.read),
            "action": Own(ExpertEngine, (f"{PACKED}.safetensors",), blas=False),
        }  # fmt: skip
        self._call = Components(bundle, names, backend, engines, Kernels(kernels, ours), tables)
        self.about = self._call.about
        (self._embedding,) = prefix.tensors("embed_tokens.safetensors").values()
        embeds = self._call.spec("prefix", "inputs_embeds")
        self.hidden, self.most_tokens = most(embeds.shape[2]), most(embeds.shape[1])
        noise = self._call.spec("action", "noise_trajectory")
        self.horizon, self.width = most(noise.shape[1]), most(noise.shape[2])
        self._scale = np.float32(math.sqrt(self.hidden))  # of text tokens alone; nobody else applies it
        self._embeds = Buffer(self.hidden, embeds.dtype)
        self._modulation: tuple[int, NDArray[np.float32]] | None = None  # of that many steps, [steps · B, M, 3 W]
        self._device = self._on_device()

    def __call__(self, rows: Sequence[Inputs]) -> list[Answer]:
        """A chunk for each row. Rows of one length and number of views share a batch, short batches are filled with copies.

        Raises InvalidObservation, before any engine runs, for a row that the network cannot answer.
        """
        for row in rows:
            self._check(row)
        answers: dict[int, Answer] = {}
        for batch in full_batches([row.shape for row in rows], self.batch):
            chunks, seconds = self._run([rows[i] for i in batch.rows])
            for place, i in enumerate(batch.rows[: batch.real]):
                answers[i] = Answer(chunks[place], seconds)
        return [answers[i] for i in range(len(rows))]

    @property
    def on_card(self) -> bool:
        """Whether requests stay on a card, which then resizes and packs their pictures."""
        return self._device is not None

    def _on_device(self) -> Pi05OnDevice | None:
        """Where TensorRT runs every component, a request stays on the card from the pictures to the chunk."""
        if (plans := self._call.plans) is None:
            return None
        from .device import Pi05OnDevice

        times = schedule(self.steps)
        plain = [np.full(self.batch, time, np.float32) for time in times]
        steps = np.split(self._modulated(times), self.steps) if self.hoisted else plain
        return Pi05OnDevice(
            plans, batch=self.batch, per_view=self.geometry.vision.tokens_per_view, embedding=_scaled(self._embedding, self._scale),
            time=("adarms_modulation" if self.hoisted else "timestep", steps),
            places=lambda first, count: cast("Mapping[str, Vector]", self._places(self.batch, first, count)),
        )  # fmt: skip

    def _run(self, rows: Sequence[Inputs]) -> tuple[NDArray[np.float32], Mapping[str, float]]:
        if self._device is not None:
            return self._run_on_device(self._device, rows)
        watch = Stopwatch()
        with watch.stage("visual"):
            seen = [row.pixels for row in rows if isinstance(row.pixels, np.ndarray)]
            assert len(seen) == len(rows), "pictures are packed by a card, and there is none"
            pixels = seen[0] if len(rows) == 1 else np.concatenate(seen)
            features = to_host(self._call("visual", pixel_values=pixels)["image_features"])  # [B·V, P, hidden]
        with watch.stage("prefill"):
            keys = self._prefill(rows, features)
        with watch.stage("denoise"):
            chunks = self._denoise(rows, keys)
        if not np.isfinite(chunks).all():
            raise _broken(features, keys)
        return chunks, watch.seconds

    def _run_on_device(self, device: Pi05OnDevice, rows: Sequence[Inputs]) -> tuple[NDArray[np.float32], Mapping[str, float]]:
        chunks, seconds, body = device(rows)
        if not np.isfinite(chunks).all():
            raise _broken(to_host(body.visual.outputs["image_features"]), body.prefix.outputs)
        return chunks, seconds

    def _prefill(self, rows: Sequence[Inputs], features: NDArray[np.float32]) -> dict[str, Tensor]:
        """Keys and values of every layer, which stay bound during the loop."""
        ids = np.stack([row.token_ids for row in rows])
        seen = rows[0].shape.views * self.geometry.vision.tokens_per_view
        embeds = self._embeds.shaped(len(rows), seen + ids.shape[1])
        embeds[:, :seen] = features.reshape(len(rows), seen, self.hidden)
        embeds[:, seen:] = self._embedding[ids].astype(np.float32) * self._scale
        return self._call("prefix", inputs_embeds=embeds, **self._places(len(rows), 0, embeds.shape[1]))

    def _denoise(self, rows: Sequence[Inputs], keys: Mapping[str, Tensor]) -> NDArray[np.float32]:
        batch, length = len(rows), rows[0].shape.views * self.geometry.vision.tokens_per_view + rows[0].token_ids.size
        fixed = {**keys, **self._places(batch, length, self.horizon)}
        times = schedule(self.steps)

        def velocity(step: int, x: NDArray[np.float32]) -> Tensor:
            if self.hoisted:
                time: dict[str, Tensor] = {"adarms_modulation": self._modulated(times)[step * batch : (step + 1) * batch]}
            else:
                time = {"timestep": np.full(batch, times[step], np.float32)}
            return self._call("action", noise_trajectory=x, **time, **fixed)["action_pred"]

        return integrate(velocity, np.stack([row.noise for row in rows]), self.steps, -1.0 / self.steps)  # from noise at 1 to data at 0

    def _modulated(self, times: NDArray[np.float32]) -> NDArray[np.float32]:
        """The time's part of every step, [step][request]; made again only when the number of steps changes, since the batch is fixed."""
        if self._modulation is None or self._modulation[0] != len(times):
            found = to_host(self._call("cond", timesteps=np.repeat(times, self.batch))["adarms_modulation"])
            self._modulation = len(times), np.asarray(found, np.float32)
        return self._modulation[1]

    def _places(self, batch: int, first: int, count: int) -> dict[str, Tensor]:
        table = rotary(first, count, self.geometry.prefix.head_dim, self.geometry.rope_theta)
        return {
            "rope_rotary_cos_sin": np.broadcast_to(table, (batch, *table.shape)),
            "attention_pos_id": position_ids(batch, count),
        }

    def _check(self, row: Inputs) -> None:
        side = self.geometry.vision.image
        views, ids = row.shape.views, row.token_ids
        shape = (views, 3, side, side) if isinstance(row.pixels, Pictures) else row.pixels.shape
        tokens = views * self.geometry.vision.tokens_per_view + ids.size
        problems = [
            (
                shape != (views, 3, side, side) or not 1 <= views <= VIEWS,
                f"pictures are {list(shape)}, wanted [1 to {VIEWS}, 3, {side}, {side}]",
            ),
            (not ids.size, "it has no text token"),
            (
                tokens > self.most_tokens,
                f"its prefix is {tokens} tokens long, the bundle takes {self.most_tokens}; "
                "shorten the instruction or export with a larger --max-text",
            ),
            (
                ids.size > 0 and not 0 <= ids.min() <= ids.max() < len(self._embedding),
                f"a token id is outside the embedding table's {len(self._embedding)} rows",
            ),
            (row.noise.shape != (self.horizon, self.width), f"noise is {list(row.noise.shape)}, wanted {[self.horizon, self.width]}"),
            (
                not (np.isfinite(row.noise).all() and (isinstance(row.pixels, Pictures) or np.isfinite(row.pixels).all())),
                "noise or pictures are not finite",
            ),
        ]
        for wrong, what in problems:
            if wrong:
                raise InvalidObservation(f"the observation cannot be answered: {what}")


def _scaled(table: Vector, scale: np.float32) -> Vector:
    """The table times `scale`, rounded once; in parts, several at once."""
    found = np.empty_like(table)

    def part(first: int) -> None:
        rows = slice(first, first + _PART)
        found[rows] = table[rows].astype(np.float32) * scale

    with ThreadPoolExecutor() as pool:
        list(pool.map(part, range(0, len(table), _PART)))
    return found


def _broken(features: Vector, keys: Mapping[str, Tensor]) -> VlaEvalError:
    """Names the component whose output stopped being numbers first."""
    whole = np.isfinite(features).all(), all(np.isfinite(to_host(tensor)).all() for tensor in keys.values())
    broken = "visual" if not whole[0] else "prefix" if not whole[1] else "action"
    return VlaEvalError(
        f"component {broken!r} gave NaN or infinity; compare the bundle with `vla-eval verify`, and export it in fp32 or bf16 if it is fp16"
    )
