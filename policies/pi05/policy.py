"""pi0.5 as a robot sees it: a request in, a chunk of actions in robot units out; and the tensors below it as files. H actions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_eval.arrays import read_npy
from vla_eval.engines.bench import Rehearsal
from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.types import SEED_LIMIT, BadRequest, ContractMismatch, InvalidObservation, Vector

from ..flow import Stopwatch, draw_noise
from ..sight import Pictures
from .adapters import ADAPTERS, Seen, read, specimen
from .configuration import RELEASED, VIEWS
from .contracts import Configuration, Statistics, find_statistics, read_policy, read_statistics
from .processor import TOKENIZER, Tokens, normalise, pixels, unnormalise, unpacked
from .runtime import Inputs, Pi05Runtime

PIXELS, TOKENS, START = "pixel_values.bin", "token_ids.csv", "x0.bin"  # the canonical tensors' files
_CSV_LIMIT = 1 << 20


class Row(NamedTuple):
    """A request, packed: `Inputs` but for the noise, and the state that robot units need."""

    pixels: NDArray[np.float32] | Pictures
    token_ids: NDArray[np.int64]
    state: NDArray[np.float64]  # adapted, not normalised


class Pi05Policy:
    """Host code only: everything that policy.json describes, around a runtime that knows none of it."""

    def __init__(self, configuration: Configuration, statistics: Statistics, tokens: Tokens, runtime: Pi05Runtime) -> None:
        """Raises ContractMismatch where the configuration's numbers are not the engines'."""
        if configuration.horizon != runtime.horizon:
            raise ContractMismatch(
                f"action.horizon is {configuration.horizon} in {configuration.name}, {runtime.horizon} in the action engine; "
                "export the checkpoint again"
            )
        if configuration.action_dim > runtime.width:
            raise ContractMismatch(
                f"action.dim is {configuration.action_dim} in {configuration.name}, the engine's width {runtime.width}; "
                "export the checkpoint again"
            )
        self.configuration = configuration
        self.statistics = statistics
        self.runtime = runtime
        self._tokens = tokens
        self._adapter = ADAPTERS[configuration.adapter]

    def infer(self, request: Mapping[str, Any], *, noise: Vector | None = None, seed: int = 0) -> dict[str, NDArray[Any]]:
        """`actions` [H, N] in robot units, `chunk_normalized` [H, 32] as the network left it, and the `token_ids` [1, T] of the prompt.

        The request has the keys of openpi's client for that robot. `noise` [H, 32] float32 is where the flow starts, by default drawn
        from the seed. Raises InvalidObservation, naming the key, before any engine runs.
        """
        row = self.row(request)
        (answer,) = self.runtime([Inputs(row.pixels, row.token_ids, self._start(noise, seed))])
        return {
            "actions": self.actions(answer.chunk, row.state), "chunk_normalized": answer.chunk, "token_ids": row.token_ids[None],
        }  # fmt: skip

    def row(self, request: Mapping[str, Any]) -> Row:
        """The request as the network sees it. Raises InvalidObservation."""
        seen: Seen = read(self._adapter, self.configuration, request)
        state = normalise(seen.state, self.statistics.state) if self.configuration.discrete_state_input else None
        packed = (unpacked if self.runtime.on_card else pixels)(list(seen.pictures.values()), self.runtime.geometry.vision.image)
        return Row(packed, self._tokens.ids(seen.prompt, state), seen.state)

    def actions(self, chunk: Vector, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """A normalised chunk [H, 32] in robot units [H, N]; `state` is the request's, adapted."""
        whole = unnormalise(chunk, self.statistics.action)[:, : self.configuration.action_dim]
        return self._adapter.to_robot(whole, state)

    def rehearse(self, words: str, seed: int = 0) -> Rehearsal:
        """Random pictures and states of the robot under one instruction, a full batch of them, to be answered again and again."""
        runtime, rng = self.runtime, np.random.default_rng(seed)
        requests = [specimen(self._adapter, self.configuration, rng, words) for _ in range(runtime.batch)]

        def answer() -> Mapping[str, float]:
            before, after = Stopwatch(), Stopwatch()
            with before.stage("pack"):
                packed = [self.row(request) for request in requests]
                rows = [Inputs(row.pixels, row.token_ids, self._start(None, seed + i)) for i, row in enumerate(packed)]
            answers = runtime(rows)
            with after.stage("unpack"):
                for row, got in zip(packed, answers, strict=True):
                    self.actions(got.chunk, row.state)
            return {**before.seconds, **answers[0].seconds, **after.seconds}

        packed = [self.row(request) for request in requests]
        rows = [Inputs(row.pixels, row.token_ids, self._start(None, seed + i)) for i, row in enumerate(packed)]
        views = rows[0].shape.views
        tokens = views * runtime.geometry.vision.tokens_per_view + rows[0].token_ids.size
        about = {"batch": runtime.batch, "views": views, "tokens": tokens, "steps": runtime.steps}
        rival = {"batch": runtime.batch, "steps": runtime.steps, "horizon": runtime.horizon}
        return Rehearsal(answer, rows, about, rival if runtime.geometry == RELEASED and views == 2 else None)

    def canonical(self, pixel_file: Path, token_file: Path, start_file: Path) -> Inputs:
        """The tensors of one request as another program left them: float16 [V, 3, side, side], ids in a line, float32 [H, 32].

        Raises BadRequest, naming the file, for a size or number that does not fit.
        """
        side = self.runtime.geometry.vision.image
        seen = _raw(pixel_file, np.float16, (3, side, side), range(1, VIEWS + 1), "views")
        if np.abs(seen).max() > 1:
            raise BadRequest(f"{pixel_file} runs from {seen.min()} to {seen.max()}, wanted pictures in -1 … 1, as the network takes them")
        start = _raw(start_file, np.float32, (self.runtime.horizon, self.runtime.width), range(1, 2), "chunk")
        return Inputs(seen.astype(np.float32), _ids(token_file), start[0].astype(np.float32))

    def infer_canonical(self, folder: Path) -> dict[str, NDArray[Any]]:
        """`chunk_normalized` [H, 32] of the canonical tensors in a folder; robot units would need the request's own state."""
        (answer,) = self.runtime([self.canonical(folder / PIXELS, folder / TOKENS, folder / START)])
        return {"chunk_normalized": answer.chunk}

    def reproduce(self, pixel_file: Path, token_file: Path, start_file: Path, chunk_file: Path) -> tuple[Vector, Vector]:
        """Our chunk [H, 32] on another program's canonical tensors, and its own, for scoring.

        Raises BadRequest for more views than the robot has: the model would attend to slots that the reference masks, so such a shape is
        a benchmark and never scored.
        """
        row = self.canonical(pixel_file, token_file, start_file)
        views, most_views = row.shape.views, len(self.configuration.cameras)
        if views > most_views:
            raise BadRequest(
                f"{pixel_file} holds {views} views, {self.configuration.name} has {most_views}: filler views attend here and are masked "
                "in the reference, so this cannot be scored; leave them out"
            )
        theirs = read_npy(chunk_file)
        wanted = (self.runtime.horizon, self.runtime.width)
        if theirs.shape == (1, *wanted):
            theirs = theirs[0]
        if theirs.shape != wanted or theirs.dtype.kind != "f" or not np.isfinite(theirs).all():
            raise BadRequest(f"{chunk_file} holds {theirs.dtype} {list(theirs.shape)}, wanted a finite normalised chunk {list(wanted)}")
        (answer,) = self.runtime([row])
        return answer.chunk, theirs

    def _start(self, noise: Vector | None, seed: int) -> NDArray[np.float32]:
        shape = (self.runtime.horizon, self.runtime.width)
        if noise is None:
            if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or not 0 <= seed < SEED_LIMIT:
                raise InvalidObservation(f"seed is {seed!r}; it must be a whole number between 0 and {SEED_LIMIT - 1}")
            return draw_noise(seed, *shape)
        if not isinstance(noise, np.ndarray) or noise.shape not in {shape, (1, *shape)} or noise.dtype != np.float32:
            has = f"{noise.dtype} {list(noise.shape)}" if isinstance(noise, np.ndarray) else type(noise).__name__
            raise InvalidObservation(f"noise is {has}, wanted float32 {list(shape)}")
        return noise.reshape(shape)


