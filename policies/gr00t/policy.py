"""GR00T as a robot sees it: an observation in, a chunk of actions in robot units out. B robots, T steps, D numbers of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.bench import Rehearsal
from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.types import SEED_LIMIT, ContractMismatch, Image, InvalidObservation, Vector

from ..flow import Stopwatch, draw_noise
from ..sight import Pictures
from .configuration import RELEASED
from .contract import MERGE, Contract, load
from .processor import VALUES, Layout, Tokens, decode_chunk, encode_state, pack, see, seen_grid, unpacked
from .runtime import Gr00tRuntime, Inputs

MOST_SIDE = 8192  # pixels of a camera: padded to a square that is 200 MB


class Gr00tPolicy:
    """Host code only: everything that policy.json describes, around a runtime that knows none of it."""

    def __init__(self, contract: Contract, tokens: Tokens, runtime: Gr00tRuntime) -> None:
        """Raises ContractMismatch where the contract's numbers are not the engines'."""
        for what, said, built in (
            ("action.model_horizon", contract.model_horizon, runtime.horizon),
            ("action.width", contract.action_width, runtime.width),
            ("state.width", contract.state_width, runtime.state_width),
            ("the token of a picture", tokens.image_token, runtime.layout.image_token),
        ):
            if said != built:
                raise ContractMismatch(
                    f"{what} is {said} in policy.json and tokenizer, {built} in the engines; export the checkpoint again"
                )
        self.contract = contract
        self.runtime = runtime
        self._tokens = tokens
        self._grid = seen_grid(contract.pictures)
        self._wanted: dict[str, tuple[np.dtype[Any], tuple[int | str, ...]]] = {
            **{f"video.{camera}": (np.dtype(np.uint8), ("B", 1, "H", "W", 3)) for camera in contract.cameras},
            **{f"state.{group.key}": (np.dtype(np.float32), ("B", 1, group.dim)) for group in contract.state},
        }
        self._patches: list[NDArray[np.float32]] = []  # one buffer for each row of the largest batch so far

    def infer(self, observation: Mapping[str, Any], *, noise: Vector | None = None, seed: int = 0) -> dict[str, NDArray[np.float32]]:
        """`action.<group>` [B, T, D] in robot units, and `chunk_normalized` [B, 40, 132] as the network left it.

        The observation is flat: `video.<camera>` [B, 1, H, W, 3] uint8, `state.<group>` [B, 1, D] float32, and the instruction under
        the contract's language key, one text for all or a sequence of B. Row b starts from `noise[b]` [40, 132], or from numbers
        drawn from seed + b. Raises InvalidObservation, naming the key, before any engine runs.
        """
        rows = self.rows(observation)
        starts = self._starts(noise, seed, len(rows))
        answers = self.runtime([Inputs(*row, start) for row, start in zip(rows, starts, strict=True)])
        chunk = np.stack([answer.chunk for answer in answers])
        return {**{f"action.{key}": actions for key, actions in decode_chunk(self.contract, chunk).items()}, "chunk_normalized": chunk}

    def rows(
        self, observation: Mapping[str, Any], slot: int = 0
    ) -> list[tuple[NDArray[np.float32] | Pictures, tuple[int, int], NDArray[np.int64], NDArray[np.float32]]]:
        """Each robot's patches, their grid, token ids and encoded state: `Inputs` but for the noise.

        Row b's patches lie in the memory of slot + b, and are valid until that slot is used again; pictures for a card, the observation's.
        """
        contract, batch = self.contract, self._check(observation)
        texts = _texts(observation[contract.language_key], contract.language_key, batch)
        rows = []
        for b in range(batch):
            pictures = [observation[f"video.{camera}"][b, 0] for camera in contract.cameras]
            state = encode_state(contract, {group.key: observation[f"state.{group.key}"][b, 0] for group in contract.state})
            rows.append((self._packed(pictures, slot + b), self._grid, self._tokens.ids(texts[b]), state))
        return rows

    def _packed(self, pictures: Sequence[Image], slot: int) -> NDArray[np.float32] | Pictures:
        how = self.contract.pictures
        return unpacked(pictures, how) if self.runtime.on_card else pack([see(picture, how) for picture in pictures], self._buffer(slot))

    def rehearse(self, words: str, seed: int = 0) -> Rehearsal:
        """Random pictures and states of the contract's robot under one instruction: a full batch, to be answered again and again."""
        contract, batch, rng = self.contract, self.runtime.batch, np.random.default_rng(seed)
        side = contract.pictures.edge or max(contract.pictures.target)
        seen = {f"video.{camera}": rng.integers(0, 256, (batch, 1, side, side, 3), np.uint8) for camera in contract.cameras}
        state = {f"state.{group.key}": rng.uniform(0, 0.3, (batch, 1, group.dim)).astype(np.float32) for group in contract.state}
        observation = {**seen, **state, contract.language_key: words}

        def packed() -> list[Inputs]:
            starts = self._starts(None, seed, batch)
            return [Inputs(*row, start) for row, start in zip(self.rows(observation), starts, strict=True)]

        def answer() -> Mapping[str, float]:
            before, after = Stopwatch(), Stopwatch()
            with before.stage("pack"):
                rows = packed()
            answers = self.runtime(rows)
            with after.stage("unpack"):
                decode_chunk(contract, np.stack([answer.chunk for answer in answers]))
            return {**before.seconds, **answers[0].seconds, **after.seconds}

        rows, steps = packed(), self.runtime.steps
        about = {"batch": batch, "views": len(contract.cameras), "tokens": rows[0].token_ids.size, "steps": steps}
        same = self.runtime.layout == Layout.of(asdict(RELEASED)) and about["views"] == 2
        return Rehearsal(answer, rows, about, {"batch": batch, "steps": steps} if same else None)

    def _buffer(self, slot: int) -> NDArray[np.float32]:
        while len(self._patches) <= slot:
            self._patches.append(np.empty((len(self.contract.cameras) * self._grid[0] * self._grid[1], VALUES), np.float32))
        return self._patches[slot]

    def _starts(self, noise: Vector | None, seed: int, batch: int) -> list[NDArray[np.float32]]:
        horizon, width = self.contract.model_horizon, self.contract.action_width
        if noise is None:
            if not isinstance(seed, int | np.integer) or not 0 <= seed < SEED_LIMIT - batch:
                raise InvalidObservation(f"seed is {seed!r}; it must be a whole number from 0 to {SEED_LIMIT - batch - 1}")
            return [draw_noise(seed + b, horizon, width) for b in range(batch)]
        shapes = {(batch, horizon, width), *([(horizon, width)] if batch == 1 else [])}
        if not isinstance(noise, np.ndarray) or noise.shape not in shapes or noise.dtype != np.float32:
            raise InvalidObservation(f"noise is {_kind(noise)}, wanted float32 {[batch, horizon, width]}")
        return list(noise.reshape(batch, horizon, width))

    def _check(self, observation: Mapping[str, Any]) -> int:
        """The number of robots, if every key is there, known, and of the dtype and shape that the contract says."""
        wanted, known = self._wanted, {*self._wanted, self.contract.language_key}
        if missing := known - set(observation):
            raise InvalidObservation(
                f"the observation lacks {', '.join(sorted(missing))}; it has {', '.join(sorted(observation)) or 'nothing'}"
            )
        if unknown := set(observation) - known:
            raise InvalidObservation(
                f"the observation has {', '.join(sorted(unknown))}, which this policy does not take; it takes {', '.join(sorted(known))}"
            )
        batch = 0
        for key, (dtype, shape) in wanted.items():
            value = observation[key]
            fits = (
                isinstance(value, np.ndarray)
                and value.dtype == dtype
                and value.ndim == len(shape)
                and value.size > 0
                and all(n == m or isinstance(m, str) for n, m in zip(value.shape, shape, strict=True))
            )
            if not fits or value.shape[0] != (batch := batch or int(value.shape[0])):
                told = f"{dtype} [{', '.join(map(str, shape))}]" + (f" with B = {batch}" if batch else "")
                raise InvalidObservation(f"{key} is {_kind(value)}, wanted {told}")
            if dtype == np.uint8 and max(value.shape[2:4]) > MOST_SIDE:
                raise InvalidObservation(f"{key} is {value.shape[2]} × {value.shape[3]} pixels; a side may have {MOST_SIDE}")
        states = {key: observation[key] for key, (dtype, _) in wanted.items() if dtype == np.float32}
        if states and not np.isfinite(np.concatenate([*states.values()], axis=-1)).all():
            raise InvalidObservation(f"{next(key for key, value in states.items() if not np.isfinite(value).all())} holds NaN or infinity")
        return batch


