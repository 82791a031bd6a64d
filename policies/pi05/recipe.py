"""A pi0.5 checkpoint to a bundle: three graphs or four, the token table, statistics, tokenizer and the policy's contract."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_eval.arrays import write_npz
from vla_eval.engines.bundle import Bundle, Identity, open_bundle, staged
from vla_eval.engines.draw import draw
from vla_eval.engines.graph import NUMPY, PRECISIONS, Axis, Dim, Graph, axis
from vla_eval.engines.verify import SELFTEST
from vla_eval.engines.weights import FLOAT16_LIMIT, Checkpoint, Tensor, Weights, open_checkpoint, token_table, write_tensors
from vla_eval.types import BadRequest, Vector

from ..components import KERNELS, check_kernels, position_ids
from ..on_rows import PACKED as ROWS
from . import expert, network, prefix, vision
from .configuration import (
    DEAD_HEAD,
    EMBEDDING,
    HEAD,
    PREFIXES,
    RELEASED,
    VIEWS,
    Geometry,
    check_architecture,
    geometry_from,
    not_needed,
    plain,
    read_config,
    read_geometry,
)  # fmt: skip
from .contracts import STATISTICS, Configuration, choose, find_statistics, policy_json, read_statistics
from .prefix import Prefix
from .processor import TOKENIZER, TOKENIZER_NAMES, TOKENIZER_PLACES, Tokens, rotary, schedule
from .runtime import STEPS
from .vision import Vision

COMPONENTS = ("visual", "prefix", "action", "cond")
KernelForm = expert.Shape | Vision | Prefix  # of a component, as the kernels know it
TUNED_TEXT = 24  # tokens of a prompt that engines are tuned for: instructions of LIBERO have 8 to 40
MOST_STEPS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths that the graphs are drawn for."""

    batch: Dim  # rows; this runtime always fills it
    views: Dim  # of all rows together
    tokens: Dim
    times: Dim  # denoise steps of all rows together
    horizon: int
    width: int  # of an action, padded
    hoisted: bool

    @property
    def rows(self) -> int:
        """The most rows."""
        return self.batch if isinstance(self.batch, int) else self.batch.max


