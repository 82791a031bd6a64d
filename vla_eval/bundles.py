"""Where bundles lie, which one serves a policy and a suite, and how a missing one is made from what is published."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import registry
from .engines.bundle import Bundle, open_bundle
from .types import BadRequest, VlaEvalError

log = logging.getLogger(__name__)

VARIABLE = "VLA_EVAL_BUNDLES"
SOURCE = "source.json"  # in a bundle that `run` made: from which checkpoint, with which options


@dataclass(frozen=True, slots=True)
class Part:
    """Files of one repository that a recipe reads."""

    option: str  # the recipe's argument that takes the folder: "checkpoint", "tokenizer"
    repo: str  # owner/name on the Hugging Face hub
    folder: str = ""  # inside it
    files: tuple[str, ...] = ("*",)  # patterns, below `folder`
    needed: tuple[str, ...] = ()  # without these the part is not there

    def __str__(self) -> str:
        return f"{self.repo}/{self.folder}" if self.folder else self.repo


@dataclass(frozen=True, slots=True)
class Published:
    """What a policy's owner says of one suite: where its parts are published, and how they are exported.

    A plug-in registers `function(suite) -> Published | None` under the entry point group `vla_eval.published`.
    """

    parts: tuple[Part, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # for the recipe


def shelf(given: Path | None = None) -> Path:
    """The folder that holds bundles: the one given, $VLA_EVAL_BUNDLES, or one in the user's data folder."""
    if given is not None:
        return given
    if named := os.environ.get(VARIABLE):
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("vla-eval") / "bundles"


def bundles(folder: Path) -> tuple[list[Bundle], list[str]]:
    """Every bundle in the folder by name, and a sentence for each that does not hold. A folder that does not exist holds none."""
    found, broken = [], []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not entry.is_dir() or entry.name.startswith("."):
            continue
        try:
            found.append(open_bundle(entry))
        except VlaEvalError as error:
            broken.append(str(error))
    return found, broken


def size(bundle: Bundle) -> int:
    """Bytes on disk."""
    return sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file())


def suites(bundle: Bundle) -> list[str]:
    """The suites that the bundle's checkpoint was trained for; empty: it does not say."""
    return [str(suite) for suite in bundle.policy.get("trained_for", [])]


def check_fits(bundle: Bundle, policy: str, suite: str) -> None:
    """Raise BadRequest for a bundle of another model, or one whose checkpoint was trained for other suites."""
    if bundle.model != policy:
        raise BadRequest(f"{bundle.path} is a bundle of {bundle.model!r}; play it with --policy {bundle.model}")
    trained = suites(bundle)
    if trained and base(suite) not in trained:
        raise BadRequest(f"{bundle.path} was trained for {', '.join(trained)}, not for {base(suite)}; name another --bundle or --task")


def base(suite: str) -> str:
    """A suite without its protocol."""
    return suite.partition("@")[0]


def obtain(
    policy: str,
    suite: str,
    *,
    folder: Path,
    checkpoint: str | None = None,
    digest: str | None = None,
    agree: Callable[[Callable[[], str]], bool],
    say: Callable[[str], None],
    busy: Callable[[str], AbstractContextManager[None]],
) -> Path:
    """The bundle for that policy and suite: found in `folder`, or exported into it from a checkpoint, once.

    `digest` picks among several that fit. `checkpoint` is a folder or REPO[/FOLDER]; by default what the policy's owner has published.
    What is not in the local Hugging Face cache is fetched only if `agree` says yes; the question with names and sizes is made when it
    asks for it. The export runs inside `busy`. Raises BadRequest with everything that is missing and the commands that would make it.
    """
    found, broken = bundles(folder)
    for sentence in broken:
        log.warning("%s", sentence)
    if checkpoint is None:
        fitting = [bundle for bundle in found if bundle.model == policy and base(suite) in suites(bundle)]
        chosen = [bundle for bundle in found if bundle.digest == digest] or fitting
        if len(chosen) > 1:
            told = ", ".join(str(bundle.path) for bundle in chosen)
            raise BadRequest(f"{len(chosen)} bundles serve {policy} in {base(suite)}: {told}; name one with --bundle")
        if chosen:
            say(f"using bundle {chosen[0].path}")
            return chosen[0].path
    sources = _sources(policy, suite, checkpoint)
    here = {part.option: _local(part) for part in sources.parts}
    if checkpoint is not None and _is_folder(checkpoint):
        here["checkpoint"] = Path(checkpoint)
    missing = [part for part in sources.parts if here[part.option] is None]
    if missing and not agree(lambda: _offer(policy, suite, folder, missing)):
        raise BadRequest(_help(policy, suite, folder, missing))
    parts = {option: place for option, place in here.items() if place is not None} | {part.option: _fetch(part, say) for part in missing}
    made = _exported(policy, found, parts, sources.options, folder, base(suite), say, busy)
    check_fits(open_bundle(made), policy, suite)
    return made


