"""Where bundles lie, which one serves a policy and a suite, and how a missing one is made from what is published."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import registry
from .engines.bundle import Bundle, digest_of, file_digest, open_bundle, workplace
from .engines.weights import open_checkpoint
from .types import BadRequest, Progress, VlaEvalError

log = logging.getLogger(__name__)

VARIABLE = "VLA_EVAL_BUNDLES"
SOURCE = "source.json"  # in a bundle that `run` made: from which checkpoint, with which options
_READ = (".json", ".jinja", ".model")  # what recipes read beside the weights: statistics, configurations, tokenizers
_TIMEOUT = 60.0  # seconds without a byte, after which a download has failed


@dataclass(frozen=True, slots=True)
class Part:
    """Files of one repository that a recipe reads."""

    option: str  # the recipe's argument that takes the folder: "checkpoint", "tokenizer"
    repo: str  # owner/name on the Hugging Face hub
    folder: str = ""  # inside it
    files: tuple[str, ...] = ("*",)  # patterns, below `folder`
    needed: tuple[str, ...] = ()  # patterns: without a file for each of them the part is not there
    beside: tuple[str, ...] = ()  # patterns: a checkpoint that has one of these brings its own
    digests: Mapping[str, str] = field(default_factory=dict)  # file -> how its SHA-256 begins

    def __str__(self) -> str:
        return f"{self.repo}/{self.folder}" if self.folder else self.repo


@dataclass(frozen=True, slots=True)
class File:
    """One file outside the hub, which a recipe reads: known by its digest, wherever it is met."""

    option: str  # the recipe's argument that takes it: "norm_stats"
    url: str  # https
    bytes: int
    sha256: str
    copies: tuple[Path, ...] = ()  # where another program may have left it
    hub: tuple[str, str] | None = None  # a repository that has the same bytes, and their name in it; only its cache is looked into
    beside: tuple[str, ...] = ()  # patterns: a checkpoint that has one of these brings its own
    of_checkpoint: bool = False  # of the published checkpoint alone, such as its statistics: never put beside another

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class Published:
    """What a policy's owner says of one suite: where its parts are published, and how they are exported.

    A plug-in registers `function(suite) -> Published | None` under the entry point group `vla_eval.published`.
    """

    parts: tuple[Part | File, ...]
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
    return list(bundle.policy.get("trained_for", []))


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
    busy: Callable[[str], AbstractContextManager[Progress]],
) -> Path:
    """The bundle for that policy and suite: found in `folder`, or exported into it from a checkpoint, once.

    `digest` picks among several that fit. `checkpoint` is a folder or REPO[/FOLDER]; by default what the policy's owner has published.
    What is not in the local caches is fetched only if `agree` says yes; the question with names and sizes is made when it asks for it.
    The export runs inside `busy`, which gives what is told how far it is. Raises BadRequest with everything that is missing and the
    commands that would make it.
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
    own = Path(checkpoint) if checkpoint is not None and _is_folder(checkpoint) else None
    if own is not None:
        open_checkpoint(own)  # before anybody is asked for the rest
    parts = _gathered(policy, suite, folder, sources, checkpoint, agree, say)
    for part in sources.parts:
        if isinstance(part, Part) and part.digests:
            with busy(f"checking {part}"):
                _check_digests(part, parts[part.option])
    made = _exported(policy, found, parts, sources.options, folder, base(suite), say, busy)
    check_fits(open_bundle(made), policy, suite)
    return made


