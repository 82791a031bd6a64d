"""Canonical tensors to a normalised chunk: order, buffers and the denoise loop. B rows, V views, P patches a view, S tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.bundle import Bundle, Component
from vla_eval.engines.card import Card
from vla_eval.engines.engine import Engine, Tensor, to_host
from vla_eval.types import BadRequest, InvalidObservation, Vector, VlaEvalError

from ..components import Buffer, Components, Kernels, Own, most, position_ids
from ..flow import Stopwatch, full_batches, integrate
from ..on_rows import own
from ..sight import Pictures
from .backbone import Backbone
from .contract import MERGE
from .dit import PACKED, DitEngine
from .dit_rows import DitRows
from .processor import Layout, prompt_rotary, vision_tables
from .vision import Vision

if TYPE_CHECKING:
    from .device import Gr00tOnDevice

COMPONENTS = ("visual", "vl_backbone", "action")
DEEPSTACK = 3  # features of earlier vision blocks, added to the outputs of the first text layers


@dataclass(frozen=True, slots=True)
class Inputs:
    """One row: what the network sees, with nothing of the robot left in it."""

    patches: NDArray[np.float32] | Pictures  # [V·P, 1536]; or pictures, where a card packs them
    grid: tuple[int, int]  # rows and columns of patches in a view
    token_ids: NDArray[np.int64]  # [S]
    state: NDArray[np.float32]  # [1, 132]
    noise: NDArray[np.float32]  # [40, 132]

    @property
    def patch_count(self) -> int:
        """Of all views."""
        per_view = self.grid[0] * self.grid[1]
        return len(self.patches.views) * per_view if isinstance(self.patches, Pictures) else len(self.patches)

    @property
    def shape(self) -> Shape:
        """What rows of one batch have in common."""
        size = self.patches.size if isinstance(self.patches, Pictures) else None
        return Shape(self.token_ids.size, self.patch_count, self.grid, size)


class Shape(NamedTuple):
    """What a batch, and a captured request, is good for."""

    tokens: int
    patches: int  # of a row, all views
    grid: tuple[int, int]
    size: tuple[int, int] | None  # of pictures that the card packs


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one row."""

    chunk: NDArray[np.float32]  # [40, 132], normalised
    seconds: Mapping[str, float]  # of the whole batch it was in