def _sources(policy: str, suite: str, checkpoint: str | None) -> Published:
    """The parts to look for; a named checkpoint replaces the published one, and brings its own tokenizer if it has one."""
    published = registry.load_published(policy)
    said: Published | None = published(base(suite)) if published else None
    if checkpoint is None:
        if said is None:
            raise BadRequest(
                f"no bundle of {policy!r} for {base(suite)} is at hand and none is published; make one with "
                f"`vla-eval export --model {policy} --checkpoint DIR --out BUNDLE` and name it with --bundle BUNDLE"
            )
        return said
    others = tuple(part for part in (said.parts if said else ()) if part.option != "checkpoint")
    options = said.options if said else {}
    if _is_folder(checkpoint):
        own = Path(checkpoint)
        return Published(tuple(part for part in others if not (own / part.option).is_dir()), options)
    owner, _, rest = checkpoint.partition("/")
    name, _, inside = rest.partition("/")
    if not owner or not name or ".." in inside.split("/") or checkpoint.startswith((".", "/")):
        raise BadRequest(f"--checkpoint {checkpoint}: there is no such folder, and it is no REPO[/FOLDER] such as owner/name/libero_10")
    files = tuple(part.files for part in (said.parts if said else ()) if part.option == "checkpoint")
    return Published((Part("checkpoint", f"{owner}/{name}", inside, *(files[:1] or ())), *others), options)


def _is_folder(checkpoint: str) -> bool:
    return Path(checkpoint).is_dir()


def _local(part: Part) -> Path | None:
    """The part's folder in the local Hugging Face cache, if all of it is there. Nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        place = Path(snapshot_download(part.repo, local_files_only=True)) / part.folder
    except LocalEntryNotFoundError:
        return None
    there = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else []
    names = {str(file.relative_to(place)) for file in there}
    wanted = {*part.needed, *_shards(place)}
    return place if names and wanted <= names else None


def _shards(place: Path) -> set[str]:
    """The weight files that an index names: a download that stopped half-way lacks some."""
    index = place / "model.safetensors.index.json"
    try:
        table = json.loads(index.read_text("utf-8"))["weight_map"] if index.is_file() else {}
        return {str(name) for name in table.values()}
    except (ValueError, KeyError, AttributeError, TypeError):
        return set()  # opening the checkpoint says what is wrong with its index


def _offer(policy: str, suite: str, folder: Path, missing: Sequence[Part]) -> str:
    parts = ", ".join(f"{part}{_size_of(part)}" for part in missing)
    return f"no bundle of {policy} for {base(suite)} in {folder}. Download {parts} from the Hugging Face hub and export it there?"


def _help(policy: str, suite: str, folder: Path, missing: Sequence[Part]) -> str:
    parts = ", ".join(f"{part} (--{part.option})" for part in missing)
    return (
        f"no bundle of {policy!r} for {base(suite)} in {folder}, and not in the local Hugging Face cache: {parts}. Either "
        f"`vla-eval run --task {base(suite)} --policy {policy} --yes` downloads that and exports it, or "
        f"`vla-eval export --model {policy} --checkpoint DIR --out {folder / f'{policy}-{base(suite)}'}` makes the bundle from your files"
    )


def _size_of(part: Part) -> str:
    """ " (6.3 GB)", if the hub can be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        files = HfApi().model_info(part.repo, files_metadata=True, timeout=10).siblings or []
    except (HfHubHTTPError, OSError):
        return " (size unknown: the hub does not answer)"
    inside = f"{part.folder}/" if part.folder else ""
    total = sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, inside + pattern) for pattern in part.files))
    return f" ({total / 1e9:.1f} GB)"


def _fetch(part: Part, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    say(f"downloading {part}{_size_of(part)}")
    inside = f"{part.folder}/" if part.folder else ""
    try:
        place = Path(snapshot_download(part.repo, allow_patterns=[inside + pattern for pattern in part.files])) / part.folder
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        told = " ".join(str(error).split())
        raise BadRequest(f"{part} cannot be downloaded ({told}); fetch it another way and name its folder with --{part.option}") from error
    if not place.is_dir():
        raise BadRequest(f"{part.repo} has no folder {part.folder!r}; name another --{part.option}")
    return place


def _exported(
    policy: str,
    found: Sequence[Bundle],
    parts: Mapping[str, Path],
    options: Mapping[str, Any],
    folder: Path,
    name: str,
    say: Callable[[str], None],
    busy: Callable[[str], AbstractContextManager[None]],
) -> Path:
    """The bundle of this checkpoint and these options: one that is there already, else exported beside it and renamed."""
    from .engines.weights import open_checkpoint

    checkpoint = parts["checkpoint"]
    source = {
        "model": policy,
        "checkpoint_fingerprint": open_checkpoint(checkpoint).fingerprint,
        "options": {k: str(v) for k, v in options.items()},
    }
    for bundle in found:
        if _source(bundle) == source:
            say(f"using bundle {bundle.path}, made of {checkpoint}")
            return bundle.path
    recipe = registry.load_recipe(policy)
    given = {**options, **{option: place for option, place in parts.items() if option != "checkpoint"}}
    registry.check_options(f"the recipe of {policy!r}", recipe, {"checkpoint": checkpoint, "out": folder, **given})
    folder.mkdir(parents=True, exist_ok=True)
    making = folder / f".making-{os.getpid()}"
    shutil.rmtree(making, ignore_errors=True)
    try:
        with busy(f"exporting {checkpoint} into {folder}, which is done once"):
            made: Bundle = recipe(checkpoint, making, **given)
        (making / SOURCE).write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
        return making.rename(folder / f"{policy}-{name}-{made.export_id[:8]}")
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _source(bundle: Bundle) -> Any:
    """What `run` made the bundle from; None for one that was exported by hand."""
    try:
        return json.loads((bundle.path / SOURCE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