def recipe(
    checkpoint: Path,
    out: Path,
    *,
    policy_config: str | None = None,
    no_hoist_cond: bool = False,
    max_steps: int = MOST_STEPS,
    norm_stats: Path | None = None,
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32",
    batch: int = 1,
    max_text: int = 208,
    components: Sequence[str] = (),
    suites: Sequence[str] = (),
    geometry: Path | None = None,
    tokenizer: Path | None = None,
    kernels: bool = False,
    direct: bool = False,
) -> Bundle:
    """Export a pi0.5 checkpoint: ONNX graphs, the token table and the policy's contract, all checked before a byte is written.

    Args:
        checkpoint: The folder with the .safetensors files; openpi's layouts and LeRobot's are read.
        out: The bundle to write: a new or empty folder, or one that holds this same export.
        policy_config: pi05_libero, pi05_droid or pi05_aloha. [default: pi05_libero, where the checkpoint's features prove it]
        no_hoist_cond: Keep the time's part inside the action graph instead of in a fourth component.
        max_steps: The most denoise steps that a run may ask for, up to 64.
        norm_stats: The training's norm_stats.json. [default: the one below the checkpoint's assets/]
        dtype: Of weights and activations. fp32 is the truth; fp16 and bf16 are for TensorRT.
        batch: Robots that the engines answer together, fixed for a run.
        max_text: The longest prompt, in tokens.
        components: Only some of them, such as visual,action. [default: all]
        suites: What the checkpoint was trained for; it is found for these suites and refused for others. [default: the configuration's]
        geometry: A JSON file that declares other tower sizes than the released ones.
        tokenizer: PaliGemma's SentencePiece model. [default: paligemma_tokenizer.model or tokenizer.model beside the weights]
        kernels: Also the weights for kernels of our own, which then answer on an H100 or H200; the denoise step's for one robot alone.
        direct: TensorRT plans for this machine instead of ONNX graphs, as `vla-eval build --direct` makes them.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    wanted = COMPONENTS[:3] if no_hoist_cond else COMPONENTS
    chosen = tuple(components) or wanted
    _check_options(dtype, batch, max_steps, max_text, chosen, wanted)
    stored = open_checkpoint(checkpoint, PREFIXES)
    g = read_geometry(Path(geometry)) if geometry else RELEASED
    width = check_architecture(stored, g)
    configuration = choose(policy_config, read_config(checkpoint, g, width))
    if configuration.action_dim > width:
        raise BadRequest(
            f"{checkpoint}: actions are {width} wide, {configuration.name} has {configuration.action_dim}; choose another --policy-config"
        )
    staged_before = norm_stats is None and any((out / "assets").rglob(STATISTICS))  # since the first export: these stay
    if not staged_before:
        source = Path(norm_stats) if norm_stats else find_statistics(checkpoint, "--norm-stats FILE")
        statistics = read_statistics(source, configuration)
    tokens = Tokens(_tokenizer(checkpoint, tokenizer, out))
    if tokens.size > g.table_rows:
        raise BadRequest(f"{tokens.file} has {tokens.size} pieces, the token table {g.table_rows} rows; it is another model's tokenizer")
    forms = _kernel_forms(g, configuration.horizon, width, dtype, batch, hoisted=not no_hoist_cond) if kernels else {}
    table = token_table(stored, HEAD, EMBEDDING)
    stored.check_numbers(FLOAT16_LIMIT if dtype == "fp16" else math.inf)
    if DEAD_HEAD in stored.tensors:
        _log.info("dropping %s: the expert predicts velocities, no tokens", DEAD_HEAD)

    options = {
        "dtype": dtype, "batch": batch, "max_steps": max_steps, "max_text": max_text, "hoisted_adarms_cond": not no_hoist_cond,
        "policy_config": configuration.name, "action_dim": width, "action_horizon": configuration.horizon, "geometry": plain(g),
        **({KERNELS: True} if kernels else {}),
    }  # fmt: skip
    policy = policy_json(configuration, width=width, image=g.vision.image, tokenizer=tokens.about(), max_text=max_text, suites=suites)
    sizes = _sizes(configuration, g, options)
    with staged(out, Identity("pi05", "direct" if direct else "onnx", stored.fingerprint, options), policy) as stage:
        for component in (name for name in wanted if name in chosen):
            _log.info("exporting %s", component)
            drawn = draw(stage, component, stored, graph_from, geometry=options["geometry"], sizes=asdict(sizes))
            extra: dict[str, Any] = {}
            if component == "prefix":
                entry = (NUMPY[PRECISIONS[dtype]], table.shape, table.pieces())
                write_tensors(stage.file(component, "embed_tokens.safetensors"), {"embed_tokens": entry})
            if component == "action":
                extra = {"hoisted_adarms_cond": sizes.hoisted, "action_horizon": sizes.horizon, "num_adarms_sites": g.sites}
            if component == "cond":
                extra = {"max_denoise_steps": max_steps, "num_adarms_sites": g.sites, "modulation_dim": 3 * g.expert.width}
            if (form := forms.get(component)) is not None:
                name, entries = _kernel_weights(g, form, stored.weights, NUMPY[PRECISIONS[dtype]])
                write_tensors(stage.file(component, f"{name}.safetensors"), entries)
                extra[KERNELS] = asdict(form)
            stage.finish(component, drawn.inputs, drawn.outputs, **extra)
        if set(chosen) == set(wanted):
            stored.check_all_read(not_needed(stored, g))
        files = {f"text_tokenizer/{TOKENIZER}": tokens.file}
        if not staged_before:
            files[f"assets/{configuration.asset_id}/{STATISTICS}"] = statistics.file
        for name, file in files.items():
            target = stage.shared(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        write_npz(stage.shared(SELFTEST), _selftest(g, sizes, configuration, tokens, table))
    return open_bundle(out)


def graph_from(stored: Checkpoint, component: str, *, geometry: Mapping[str, Any], sizes: Mapping[str, Any]) -> Callable[[Graph], None]:
    """The function that draws a component, from what another process can be told: geometry and fields of `Sizes` as plain JSON."""
    lengths: dict[str, Any] = {name: Axis(*n) if isinstance(n, list | tuple) else n for name, n in sizes.items()}
    return graph_of(component, geometry_from(geometry), Sizes(**lengths), stored.weights)


def graph_of(component: str, g: Geometry, sizes: Sizes, w: Weights) -> Callable[[Graph], None]:
    """The function that draws a component with any pen."""
    s = sizes
    return {
        "visual": lambda pen: network.visual(pen, g, w, s.views),
        "prefix": lambda pen: network.prefix(pen, g, w, s.batch, s.tokens),
        "action": lambda pen: network.action(pen, g, w, s.batch, s.tokens, s.horizon, s.width, hoisted=s.hoisted),
        "cond": lambda pen: network.cond(pen, g, w, s.times),
    }[component]


def _sizes(c: Configuration, g: Geometry, options: dict[str, Any]) -> Sizes:
    """Engines are tuned for the pictures that the robot usually sends and a prompt of usual length; they take all three slots."""
    batch, view = options["batch"], g.vision.tokens_per_view
    return Sizes(
        axis("B", 1, batch, batch),
        axis("V", 1, batch * c.opt_views, batch * VIEWS),
        axis("S", view + 1, view * c.opt_views + min(_tuned(c), options["max_text"]), view * VIEWS + options["max_text"]),
        axis("K", 1, batch * min(STEPS, options["max_steps"]), batch * options["max_steps"]),
        options["action_horizon"],
        options["action_dim"],
        options["hoisted_adarms_cond"],
    )


def _tuned(c: Configuration) -> int:
    """A number of the state costs about three tokens in the prompt."""
    return TUNED_TEXT + (4 * c.state_dim if c.discrete_state_input else 0)


def _selftest(g: Geometry, s: Sizes, c: Configuration, tokens: Tokens, table: Tensor) -> dict[str, Vector]:
    """Inputs for every component, made of random pictures, noise and one real prompt: the same in every precision.

    Keys and values of the action come from the prefix's answer. Every denoise step has noise of its own, so that none passes for another.
    """
    rng = np.random.default_rng(0)
    ids = tokens.ids("pick up the bowl", np.zeros(c.state_dim) if c.discrete_state_input else None)
    seen = c.opt_views * g.vision.tokens_per_view
    length = seen + ids.size
    text = np.stack([table.row(int(i)).read() for i in ids]).astype(np.float32) * np.float32(math.sqrt(g.prefix.width))
    embeds = np.concatenate([rng.standard_normal((seen, g.prefix.width), np.float32), text])

    def places(first: int, count: int) -> dict[str, Vector]:
        angles = rotary(first, count, g.prefix.head_dim, g.rope_theta)
        return {
            "rope_rotary_cos_sin": np.repeat(angles[None], s.rows, 0), "attention_pos_id": position_ids(s.rows, count),
        }  # fmt: skip

    side = g.vision.image
    views = rng.uniform(-1, 1, (s.rows * c.opt_views, 3, side, side)).astype(np.float32)
    inputs: dict[str, dict[str, Vector]] = {
        "visual/0/in": {"pixel_values": views},
        "prefix/0/in": {"inputs_embeds": np.repeat(embeds[None], s.rows, 0), **places(0, length)},
    }
    times = schedule(3)
    if s.hoisted:
        inputs["cond/0/in"] = {"timesteps": np.repeat(times[: 1 if s.times == s.rows else 3], s.rows)[: _most_times(s)]}
    for k, t in enumerate(times):
        part: dict[str, Vector] = {"timestep": np.full(s.rows, t, np.float32)}
        if s.hoisted:
            part = {"adarms_modulation": rng.standard_normal((s.rows, g.sites, 3 * g.expert.width), np.float32)}
        noise = rng.standard_normal((s.rows, s.horizon, s.width), np.float32)
        inputs[f"action/{k}/in"] = {"noise_trajectory": noise, **part, **places(length, s.horizon)}
    return {f"{where}/{name}": array for where, arrays in inputs.items() for name, array in arrays.items()}


def _most_times(s: Sizes) -> int:
    return s.times if isinstance(s.times, int) else s.times.max


def _tokenizer(checkpoint: Path, given: Path | None, out: Path) -> Path:
    """The tokenizer's file: the one given, the checkpoint's, or that of the export which is made again. Raises BadRequest."""
    if given is not None:
        return Path(given)
    for place in (*(checkpoint / name for name in TOKENIZER_PLACES), out / "text_tokenizer" / TOKENIZER):
        if place.is_file():
            return place
    raise BadRequest(
        f"{checkpoint} has no {' or '.join(TOKENIZER_NAMES)}, at its root or in text_tokenizer/; "
        "name PaliGemma's SentencePiece model with --tokenizer FILE"
    )


def _kernel_forms(g: Geometry, horizon: int, width: int, dtype: str, batch: int, *, hoisted: bool) -> dict[str, KernelForm]:
    """The components as the kernels know them, the denoise step's for one robot. Raises BadRequest for a network that they do not take."""
    check_kernels(dtype)
    if not hoisted:
        raise BadRequest("--kernels want the time's part hoisted out of the action: leave --no-hoist-cond out")
    forms: dict[str, KernelForm] = {"visual": Vision.of(g), "prefix": Prefix.of(g)}
    if batch == 1:
        forms["action"] = step = expert.Shape.of(g, horizon, width)
        expert.check_shape(step)
    return forms