def open_policy(path: str | Path | Bundle, *, backend: str = "auto", steps: int | None = None, kernels: str = "auto") -> Gr00tPolicy:
    """The policy of a bundle, its engines loaded. Raises BadRequest or ContractMismatch, in one sentence, for one that does not hold."""
    bundle = path if isinstance(path, Bundle) else open_bundle(path)
    if bundle.model != "gr00t":
        raise ContractMismatch(f"{bundle.path} is a bundle of {bundle.model!r}, not of 'gr00t'; load it with that policy")
    contract = load(bundle.path / "action" / "policy.json")
    rows, columns = seen_grid(contract.pictures)
    for what, said, built in (
        ("embodiment_id is", contract.embodiment_id, bundle.options["embodiment_id"]),
        ("cameras are", len(contract.cameras), bundle.options["views"]),
        ("patches of a picture are", [rows, columns], bundle.options["grid"]),
    ):
        if said != built:
            raise ContractMismatch(f"{bundle.path}: {what} {said} in policy.json, {built} in the engines; export the checkpoint again")
    tokens = Tokens(bundle.path / "tokenizer", contract.prompt, rows * columns // MERGE**2)
    return Gr00tPolicy(contract, tokens, Gr00tRuntime(bundle, backend=backend, steps=steps, kernels=kernels))


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def _texts(value: Any, key: str, batch: int) -> Sequence[str]:
    """B instructions, none of them blank."""
    flat = [value] * batch if isinstance(value, str) else np.asarray(value, dtype=object).ravel().tolist()
    if len(flat) != batch:
        raise InvalidObservation(f"{key} holds {len(flat)} instructions for {batch} robots")
    for text in flat:
        if not isinstance(text, str) or text.encode("utf-8", "ignore").decode() != text:  # half a surrogate pair is no character
            raise InvalidObservation(f"{key} holds {text!r}, which is no text")
        if not any(character.isalnum() for character in text):
            raise InvalidObservation(f"{key} is {text!r}; every observation needs an instruction in words")
    return flat
