"""A GR00T N1.7 checkpoint to a bundle: three graphs, two constant tables for each number of steps, the token table, the contract."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vla_eval.arrays import write_npz
from vla_eval.engines.bundle import Bundle, Identity, Stage, open_bundle, staged
from vla_eval.engines.draw import draw
from vla_eval.engines.graph import NUMPY, PRECISIONS, Axis, Dim, Graph, axis
from vla_eval.engines.verify import SELFTEST
from vla_eval.engines.weights import FLOAT16_LIMIT, Checkpoint, Tensor, Weights, open_checkpoint, token_table, write_tensors
from vla_eval.types import BadRequest, Progress, Vector, silent

from ..components import KERNELS, check_kernels, position_ids
from ..on_rows import PACKED as ROWS
from ..on_rows import Entry
from . import backbone, dit, dit_rows, network, vision
from .backbone import Backbone
from .configuration import (
    EMBEDDING,
    HEAD,
    PREFIXES,
    RELEASED,
    Architecture,
    geometry_from,
    not_needed,
    read_architecture,
    read_geometry,
    trained_steps,
)
from .contract import FRAMES, MERGE, PATCH, TOKENIZER_FILES, Contract, from_checkpoint, parse
from .dit_rows import DitRows
from .processor import Layout, Tokens, positions, seen_grid, text_rotary, vision_tables
from .runtime import DEEPSTACK
from .tables import action_time_bias, adanorm_modulation, buckets
from .vision import Vision

COMPONENTS = ("visual", "vl_backbone", "action")
KernelForm = dit.Shape | DitRows | Vision | Backbone  # of a component, as the kernels know it
MOST_ROBOTS = 1024  # in a batch: a request of that many holds some 10 GB already
TUNED_TEXT = 11  # tokens of an instruction that engines are tuned for: the reference's prompt, 148 long with two pictures


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths that the graphs are drawn for."""

    batch: int
    patches: Dim
    bounds: Dim  # pictures + 1
    tokens: Dim