class Gr00tRuntime:
    """The three engines of a bundle and the loop around them. Knows no camera, no robot and no embodiment; not thread-safe."""

    def __init__(
        self, bundle: Bundle, *, backend: str = "auto", steps: int | None = None, kernels: str = "auto",
        engines: Mapping[str, Engine] | None = None,
    ) -> None:  # fmt: skip
        """`steps` picks one of the exported denoise tables, by default the first; `engines` replaces loading them.

        `kernels` is what answers on a GPU: "yes" our kernels, "no" TensorRT's plans, "auto" kernels where they can.

        Raises BadRequest for a number of steps without a table and for kernels that cannot run, ContractMismatch for engines that do not
        fit together.
        """

        exported = [int(n) for n in bundle.options["steps"]]
        self.steps = exported[0] if steps is None else steps
        if self.steps not in exported:
            told = ",".join(str(n) for n in sorted({*exported, self.steps}))
            raise BadRequest(
                f"{bundle.path} has tables for {' and '.join(map(str, exported))} denoise steps, not for {self.steps}; "
                f"make them with `vla-eval export --model gr00t --checkpoint DIR --out DIR --steps {told}`"
            )
        self.layout = Layout.of(bundle.options["geometry"])
        self.batch = int(bundle.options["batch"])
        action, backbone = bundle.component("action"), bundle.component("vl_backbone")
        by_step = [f"{name}.{self.steps}.safetensors" for name in ("adanorm_modulation", "action_time_bias")]
        tables = backbone.ahead("embed_tokens.safetensors") + action.ahead(*by_step)
        (self._modulation,), (self._time_bias,) = (action.tensors(file).values() for file in by_step)
        packed = (f"{PACKED}.safetensors", f"{PACKED}.{self.steps}.safetensors")
        alone = Own(self._action, packed, blas=False)
        ours = {"visual": own(Vision.read), "vl_backbone": own(Backbone.read), "action": alone if self.batch == 1 else own(DitRows.read)}
        self._call = Components(bundle, COMPONENTS, backend, engines, Kernels(kernels, ours), tables)
        (self._embedding,) = backbone.tensors("embed_tokens.safetensors").values()
        self.about = self._call.about
        embeds = self._call.spec("vl_backbone", "inputs_embeds")
        self.hidden = most(embeds.shape[2])
        self.most_tokens = most(embeds.shape[1])
        noise = self._call.spec("action", "noise_trajectory")
        self.horizon, self.width = most(noise.shape[1]), most(noise.shape[2])
        self.state_width = most(self._call.spec("action", "state").shape[2])
        self._device: Gr00tOnDevice | None = None
        if (plans := self._call.plans) is not None:
            from .device import Gr00tOnDevice

            self._device = Gr00tOnDevice(plans, self.layout, self.batch, self._embedding, self._modulation, self._time_bias)
        self._buffers = [Buffer(self.hidden, embeds.dtype) for _ in range(1 + DEEPSTACK)]  # embeddings, DeepStack; kept between requests

    @property
    def on_card(self) -> bool:
        """Whether requests stay on a card, which then packs their pictures."""
        return self._device is not None

    def _action(self, component: Component, card: Card) -> Engine:
        return DitEngine(component, card, self._modulation, self._time_bias)

    def __call__(self, rows: Sequence[Inputs]) -> list[Answer]:
        """A chunk for each row. Rows of one length share a batch, short batches are filled with copies.

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

    def _run(self, rows: Sequence[Inputs]) -> tuple[NDArray[np.float32], Mapping[str, float]]:
        if self._device is not None:
            return self._run_on_device(self._device, rows)
        watch = Stopwatch()
        with watch.stage("visual"):
            features = self._visual(rows)
        with watch.stage("prefill"):
            context = self._prefill(rows, features)
        with watch.stage("denoise"):
            chunks = self._denoise(rows, context)
        if not np.isfinite(chunks).all():
            raise _broken(features, context)
        return chunks, watch.seconds

    def _run_on_device(self, device: Gr00tOnDevice, rows: Sequence[Inputs]) -> tuple[NDArray[np.float32], Mapping[str, float]]:
        chunks, seconds, body = device(rows)
        if not np.isfinite(chunks).all():
            raise _broken([to_host(feature) for feature in body.visual.outputs.values()], body.backbone.outputs)
        return chunks, seconds

    def _visual(self, rows: Sequence[Inputs]) -> list[Vector]:
        """The merged features [B·V·P/4, hidden] and the DeepStack features, of the same shape each."""
        patches = [row.patches for row in rows if isinstance(row.patches, np.ndarray)]
        assert len(patches) == len(rows), "pictures are packed by a card, and there is none"
        views = len(rows) * (rows[0].patch_count // (rows[0].grid[0] * rows[0].grid[1]))
        tables = vision_tables(self.layout, views, rows[0].grid)
        outputs = self._call(
            "visual",
            input=patches[0] if len(rows) == 1 else np.concatenate(patches),
            rotary_pos_emb=tables.rotary,
            cu_seqlens=tables.cu_seqlens,
            fast_pos_embed_idx=tables.position_index,
            fast_pos_embed_weight=tables.position_weight,
        )
        return [to_host(outputs[name]) for name in ("output", *(f"deepstack_features_{i}" for i in range(DEEPSTACK)))]

    def _prefill(self, rows: Sequence[Inputs], features: Sequence[Vector]) -> dict[str, Tensor]:
        """Cross-attention keys and values, and the two masks: everything that stays bound during the loop."""
        ids = np.stack([row.token_ids for row in rows])  # [B, S]
        image = ids == self.layout.image_token
        embeds, *deepstack = (buffer.shaped(*ids.shape) for buffer in self._buffers)
        embeds[:] = self._embedding[ids]
        embeds[image] = features[0]
        for into, feature in zip(deepstack, features[1:], strict=True):
            into[:] = 0  # the graph adds the whole tensor: what an earlier request left behind would be added to text tokens
            into[image] = feature
        rotary = np.stack([prompt_rotary(self.layout, row.token_ids, row.grid) for row in rows])
        outputs = self._call(
            "vl_backbone",
            inputs_embeds=embeds,
            rope_rotary_cos_sin=rotary,
            attention_pos_id=position_ids(*ids.shape),
            **{f"deepstack_embeds_{i}": tensor for i, tensor in enumerate(deepstack)},
        )
        return {**outputs, "text_attention_mask": ~image[:, None, None, :], "image_attention_mask": image[:, None, None, :]}

    def _denoise(self, rows: Sequence[Inputs], context: Mapping[str, Tensor]) -> NDArray[np.float32]:
        state = np.stack([row.state for row in rows])

        def velocity(step: int, x: NDArray[np.float32]) -> Tensor:
            modulation, bias = self._modulation[step], self._time_bias[step]
            return self._call("action", noise_trajectory=x, state=state, adanorm_modulation=modulation, action_time_bias=bias, **context)[
                "velocity"
            ]

        return integrate(velocity, np.stack([row.noise for row in rows]), self.steps, 1.0 / self.steps)  # time runs from noise to data

    def _check(self, row: Inputs) -> None:
        ids = row.token_ids.astype(np.int64, copy=False).tobytes()
        prompt = _problem_of(ids, row.patch_count, row.grid, self.layout.image_token, self.most_tokens, len(self._embedding))
        problems = [
            (prompt, prompt),
            (row.noise.shape != (self.horizon, self.width), f"noise is {list(row.noise.shape)}, wanted {[self.horizon, self.width]}"),
            (row.state.shape != (1, self.state_width), f"state is {list(row.state.shape)}, wanted {[1, self.state_width]}"),
            (not (np.isfinite(row.state).all() and np.isfinite(row.noise).all()), "state or noise is not finite"),
        ]
        for wrong, what in problems:
            if wrong:
                raise InvalidObservation(f"the observation cannot be answered: {what}")


@lru_cache(maxsize=256)
def _problem_of(ids: bytes, patches: int, grid: tuple[int, int], image_token: int, most_tokens: int, known: int) -> str:
    """What is wrong with a prompt and its pictures, or nothing; remembered: a task asks with one prompt."""
    tokens = np.frombuffer(ids, np.int64)
    image, per_view = tokens == image_token, grid[0] * grid[1]
    places, merged = int(np.count_nonzero(image)), patches // (MERGE * MERGE)
    problems = [
        (not places, "it has no picture token; every observation needs a picture (attention to none would be NaN)"),
        (image.all(), "it has no text token; every observation needs an instruction (attention to none would be NaN)"),
        (per_view == 0 or patches % max(per_view, 1) != 0, f"{patches} patches are no whole views of {grid}"),
        (places != merged, f"its prompt has {places} picture tokens, its pictures {merged}"),
        (
            tokens.size > most_tokens,
            f"its prompt is {tokens.size} tokens long, the bundle takes {most_tokens}; "
            "shorten the instruction or export with a larger --max-text",
        ),
        (tokens.size > 0 and not 0 <= tokens.min() <= tokens.max() < known, "a token id is outside the embedding table"),
    ]
    return next((what for wrong, what in problems if wrong), "")


def _broken(features: Sequence[Vector], context: Mapping[str, Tensor]) -> VlaEvalError:
    return VlaEvalError(
        f"component {_first_broken(features, context)!r} gave NaN or infinity; compare the bundle with `vla-eval verify`, "
        "and export it in fp32 or bf16 if it is fp16"
    )


def _first_broken(features: Sequence[Vector], context: Mapping[str, Tensor]) -> str:
    """The component whose output stopped being numbers first."""
    if not all(np.isfinite(feature).all() for feature in features):
        return "visual"
    return "action" if all(np.isfinite(to_host(tensor)).all() for tensor in context.values()) else "vl_backbone"