def open_policy(
    path: str | Path | Bundle, *, backend: str = "auto", steps: int | None = None, kernels: str = "auto", asset: str | None = None
) -> Pi05Policy:
    """The policy of a bundle, its engines loaded. `asset` names one of several sets of statistics.

    Raises BadRequest or ContractMismatch, in one sentence, for a bundle that does not hold.
    """
    bundle = path if isinstance(path, Bundle) else open_bundle(path)
    if bundle.model != "pi05":
        raise ContractMismatch(f"{bundle.path} is a bundle of {bundle.model!r}, not of 'pi05'; load it with that policy")
    where = bundle.path / "policy.json"
    configuration = read_policy(bundle.policy, where)
    statistics = read_statistics(find_statistics(bundle.path, "--option asset=ID", asset), configuration)
    tokens = Tokens(bundle.path / "text_tokenizer" / TOKENIZER)
    rows = int(bundle.options["geometry"]["table_rows"])
    if tokens.size > rows:
        raise ContractMismatch(f"{tokens.file} has {tokens.size} pieces, the token table {rows} rows; it is another model's tokenizer")
    if (said := bundle.policy["tokenizer"].get("sentencepiece_sha256")) != tokens.sha256:
        raise ContractMismatch(f"{tokens.file} is not the tokenizer of the export (its SHA-256 is not {said}); copy the bundle again")
    runtime = Pi05Runtime(bundle, backend=backend, steps=steps, kernels=kernels)
    if (width := bundle.policy["action"].get("max_dim")) != runtime.width:
        raise ContractMismatch(f"{where}: action.max_dim is {width!r}, the engine's {runtime.width}; export the checkpoint again")
    side = runtime.geometry.vision.image
    if bundle.policy.get("image_resolution") != [side, side]:
        raise ContractMismatch(f"{where}: image_resolution is {bundle.policy.get('image_resolution')!r}, the engine's {[side, side]}")
    return Pi05Policy(configuration, statistics, tokens, runtime)