def recipe(
    checkpoint: Path,
    out: Path,
    *,
    embodiment: int | str | None = None,
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32",
    batch: int = 1,
    steps: Sequence[int] = (),
    max_text: int = 64,
    components: Sequence[str] = COMPONENTS,
    geometry: Path | None = None,
    tokenizer: Path | None = None,
    kernels: bool = False,
    direct: bool = False,
    progress: Progress = silent,
) -> Bundle:
    """Export a GR00T N1.7 checkpoint: ONNX graphs, constant tables and the policy's contract, all checked before a byte is written.

    Args:
        checkpoint: The folder with config.json, the .safetensors files and the processor's files.
        out: The bundle to write: a new or empty folder, or one that holds this same export.
        embodiment: A tag of the checkpoint's embodiment_id.json, or a slot. [default: by the checkpoint folder's name]
        dtype: Of weights and activations. fp32 is the truth; fp16 and bf16 are for TensorRT.
        batch: Robots that the engines answer together, fixed for a run.
        steps: Denoise steps to make constant tables for, such as 4,8. [default: num_inference_timesteps of config.json]
        max_text: The longest instruction, in tokens.
        components: Only some of them, such as visual,action.
        geometry: A JSON file that declares another backbone than the released one.
        tokenizer: The backbone's tokenizer folder, if the checkpoint has none.
        kernels: Also the weights for kernels of our own, which then answer on an H100 or H200; the denoise step's for one robot alone.
        direct: TensorRT plans for this machine instead of ONNX graphs, as `vla-eval build --direct` makes them.
        progress: Is told what is being done, how much of it is done, and of how much; no option of the command line.
    """
    checkpoint, folder = Path(checkpoint), Path(tokenizer) if tokenizer else Path(checkpoint) / "tokenizer"
    _check_options(dtype, batch, steps, max_text, components)
    stored = open_checkpoint(checkpoint, PREFIXES)
    a = read_architecture(stored, read_geometry(Path(geometry)) if geometry else RELEASED)
    steps = steps or (trained_steps(checkpoint),)
    policy = from_checkpoint(checkpoint, embodiment, tokenizer=folder)
    contract = parse(policy, str(checkpoint))
    slot = contract.embodiment_id
    _check_contract(checkpoint, contract, a, steps)
    rows, columns = seen_grid(contract.pictures)
    tokens = Tokens(folder, contract.prompt, rows * columns // MERGE**2)
    for name in ("image_pad", "vision_start", "vision_end", "im_start", "im_end"):
        found, wanted = tokens.id_of(f"<|{name}|>"), a.geometry.token_ids.get(name)
        if wanted is not None and found != wanted:
            told = f"<|{name}|> is token {found}, the geometry says {wanted}"
            raise BadRequest(f"{folder}: {told}; this is the tokenizer of another backbone")
    forms = _kernel_forms(a, stored.weights, dtype, batch) if kernels else {}
    table = token_table(stored, EMBEDDING, HEAD)
    work = stored.followed(progress, 2)  # to look at every number, and to write it
    work.what = "looking for NaN and infinity, MB"
    stored.check_numbers(FLOAT16_LIMIT if dtype == "fp16" else math.inf)

    options = {
        "dtype": dtype, "batch": batch, "steps": sorted(set(steps)), "max_text": max_text, "embodiment_id": slot,
        "views": len(contract.cameras), "grid": [rows, columns], "geometry": asdict(a.geometry), **({KERNELS: True} if kernels else {}),
    }  # fmt: skip
    sizes = _sizes(contract, tokens, batch, rows * columns, max_text)
    with staged(out, Identity("gr00t", "direct" if direct else "onnx", stored.fingerprint, options), policy, "action/policy.json") as stage:
        for component in (name for name in COMPONENTS if name in components):
            work.what = f"exporting {component}, MB"
            drawn = draw(stage, component, stored, graph_from, geometry=options["geometry"], slot=slot, sizes=asdict(sizes))
            extra: dict[str, Any] = {}
            if component == "vl_backbone":
                _write(stage, component, "embed_tokens", dtype, table.shape, table.pieces())
            if component == "action":
                extra = {"embodiment_id": slot, "buckets": {str(n): buckets(n, a.buckets) for n in steps}}
                for n in sorted(set(steps)):
                    for name, numbers in (
                        ("adanorm_modulation", adanorm_modulation(a, stored.weights, n)),
                        ("action_time_bias", action_time_bias(a, stored.weights, n, slot)),
                    ):
                        _write(stage, component, name, dtype, numbers.shape, [numbers], suffix=f".{n}")
            if (form := forms.get(component)) is not None:
                _write_kernels(stage, component, a, form, stored.weights, slot, dtype, sorted(set(steps)))
                extra[KERNELS] = asdict(form)
            stage.finish(component, drawn.inputs, drawn.outputs, **extra)
        if set(components) == set(COMPONENTS):
            stored.check_all_read(not_needed(stored, a))
        stage.copy(folder, "tokenizer", TOKENIZER_FILES)  # the backbone's folder may hold its weights too
        write_npz(stage.shared(SELFTEST), _selftest(a, contract, tokens, table, stored.weights, batch, (rows, columns), min(steps)))
    work.read(work.total)
    return open_bundle(out)


def graph_from(
    stored: Checkpoint, component: str, *, geometry: Mapping[str, Any], slot: int, sizes: Mapping[str, Any]
) -> Callable[[Graph], None]:
    """The function that draws a component, from what another process can be told: geometry and fields of `Sizes` as plain JSON."""
    lengths: dict[str, Any] = {name: Axis(*n) if isinstance(n, list | tuple) else n for name, n in sizes.items()}
    return graph_of(component, read_architecture(stored, geometry_from(geometry)), slot, Sizes(**lengths), stored)


def graph_of(component: str, a: Architecture, slot: int, sizes: Sizes, stored: Checkpoint) -> Callable[[Graph], None]:
    """The function that draws a component with any pen."""
    w = stored.weights
    return {
        "visual": lambda g: network.visual(g, a, w, sizes.patches, sizes.bounds),
        "vl_backbone": lambda g: network.vl_backbone(g, a, w, sizes.batch, sizes.tokens),
        "action": lambda g: network.action(g, a, w, slot, sizes.batch, sizes.tokens),
    }[component]


def _selftest(
    a: Architecture, contract: Contract, tokens: Tokens, table: Tensor, w: Weights, batch: int, grid: tuple[int, int], steps: int
) -> dict[str, Vector]:
    """Inputs for every component, made of random pictures, states and noise and one real prompt: the same in every precision.

    Keys and values of the action come from the backbone's answer. Every denoise step has noise of its own, so that none passes for another.
    """
    rng, layout = np.random.default_rng(0), Layout.of(asdict(a.geometry))
    views = len(contract.cameras) * batch

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32)

    made = vision_tables(layout, views, grid)
    ids = tokens.ids("pick up the bowl")
    image = ids == layout.image_token
    embeds = normal(batch, ids.size, a.text.hidden)  # picture tokens as they are; text tokens from the table
    embeds[:, ~image] = np.stack([table.row(int(i)).read() for i in ids[~image]]).astype(np.float32)
    taps = {f"deepstack_embeds_{k}": normal(*embeds.shape) * image[:, None] for k in range(len(a.vision.deepstack_after_blocks))}
    rotary = np.broadcast_to(text_rotary(layout, positions(ids, layout.image_token, grid)), (batch, ids.size, a.text.head_dim))
    visual = {
        "input": rng.uniform(-1, 1, (views * grid[0] * grid[1], a.vision.patch_values)).astype(np.float32),
        "rotary_pos_emb": made.rotary, "cu_seqlens": made.cu_seqlens,
        "fast_pos_embed_idx": made.position_index, "fast_pos_embed_weight": made.position_weight,
    }  # fmt: skip
    backbone = {"inputs_embeds": embeds, "rope_rotary_cos_sin": rotary, "attention_pos_id": position_ids(batch, ids.size), **taps}
    modulation, bias = adanorm_modulation(a, w, steps), action_time_bias(a, w, steps, contract.embodiment_id)
    masks = {
        f"{kind}_attention_mask": np.broadcast_to(seen, (batch, 1, 1, ids.size)) for kind, seen in (("text", ~image), ("image", image))
    }
    state = rng.uniform(-1, 1, (batch, 1, a.state_dim)).astype(np.float32)
    inputs = {"visual/0/in": visual, "vl_backbone/0/in": backbone}
    for k in range(steps):
        noise = normal(batch, a.horizon, a.action_dim)
        tables = {"adanorm_modulation": modulation[k], "action_time_bias": bias[k]}
        inputs[f"action/{k}/in"] = {"noise_trajectory": noise, "state": state, **tables, **masks}
    return {f"{where}/{name}": array for where, arrays in inputs.items() for name, array in arrays.items()}