def _kernel_weights(g: Geometry, form: KernelForm, w: Weights, kind: type) -> tuple[str, dict[str, Any]]:
    """The artifact's name and entries."""
    if isinstance(form, Vision):
        return ROWS, dict(vision.entries(g, w, kind))
    if isinstance(form, Prefix):
        return ROWS, dict(prefix.entries(g, w, kind))
    return expert.PACKED, dict(expert.stored_tensors(form, w, kind))


def _check_options(dtype: str, batch: int, max_steps: int, max_text: int, chosen: Sequence[str], wanted: Sequence[str]) -> None:
    for wrong, what in (
        (dtype not in PRECISIONS, f"--dtype {dtype}: choose one of {', '.join(PRECISIONS)}"),
        (batch < 1, f"--batch {batch}: engines answer at least one robot"),
        (not 1 <= max_steps <= MOST_STEPS, f"--max-steps {max_steps}: give a number from 1 to {MOST_STEPS}"),
        (not 1 <= max_text <= 1024, f"--max-text {max_text}: give a number of tokens from 1 to 1024"),
        (
            not chosen or not set(chosen) <= set(wanted),
            f"--components {','.join(chosen)}: this export has {', '.join(wanted)}",
        ),
    ):
        if wrong:
            raise BadRequest(what)