def _raw(file: Path, dtype: Any, shape: tuple[int, ...], counts: range, what: str) -> Vector:
    """[N, *shape] from a file of nothing but numbers."""
    item = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if file.is_dir():
        raise BadRequest(f"{file} is a folder, wanted a file of {np.dtype(dtype)} {list(shape)}")
    try:
        size = file.stat().st_size
        if size % item or size // item not in counts:
            told = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else "1"
            raise BadRequest(f"{file} has {size} bytes, wanted {told} {what} of {item} bytes: {np.dtype(dtype)} {list(shape)}")
        array: Vector = np.fromfile(file, dtype).reshape(-1, *shape)
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read ({error.strerror})") from error
    if not np.isfinite(array).all():
        raise BadRequest(f"{file} holds NaN or infinity")
    return array


def _ids(file: Path) -> NDArray[np.int64]:
    try:
        if file.stat().st_size > _CSV_LIMIT:
            raise BadRequest(f"{file}: {file.stat().st_size} bytes are too many for a prompt")
        rows = [line.split() for line in file.read_text("utf-8-sig").replace(",", " ").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{file}: cannot be read ({error})") from error
    if len(rows) > 1 and max(map(len, rows)) > 1:
        raise BadRequest(f"{file} has {len(rows)} rows of ids; a prompt is one row, or one id a line")
    words = [word for row in rows for word in row]
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise BadRequest(f"{file}: {word!r} is no token id")
    ids = np.trim_zeros(np.array([int(word) for word in words], np.int64), "b")  # the reference's prompt ends in padding, which is id 0
    if not ids.all():
        raise BadRequest(f"{file}: padding (id 0) stands before other tokens; nothing is masked here, so leave it out")
    return ids