def _kernel_forms(a: Architecture, w: Weights, dtype: str, batch: int) -> dict[str, KernelForm]:
    """The components as the kernels know them. Raises BadRequest for a network that they do not take."""
    check_kernels(dtype)
    step = dit.Shape.of(a, w)
    if batch == 1:
        dit.check_shape(step)
    return {"visual": Vision.of(a), "vl_backbone": Backbone.of(a, w), "action": step if batch == 1 else DitRows.of(step)}


def _write_kernels(
    stage: Stage, component: str, a: Architecture, form: KernelForm, w: Weights, slot: int, dtype: str, steps: Sequence[int]
) -> None:  # fmt: skip
    kind = NUMPY[PRECISIONS[dtype]]
    rows: dict[str, Callable[[], Iterator[tuple[str, Entry]]]] = {
        "visual": lambda: vision.entries(a, w, kind), "vl_backbone": lambda: backbone.entries(a, w, kind),
        "action": lambda: dit_rows.entries(dit.Shape.of(a, w), w, slot, kind),
    }  # fmt: skip
    if not isinstance(form, dit.Shape):
        write_tensors(stage.file(component, f"{ROWS}.safetensors"), dict(rows[component]()))
        return
    write_tensors(stage.file(component, f"{dit.PACKED}.safetensors"), dict(dit.stored_tensors(form, w, slot, kind)))
    layers = dit.layers(form, w, slot)
    for n in steps:
        tables = dit.step_constants(form, layers, adanorm_modulation(a, w, n), action_time_bias(a, w, n, slot))
        entries = {name: (np.float32, numbers.shape, [numbers]) for name, numbers in tables.items()}
        write_tensors(stage.file(component, f"{dit.PACKED}.{n}.safetensors"), entries)