def _gathered(
    policy: str,
    suite: str,
    folder: Path,
    sources: Published,
    checkpoint: str | None,
    agree: Callable[[Callable[[], str]], bool],
    say: Callable[[str], None],
) -> dict[str, Path]:
    """Option -> place of everything that the recipe reads and the checkpoint does not bring itself."""
    local = {part.option: _local(part) for part in sources.parts}
    if checkpoint is not None and _is_folder(checkpoint):
        local["checkpoint"] = Path(checkpoint)
    here = {option: place for option, place in local.items() if place is not None}
    missing = [part for part in _lacking(sources.parts, here.get("checkpoint")) if part.option not in here]

    def command(there: Mapping[str, Path]) -> str:
        return _command(policy, sources, there, folder / f"{policy}-{base(suite)}")

    if missing:
        if not agree(lambda: _offer(policy, suite, folder, missing)):
            raise BadRequest(_help(policy, suite, folder, missing, checkpoint, command(here)))
        here |= _fetched(missing, lambda there: command({**here, **there}), say)
    wanted = {"checkpoint", *(part.option for part in _lacking(sources.parts, here["checkpoint"]))}
    return {option: place for option, place in here.items() if option in wanted}


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
    others = tuple(part for part in (said.parts if said else ()) if part.option != "checkpoint" and not _of_checkpoint(part))
    known = next((part for part in (said.parts if said else ()) if isinstance(part, Part) and part.option == "checkpoint"), None)
    if said is not None and checkpoint == str(known):
        return said
    options = said.options if said else {}
    if _is_folder(checkpoint):
        return Published(others, options)
    owner, _, rest = checkpoint.partition("/")
    name, _, inside = rest.partition("/")
    if not owner or not name or ".." in inside.split("/") or checkpoint.startswith((".", "/")):
        raise BadRequest(f"--checkpoint {checkpoint}: there is no such folder, and it is no REPO[/FOLDER] such as owner/name/libero_10")
    repo = f"{owner}/{name}"
    named = replace(known, repo=repo, folder=inside, needed=("*.safetensors",), digests={}) if known else Part("checkpoint", repo, inside)
    return Published((named, *others), options)


def _of_checkpoint(part: Part | File) -> bool:
    return isinstance(part, File) and part.of_checkpoint


def _lacking(parts: Sequence[Part | File], checkpoint: Path | None) -> list[Part | File]:
    """The parts that a checkpoint does not bring itself."""
    return [part for part in parts if checkpoint is None or not any(any(checkpoint.glob(pattern)) for pattern in part.beside)]


def _is_folder(checkpoint: str) -> bool:
    return Path(checkpoint).is_dir()


def _local(part: Part | File) -> Path | None:
    """The part's folder in the local Hugging Face cache, if all of it is there; of a file, a copy of its bytes. Nothing is fetched."""
    if isinstance(part, File):
        return next((copy for copy in _copies(part) if copy.is_file() and _is_that(part, copy)), None)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        place = Path(snapshot_download(part.repo, local_files_only=True)) / part.folder
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise BadRequest(f"--{part.option} {part}: there is no such folder, and it is no repository's name ({error})") from error
    there = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else []
    names = {str(file.relative_to(place)) for file in there}
    whole = names >= _shards(place) and all(any(fnmatch(name, pattern) for name in names) for pattern in part.needed)
    return place if names and whole else None


def _copies(file: File) -> Iterator[Path]:
    from huggingface_hub import try_to_load_from_cache

    yield _kept(file)
    yield from file.copies
    if file.hub is not None and isinstance(found := try_to_load_from_cache(*file.hub), str):
        yield Path(found)


def _kept(file: File) -> Path:
    """Where we keep it once it was downloaded."""
    from platformdirs import user_cache_path

    return user_cache_path("vla-eval") / file.sha256[:16] / file.url.rpartition("/")[2]


def _is_that(file: File, copy: Path) -> bool:
    if copy.stat().st_size == file.bytes and file_digest(copy) == file.sha256:
        return True
    log.warning("%s is not the published file (its SHA-256 is not %s…) and is not used", copy, file.sha256[:12])
    return False


def _check_digests(part: Part, place: Path) -> None:
    for name, begins in part.digests.items():
        if not file_digest(place / name).startswith(begins):
            raise BadRequest(
                f"{place / name} is not the file that was published (its SHA-256 does not begin with {begins[:12]}): fetch {part} again, "
                "or name it with --checkpoint if you mean another than the published one"
            )