def _write(stage: Stage, component: str, name: str, dtype: str, shape: Sequence[int], pieces: Any, *, suffix: str = "") -> None:
    write_tensors(stage.file(component, f"{name}{suffix}.safetensors"), {name: (NUMPY[PRECISIONS[dtype]], shape, pieces)})


def _sizes(contract: Contract, tokens: Tokens, batch: int, patches: int, max_text: int) -> Sizes:
    """Pictures come in one size; a prompt is everything but the instruction, and 1 … max_text tokens of that."""
    views = len(contract.cameras) * batch
    fixed = int(tokens.ids("a").size) - 1
    return Sizes(
        batch,
        axis("P", patches, patches * views, patches * views),
        axis("N", 2, views + 1, views + 1),
        axis("S", fixed + 1, fixed + min(TUNED_TEXT, max_text), fixed + max_text),
    )


def _check_options(dtype: str, batch: int, steps: Sequence[int], max_text: int, components: Sequence[str]) -> None:
    for wrong, what in (
        (dtype not in PRECISIONS, f"--dtype {dtype}: choose one of {', '.join(PRECISIONS)}"),
        (not 1 <= batch <= MOST_ROBOTS, f"--batch {batch}: engines answer 1 to {MOST_ROBOTS} robots together"),
        (min(steps, default=1) < 1, f"--steps {','.join(map(str, steps))}: give counts of at least one step"),
        (max_text < 1, f"--max-text {max_text}: an instruction has at least one token"),
        (
            not components or not set(components) <= set(COMPONENTS),
            f"--components {','.join(components)}: there are {', '.join(COMPONENTS)}",
        ),
    ):
        if wrong:
            raise BadRequest(what)


def _check_contract(checkpoint: Path, contract: Contract, a: Architecture, steps: Sequence[int]) -> None:
    """Hold the processor's numbers against the network's. Raises BadRequest."""
    for what, said, built in (
        ("max_action_horizon", contract.model_horizon, a.horizon),
        ("max_action_dim", contract.action_width, a.action_dim),
        ("max_state_dim", contract.state_width, a.state_dim),
    ):
        if said != built:
            raise BadRequest(f"{checkpoint}: {what} is {said} in processor_config.json, {built} in the network: two checkpoints mixed")
    v = a.vision
    for what, said, built in (
        ("vision.patch", v.patch, PATCH), ("vision.temporal_patch", v.temporal_patch, FRAMES), ("vision.merge", v.merge, MERGE),
        ("number of vision.deepstack_after_blocks", len(v.deepstack_after_blocks), DEEPSTACK),
    ):  # fmt: skip
        if said != built:
            raise BadRequest(f"{checkpoint}: the geometry's {what} is {said}; pictures are packed for {built} alone")
    if not 0 <= contract.embodiment_id < a.embodiments:
        raise BadRequest(f"{checkpoint}: embodiment {contract.embodiment_id} has no slot, the checkpoint has {a.embodiments} of them")
    if max(steps) > a.buckets:
        raise BadRequest(f"--steps {max(steps)}: the network tells {a.buckets} times apart, so it cannot take more steps")