def _shards(place: Path) -> set[str]:
    """The weight files that an index names: a download that stopped half-way lacks some."""
    index = place / "model.safetensors.index.json"
    try:
        table = json.loads(index.read_text("utf-8"))["weight_map"] if index.is_file() else {}
        return {str(name) for name in table.values()}
    except (ValueError, KeyError, AttributeError, TypeError):
        return set()  # opening the checkpoint says what is wrong with its index


def _offer(policy: str, suite: str, folder: Path, missing: Sequence[Part | File]) -> str:
    parts = ", ".join(f"{part} ({_size_of(part)})" for part in missing)
    return f"no bundle of {policy} for {base(suite)} in {folder}. Download {parts} and export it there?"


def _help(policy: str, suite: str, folder: Path, missing: Sequence[Part | File], checkpoint: str | None, command: str) -> str:
    named = "" if checkpoint is None else f" --checkpoint {shlex.quote(checkpoint)}"
    parts = ", ".join(f"{part} ({_flag(part.option)})" for part in missing)
    return (
        f"no bundle of {policy!r} for {base(suite)} in {folder}, and not in the local caches: {parts}. Either "
        f"`vla-eval run --task {base(suite)} --policy {policy}{named} --yes` downloads that and exports it, or `{command}` makes the "
        "bundle from your files"
    )


def _command(policy: str, sources: Published, here: Mapping[str, Path], out: Path) -> str:
    """The export that the parts are for, with what is here in its place."""
    said: dict[str, object] = {"checkpoint": here.get("checkpoint", "DIR")}
    for part in _lacking(sources.parts, here.get("checkpoint")):
        said.setdefault(part.option, here.get(part.option, "FILE" if isinstance(part, File) else "DIR"))
    words = [f"{_flag(name)} {shlex.quote(str(value))}" for name, value in {**said, **sources.options, "out": out}.items()]
    return f"vla-eval export --model {policy} {' '.join(words)}"


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _size_of(part: Part | File) -> str:
    """ "6.3 GB", if the hub can be asked."""
    if isinstance(part, File):
        return _amount(part.bytes)
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(part.repo, files_metadata=True, timeout=10).siblings or []
    except _network_errors():
        return "size unknown: the hub does not answer"
    inside = f"{part.folder}/" if part.folder else ""
    return _amount(sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, inside + pattern) for pattern in part.files)))


def _amount(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "kB"))
    return f"{count / unit:.1f} {name}"


def _fetched(missing: Sequence[Part | File], command: Callable[[Mapping[str, Path]], str], say: Callable[[str], None]) -> dict[str, Path]:
    """Every missing part, downloaded, small files first. Raises BadRequest that lists all that cannot be had.

    `command` gives, for what is there by then, the export that takes the rest by flag.
    """
    there: dict[str, Path] = {}
    failed: list[tuple[Part | File, str]] = []
    for part in sorted(missing, key=lambda part: isinstance(part, Part)):
        if isinstance(part, Part) and any(isinstance(lost, File) for lost, _ in failed):
            failed.append((part, "not tried"))  # nobody waits for gigabytes that cannot be used
            continue
        say(f"downloading {part} ({_size_of(part)})")
        try:
            there[part.option] = _fetch_file(part) if isinstance(part, File) else _fetch_part(part)
        except _network_errors() as error:
            failed.append((part, " ".join(str(error).split())))
    if failed:
        told = ", ".join(f"{part} ({why})" for part, why in failed)
        raise BadRequest(f"cannot be downloaded: {told}. Fetch it another way and name it: `{command(there)}` makes the bundle")
    return there


def _network_errors() -> tuple[type[Exception], ...]:
    """What a download may raise: the hub's client lets some errors of its HTTP library through, which are no OSError."""
    from http.client import HTTPException

    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, HTTPException, *HfHubHTTPError.__bases__)


def _fetch_part(part: Part) -> Path:
    """The part in the local Hugging Face cache. Raises one of `_network_errors`."""
    from huggingface_hub import snapshot_download

    inside = f"{part.folder}/" if part.folder else ""
    snapshot_download(part.repo, allow_patterns=[inside + pattern for pattern in part.files])
    place = _local(part)  # without a network the hub's client is content with what an earlier download left
    if place is None:
        raise FileNotFoundError(f"it did not come whole: {part} has not all of its files, or the hub did not answer")
    return place


def _fetch_file(file: File) -> Path:
    """The file in our cache, its digest checked before it gets its name. Raises one of `_network_errors`."""
    from urllib.request import urlopen

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    assert file.url.startswith("https://"), file.url
    with urlopen(file.url, timeout=_TIMEOUT) as answer:  # noqa: S310, https alone, and the digest says what came
        content = answer.read(file.bytes + 1)
    if len(content) != file.bytes or digest_of(content) != file.sha256:
        raise OSError(f"what came is not the published file: its SHA-256 is {digest_of(content)[:12]}…, not {file.sha256[:12]}…")
    place = _kept(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}-{os.getpid()}")
    part.write_bytes(content)
    return part.replace(place)


def _exported(
    policy: str,
    found: Sequence[Bundle],
    parts: Mapping[str, Path],
    options: Mapping[str, Any],
    folder: Path,
    name: str,
    say: Callable[[str], None],
    busy: Callable[[str], AbstractContextManager[Progress]],
) -> Path:
    """The bundle of this checkpoint and these options: one that is there already, else exported beside it and renamed."""
    checkpoint = parts["checkpoint"]
    source = {
        "model": policy,
        "checkpoint_fingerprint": open_checkpoint(checkpoint).fingerprint,
        "options": {k: str(v) for k, v in options.items()},
        "files": _read_beside(parts),
    }
    for bundle in found:
        if _source(bundle) == source:
            say(f"using bundle {bundle.path}, made of {checkpoint}")
            return bundle.path
    recipe = registry.load_recipe(policy)
    given = {**options, **{option: place for option, place in parts.items() if option != "checkpoint"}}
    registry.check_options(f"the recipe of {policy!r}", recipe, {"checkpoint": checkpoint, "out": folder, **given})
    with workplace(folder, ".making-") as workshop:
        making = workshop / "bundle"
        with busy(f"exporting {checkpoint} into {folder}, which is done once") as progress, _flags_explained(policy, checkpoint, recipe):
            made: Bundle = registry.with_progress(recipe, progress)(checkpoint, making, **given)
        (making / SOURCE).write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
        place = folder / f"{policy}-{name}-{made.export_id[:8]}"
        if place.exists():  # the same weights beside other statistics, which no identity covers
            place = place.with_name(f"{place.name}-{digest_of(json.dumps(source).encode())[:8]}")
        return making.rename(place)


@contextlib.contextmanager
def _flags_explained(policy: str, checkpoint: Path, recipe: Callable[..., Any]) -> Iterator[None]:
    """A recipe's refusal may name its own options, which `run` does not take: say whose they are."""
    try:
        yield
    except BadRequest as error:
        own = {_flag(name) for name in inspect.signature(recipe).parameters} - {"--checkpoint", "--out"}
        if not own & set(re.findall(r"--[a-z][a-z-]*", str(error))):
            raise
        command = f"vla-eval export --model {policy} --checkpoint {shlex.quote(str(checkpoint))} …"
        raise BadRequest(f"{error}. That is an option of `{command}`; name the bundle that it makes with --bundle") from error


def _read_beside(parts: Mapping[str, Path]) -> dict[str, str]:
    """The digests of what recipes read beside the weights, so that other statistics make another bundle."""
    found = {}
    for option, place in sorted(parts.items()):
        for file in [place] if place.is_file() else sorted(place.rglob("*")):
            inside = file.relative_to(place)
            if file.is_file() and file.suffix in _READ and not any(part.startswith(".") for part in inside.parts):
                found[f"{option}/{inside}"] = file_digest(file)
    return found


def _source(bundle: Bundle) -> Any:
    """What `run` made the bundle from; None for one that was exported by hand."""
    try:
        return json.loads((bundle.path / SOURCE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
