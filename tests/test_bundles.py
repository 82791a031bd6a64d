"""Which bundle a bare `run` plays: one on the shelf, else one made of what the local Hugging Face cache holds. No test has a network."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vla_eval import bundles, cli, registry
from vla_eval.engines.bundle import open_bundle
from vla_eval.policies.baseline import zero
from vla_eval.policies.gr00t import libero, recipe
from vla_eval.policies.gr00t.configuration import read_geometry
from vla_eval.policies.pi05 import libero as pi05
from vla_eval.policies.pi05 import recipe as pi05_recipe
from vla_eval.policies.pi05.configuration import RELEASED as PI05_RELEASED
from vla_eval.policies.pi05.configuration import read_geometry as read_pi05_geometry
from vla_eval.results.folder import open_run
from vla_eval.results.leaderboard import of_run
from vla_eval.types import BadRequest, Progress, silent

GOLDEN = Path(__file__).parent / "golden/gr00t_tiny"
WEIGHTS, TOKENIZER = "nvidia/GR00T-N1.7-LIBERO", "Qwen/Qwen3-VL-2B-Instruct"


@pytest.fixture(autouse=True)
def small_and_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The golden checkpoint's geometry for the released one's, an empty cache, and no way out."""
    monkeypatch.setattr(recipe, "RELEASED", read_geometry(GOLDEN / "geometry.json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv(bundles.VARIABLE, raising=False)


def cached(hub: Path, repo: str, folder: str, source: Path, *, but: str = "") -> Path:
    """A repository in the cache's own layout, as a finished download leaves it."""
    root = hub / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs/main").write_text("0" * 40)
    place = root / "snapshots" / ("0" * 40) / folder
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("tokenizer", *([but] if but else [])))
    return place


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Both published parts of libero_10, downloaded."""
    cached(tmp_path / "hub", WEIGHTS, "libero_10", GOLDEN / "checkpoint")
    cached(tmp_path / "hub", TOKENIZER, "", GOLDEN / "checkpoint/tokenizer")
    return tmp_path / "hub"


def never(offer: Callable[[], str]) -> bool:
    raise AssertionError("nobody should be asked")


def obtain(folder: Path, suite: str = "libero_10@openpi", policy: str = "gr00t", **arguments: Any) -> tuple[Path, list[str]]:
    said: list[str] = []

    @contextlib.contextmanager
    def busy(line: str) -> Iterator[Progress]:
        said.append(line)
        yield silent

    place = bundles.obtain(policy, suite, folder=folder, say=said.append, busy=busy, **{"agree": never, **arguments})
    return place, said


def test_a_cached_checkpoint_is_exported_once_and_then_found(hub: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    made, said = obtain(shelf)
    bundle = open_bundle(made)
    assert made == shelf / f"gr00t-libero_10-{bundle.export_id[:8]}"
    assert (bundle.policy["embodiment_tag"], bundles.suites(bundle)) == ("libero_sim", ["libero_10"])
    assert said[-1].startswith("exporting ")
    again, said = obtain(shelf)
    assert (again, said) == (made, [f"using bundle {made}"])
    assert [entry.name for entry in shelf.iterdir()] == [made.name]


def test_the_bare_command_finds_makes_and_plays(
    hub: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `run --task libero_10 --policy gr00t`, in the toy's world."""
    monkeypatch.setattr(libero, "PUBLISHED_SUITES", ("toy",))
    cached(hub, WEIGHTS, "toy", GOLDEN / "checkpoint")
    monkeypatch.setenv(bundles.VARIABLE, str(tmp_path / "shelf"))
    words = ["run", "--task", "toy/0", "--policy", "gr00t", "--option", "side=64", "--trials", "1", "--workers", "0", "--json"]
    played = []
    for line in ("exporting", "using bundle"):
        assert cli.main([*words, "--out", str(tmp_path / "runs")]) == 0
        out, err = capfd.readouterr()
        assert line in err
        played.append(open_run(Path(json.loads(out)["folder"])))
    assert played[0].manifest.bundle == played[1].manifest.bundle
    assert of_run(played[0]).precision == "fp32"  # a leaderboard's row says in which types it was computed
    assert [record.outcome for run in played for record in run.records()] == ["failure", "failure"]
    (made,) = (tmp_path / "shelf").iterdir()
    (made / bundles.SOURCE).unlink()
    assert cli.main(["run", "--resume", str(played[0].path), "--json"]) == 0  # found again by the digest in the manifest
    assert f"using bundle {made}" in capfd.readouterr().err


def test_everything_missing_is_said_in_one_sentence_with_both_commands(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as refused:
        obtain(tmp_path / "shelf", agree=lambda offer: False)
    sentence = str(refused.value)
    assert f"{WEIGHTS}/libero_10 (--checkpoint), {TOKENIZER} (--tokenizer)" in sentence
    assert "`vla-eval run --task libero_10 --policy gr00t --yes`" in sentence
    out = tmp_path / "shelf/gr00t-libero_10"
    assert f"`vla-eval export --model gr00t --checkpoint DIR --tokenizer DIR --embodiment libero_sim --out {out}`" in sentence
    assert not (tmp_path / "shelf").exists()


def test_a_pipe_is_never_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_size_of", lambda part: pytest.fail("the hub was asked"))
    assert cli.main(["run", "--task", "libero_10", "--policy", "gr00t", "--bundles", str(tmp_path), "--out", str(tmp_path / "runs")]) == 2
    assert "not in the local caches" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("lost", ["model-00002-of-00003.safetensors", "config.json", "model*", "statistics.json", "embodiment_id.json"])
def test_half_a_download_is_missing(tmp_path: Path, lost: str) -> None:
    cached(tmp_path / "hub", WEIGHTS, "libero_10", GOLDEN / "checkpoint", but=lost)
    cached(tmp_path / "hub", TOKENIZER, "", GOLDEN / "checkpoint/tokenizer")
    with pytest.raises(BadRequest, match=f"caches: {WEIGHTS}/libero_10 \\(--checkpoint\\)\\. "):
        obtain(tmp_path / "shelf", agree=lambda offer: False)


def test_a_yes_downloads_what_is_missing_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path / "hub", TOKENIZER, "", GOLDEN / "checkpoint/tokenizer")
    import huggingface_hub

    asked, local = [], huggingface_hub.snapshot_download

    def download(repo: str, *, local_files_only: bool = False, allow_patterns: list[str] | None = None) -> str:
        if not local_files_only:
            asked.append((repo, allow_patterns))
            cached(tmp_path / "hub", repo, "libero_10", GOLDEN / "checkpoint")
        return str(local(repo, local_files_only=True))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    offers: list[str] = []

    def agree(offer: Callable[[], str]) -> bool:
        offers.append(offer())
        return True

    made, said = obtain(tmp_path / "shelf", agree=agree)
    assert offers[0].startswith(f"no bundle of gr00t for libero_10 in {tmp_path / 'shelf'}. Download {WEIGHTS}/libero_10 (size unknown")
    assert asked == [(WEIGHTS, ["libero_10/*.json", "libero_10/*.safetensors", "libero_10/processor/*"])]
    assert any(line.startswith(f"downloading {WEIGHTS}/libero_10") for line in said)
    assert bundles.suites(open_bundle(made)) == ["libero_10"]


def test_a_download_that_fails_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=rf"cannot be downloaded: {WEIGHTS}/libero_10 \(.*--checkpoint DIR --tokenizer DIR"):
        obtain(tmp_path / "shelf", agree=lambda offer: True)
    assert not (tmp_path / "shelf").exists()


def test_a_network_that_is_not_there_is_one_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client lets its HTTP library's own errors through."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BadRequest, match=rf"cannot be downloaded: {WEIGHTS}/libero_10 \(.*, {TOKENIZER} \(") as refused:
        obtain(tmp_path / "shelf", agree=lambda offer: "size unknown: the hub does not answer" in offer())
    assert "\n" not in str(refused.value)


def test_what_an_earlier_download_left_is_not_taken_for_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client answers with an old snapshot where it has one and no network: without the folder, or without its weights."""
    cached(tmp_path / "hub", TOKENIZER, "", GOLDEN / "checkpoint/tokenizer")
    place = cached(tmp_path / "hub", WEIGHTS, "libero_goal", GOLDEN / "checkpoint")
    cached(tmp_path / "hub", WEIGHTS, "libero_10", GOLDEN / "checkpoint", but="model*")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: str(place.parent))
    for suite in ("libero_10", "libero_spatial"):
        with pytest.raises(BadRequest, match=f"cannot be downloaded: {WEIGHTS}/{suite} \\(it did not come whole: .*the hub did not answer"):
            obtain(tmp_path / "shelf", suite, agree=lambda offer: True)
    assert not (tmp_path / "shelf").exists()


def test_a_checkpoint_of_ones_own_needs_no_cache(tmp_path: Path) -> None:
    own = tmp_path / "libero_goal"
    shutil.copytree(GOLDEN / "checkpoint", own)
    made, _ = obtain(tmp_path / "shelf", "libero_goal", checkpoint=str(own))
    again, said = obtain(tmp_path / "shelf", "libero_goal", checkpoint=str(own))
    assert again == made
    assert said == [f"using bundle {made}, made of {own}"]
    with pytest.raises(BadRequest, match="was trained for libero_goal, not for libero_10"):
        obtain(tmp_path / "shelf", "libero_10", checkpoint=str(own))


def test_an_export_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    own = tmp_path / "libero_goal"
    shutil.copytree(GOLDEN / "checkpoint", own)
    (own / "statistics.json").write_text("{}")
    with pytest.raises(BadRequest, match="lacks statistics"):
        obtain(tmp_path / "shelf", "libero_goal", checkpoint=str(own))
    config = json.loads((GOLDEN / "checkpoint/config.json").read_text())
    shutil.copy(GOLDEN / "checkpoint/statistics.json", own / "statistics.json")
    (own / "config.json").write_text(json.dumps({**config, "action_horizon": 41}))
    with pytest.raises(BadRequest, match="max_action_horizon is 40"):
        obtain(tmp_path / "shelf", "libero_goal", checkpoint=str(own))
    assert list((tmp_path / "shelf").iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_what_another_writes_is_not(hub: Path, tmp_path: Path) -> None:
    left, busy = tmp_path / "shelf/.making-99999991", tmp_path / "shelf/.making-99999992"
    for folder in (left, busy):
        folder.mkdir(parents=True)
        (folder / "visual.onnx.data").write_text("gigabytes")
    with lock(busy):
        obtain(tmp_path / "shelf")
    assert not left.exists()
    assert busy.exists()


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """As a process that writes there holds it."""
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield
    os.close(handle)


def test_an_export_that_breaks_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(checkpoint: Path, out: Path, *, tokenizer: Path | None = None, embodiment: str | None = None) -> None:
        out.mkdir(parents=True)
        (out / "half").write_text("a component")
        raise OSError("disk full")

    monkeypatch.setattr(registry, "load_recipe", lambda name: breaks)
    own = tmp_path / "libero_goal"
    shutil.copytree(GOLDEN / "checkpoint", own)
    with pytest.raises(BadRequest, match=r"cannot be written to its end \(disk full\).* make room"):
        obtain(tmp_path / "shelf", "libero_goal", checkpoint=str(own))
    assert list((tmp_path / "shelf").iterdir()) == []


def test_a_repository_may_be_named_with_a_folder(hub: Path, tmp_path: Path) -> None:
    cached(hub, "someone/robots", "tuned/libero_10", GOLDEN / "checkpoint")
    made, _ = obtain(tmp_path / "shelf", checkpoint="someone/robots/tuned/libero_10")
    assert bundles.suites(open_bundle(made)) == ["libero_10"]


@pytest.mark.parametrize("name", ["nowhere", "/not/there", "../up", "a/b/../../c", "a b/c?", "a--b/c..d"])
def test_what_is_neither_folder_nor_repository_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match=r"no such folder, and it is no (REPO|repository's name)"):
        obtain(tmp_path, checkpoint=name)


def test_a_suite_that_nobody_publishes_for_needs_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no bundle of 'gr00t' for toy is at hand and none is published; .*vla-eval export"):
        obtain(tmp_path, "toy@v1")


def test_two_that_fit_are_listed_and_a_digest_picks(hub: Path, tmp_path: Path) -> None:
    first, _ = obtain(tmp_path / "shelf")
    second = tmp_path / "shelf/other"
    recipe.recipe(
        hub / f"models--{WEIGHTS.replace('/', '--')}/snapshots/{'0' * 40}/libero_10",
        second,
        steps=(4, 8),
        tokenizer=GOLDEN / "checkpoint/tokenizer",
    )
    with pytest.raises(BadRequest, match="2 bundles serve gr00t in libero_10"):
        obtain(tmp_path / "shelf")
    assert obtain(tmp_path / "shelf", digest=open_bundle(second).digest)[0] == second
    assert first != second


def test_bundles_are_listed_and_broken_ones_said(hub: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made, _ = obtain(tmp_path / "shelf")
    (tmp_path / "shelf/broken").mkdir()
    assert cli.main(["bundles", str(tmp_path / "shelf"), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    (row,) = told["bundles"]
    assert (row["path"], row["policy"], row["suites"], row["dtype"], row["frontend"]) == (str(made), "gr00t", ["libero_10"], "fp32", "onnx")
    assert row["digest"] == open_bundle(made).digest
    assert row["bytes"] == sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
    assert "broken: no bundle" in told["broken"][0]
    assert cli.main(["bundles", str(tmp_path / "nowhere")]) == 0
    assert "holds no bundle" in capfd.readouterr().out


def test_the_shelf_is_the_one_given_or_named_or_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert bundles.shelf() == tmp_path / "vla-eval/bundles"
    monkeypatch.setenv(bundles.VARIABLE, str(tmp_path / "named"))
    assert bundles.shelf() == tmp_path / "named"
    assert bundles.shelf(tmp_path / "given") == tmp_path / "given"


def test_a_policy_without_engines_takes_no_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--task", "toy", "--policy", "zero", "--checkpoint", "x", "--out", str(tmp_path)]) == 2
    assert "policy 'zero' has no engines to make" in capfd.readouterr().err


# --- pi0.5, whose statistics and tokenizer lie in buckets


PI05 = Path(__file__).parent / "golden/pi05_tiny"
MIRROR, BUCKETS = "lerobot/pi05_libero_base", "https://storage.googleapis.com"
STATISTICS = "openpi-assets/checkpoints/pi05_libero/assets/physical-intelligence/libero/norm_stats.json"
SENTENCEPIECE = "big_vision/paligemma_tokenizer.model"
SOURCES = {
    STATISTICS: PI05 / "pi05_libero/checkpoint/assets/physical-intelligence/libero/norm_stats.json",
    SENTENCEPIECE: PI05 / "paligemma_tokenizer.model",
}


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden checkpoint as LeRobot publishes it, and what is published under the digests of the golden files; caches are empty."""
    real, checkpoint = pi05.published, tmp_path / "mirror"
    shutil.copytree(PI05 / "pi05_libero/checkpoint", checkpoint, ignore=shutil.ignore_patterns("assets"))

    def published(suite: str) -> bundles.Published | None:
        said = real(suite)
        if said is None:
            return None
        weights, *files = said.parts
        assert isinstance(weights, bundles.Part)
        parts: list[bundles.Part | bundles.File] = [replace(weights, digests={name: sha256(checkpoint / name) for name in weights.digests})]
        for file in files:
            assert isinstance(file, bundles.File)
            source = SOURCES[file.url.removeprefix(f"{BUCKETS}/")]
            parts.append(replace(file, bytes=source.stat().st_size, sha256=sha256(source)))
        return bundles.Published(tuple(parts), said.options)

    monkeypatch.setattr(pi05, "published", published)
    monkeypatch.setattr(pi05_recipe, "RELEASED", read_pi05_geometry(PI05 / "geometry.json"))
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path / "openpi"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return checkpoint


def keep(openpi: Path, name: str) -> Path:
    """A file in openpi's own cache."""
    (openpi / name).parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(SOURCES[name], openpi / name))


def all_there(tmp_path: Path, mirror: Path) -> Path:
    for name in SOURCES:
        keep(tmp_path / "openpi", name)
    return cached(tmp_path / "hub", MIRROR, "", mirror)


def test_pi05_is_exported_once_from_the_local_caches_and_serves_four_suites(mirror: Path, tmp_path: Path) -> None:
    all_there(tmp_path, mirror)
    made, said = obtain(tmp_path / "shelf", "libero_goal", "pi05")
    assert (said[0], said[1][:10]) == (f"checking {MIRROR}", "exporting ")
    bundle = open_bundle(made)
    assert bundle.policy["policy_config"] == "pi05_libero"
    for file, name in (
        ("assets/physical-intelligence/libero/norm_stats.json", STATISTICS), ("text_tokenizer/paligemma_tokenizer.model", SENTENCEPIECE),
    ):  # fmt: skip
        assert (made / file).read_bytes() == SOURCES[name].read_bytes()
    for suite in bundles.suites(bundle):
        assert obtain(tmp_path / "shelf", suite, "pi05") == (made, [f"using bundle {made}"])
    assert len(bundles.suites(bundle)) == 4


def test_the_bare_command_plays_pi05(
    mirror: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `run --task libero_10 --policy pi05`, in the toy's world."""
    all_there(tmp_path, mirror)
    golden = pi05.published("libero_10")
    assert golden is not None
    monkeypatch.setattr(pi05, "published", lambda suite: bundles.Published(golden.parts, {**golden.options, "suites": (suite,)}))
    words = ["run", "--task", "toy/0", "--policy", "pi05", "--option", "side=64", "--trials", "1", "--workers", "0", "--json"]
    assert cli.main([*words, "--bundles", str(tmp_path / "shelf"), "--out", str(tmp_path / "runs")]) == 0
    out, err = capfd.readouterr()
    assert "exporting" in err
    run = open_run(Path(json.loads(out)["folder"]))
    (made,) = (tmp_path / "shelf").iterdir()
    assert run.manifest.bundle == open_bundle(made).digest
    assert run.manifest.engines["action"]["norm_stats_sha256"] == sha256(SOURCES[STATISTICS])


def test_the_gated_tokenizer_serves_where_somebody_has_it(mirror: Path, tmp_path: Path) -> None:
    keep(tmp_path / "openpi", STATISTICS)
    cached(tmp_path / "hub", MIRROR, "", mirror)
    (tmp_path / "paligemma").mkdir()
    shutil.copy(SOURCES[SENTENCEPIECE], tmp_path / "paligemma/tokenizer.model")
    cached(tmp_path / "hub", "google/paligemma-3b-pt-224", "", tmp_path / "paligemma")
    obtain(tmp_path / "shelf", policy="pi05")


def test_what_pi05_lacks_is_asked_for_by_flag_in_one_sentence(mirror: Path, tmp_path: Path) -> None:
    out = tmp_path / "shelf/pi05-libero_10"
    with pytest.raises(BadRequest) as refused:
        obtain(tmp_path / "shelf", policy="pi05", agree=lambda offer: False)
    all_three = f"{MIRROR} (--checkpoint), {BUCKETS}/{STATISTICS} (--norm-stats), {BUCKETS}/{SENTENCEPIECE} (--tokenizer). Either"
    assert all_three in str(refused.value)
    command = "vla-eval export --model pi05 --checkpoint {} --norm-stats {} --tokenizer {} --policy-config pi05_libero --out {}"
    assert command.format("DIR", "FILE", "FILE", out) in str(refused.value)
    here, kept = cached(tmp_path / "hub", MIRROR, "", mirror), keep(tmp_path / "openpi", SENTENCEPIECE)
    with pytest.raises(BadRequest) as refused:
        obtain(tmp_path / "shelf", policy="pi05", agree=lambda offer: False)
    assert f"caches: {BUCKETS}/{STATISTICS} (--norm-stats). Either" in str(refused.value)
    assert command.format(here, "FILE", kept, out) in str(refused.value)
    assert not (tmp_path / "shelf").exists()


class Web:
    """Answers requests for the buckets' files, and remembers them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes] = lambda content: content) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

        def answer(url: str, timeout: float) -> io.BytesIO:
            self.asked.append(url)
            return io.BytesIO(change(SOURCES[url.removeprefix(f"{BUCKETS}/")].read_bytes()))

        monkeypatch.setattr("urllib.request.urlopen", answer)


def test_a_yes_says_sizes_downloads_the_buckets_files_and_keeps_them(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path / "hub", MIRROR, "", mirror)
    web, offers = Web(monkeypatch), []

    def agree(offer: Callable[[], str]) -> bool:
        offers.append(offer())
        return True

    made, said = obtain(tmp_path / "shelf", policy="pi05", agree=agree)
    sizes = {name: f"{BUCKETS}/{name} ({source.stat().st_size / 1e3:.1f} kB)" for name, source in SOURCES.items()}
    assert f"Download {sizes[STATISTICS]}, {sizes[SENTENCEPIECE]} and export it there?" in offers[0]
    assert said[:2] == [f"downloading {sizes[STATISTICS]}", f"downloading {sizes[SENTENCEPIECE]}"]
    shutil.rmtree(made)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert obtain(tmp_path / "shelf", policy="pi05")[0] == made  # nobody is asked again
    assert web.asked == [f"{BUCKETS}/{name}" for name in SOURCES]


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b" ", lambda b: b[:-2] + b"#\n"], ids=["short", "long", "altered"])
def test_other_bytes_than_the_published_ones_are_not_kept(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]
) -> None:
    cached(tmp_path / "hub", MIRROR, "", mirror)
    keep(tmp_path / "openpi", SENTENCEPIECE)
    Web(monkeypatch, change)
    with pytest.raises(BadRequest, match=r"cannot be downloaded: .*norm_stats\.json \(what came is not the published file"):
        obtain(tmp_path / "shelf", policy="pi05", agree=lambda offer: True)
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "shelf").exists()


def test_nobody_waits_for_the_weights_when_a_small_file_cannot_be_had(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    local = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, local_files_only: local(repo, local_files_only=local_files_only))
    with pytest.raises(BadRequest) as refused:  # the caches' guard says that there is no network
        obtain(tmp_path / "shelf", policy="pi05", agree=lambda offer: True)
    for part in (
        f"{BUCKETS}/{STATISTICS} (HF_HUB_OFFLINE",
        f"{BUCKETS}/{SENTENCEPIECE} (HF_HUB_OFFLINE",
        f"{MIRROR} (not tried)",
        "--checkpoint DIR --norm-stats FILE --tokenizer FILE",
    ):
        assert part in str(refused.value)


def test_a_copy_of_other_bytes_is_not_used_and_said(mirror: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    all_there(tmp_path, mirror)
    copy = tmp_path / "openpi" / STATISTICS
    copy.write_text(copy.read_text().replace("0", "1", 1))
    with pytest.raises(BadRequest, match=r"caches: .*norm_stats\.json \(--norm-stats\)\. Either"):
        obtain(tmp_path / "shelf", policy="pi05", agree=lambda offer: False)
    assert f"{copy} is not the published file" in caplog.text


def test_weights_that_are_not_the_published_ones_are_refused_unless_they_are_meant(mirror: Path, tmp_path: Path) -> None:
    place = all_there(tmp_path, mirror)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "precision": "bfloat16"}))
    with pytest.raises(BadRequest, match=rf"config\.json is not the file that was published .* fetch {MIRROR} again"):
        obtain(tmp_path / "shelf", policy="pi05")
    with pytest.raises(BadRequest, match="is not the file that was published"):
        obtain(tmp_path / "shelf", policy="pi05", checkpoint=MIRROR)  # the published one, by its name
    assert not (tmp_path / "shelf").exists()


def test_an_option_that_only_an_export_has_is_said_to_be_one(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(shutil.copytree(PI05 / "pi05_libero/checkpoint", tmp_path / "own"))
    shutil.copy(SOURCES[SENTENCEPIECE], own / "tokenizer.model")
    monkeypatch.setattr(pi05_recipe, "RELEASED", PI05_RELEASED)  # the released sizes, which are not these
    says = rf"with --geometry FILE\. That is an option of `vla-eval export --model pi05 --checkpoint {own} …`; name the bundle"
    with pytest.raises(BadRequest, match=says):
        obtain(tmp_path / "shelf", policy="pi05", checkpoint=str(own))
    assert list((tmp_path / "shelf").iterdir()) == []


def test_published_statistics_are_never_put_beside_another_checkpoint(mirror: Path, tmp_path: Path) -> None:
    all_there(tmp_path, mirror)
    with pytest.raises(BadRequest, match=rf"{mirror}/assets holds no norm_stats\.json"):
        obtain(tmp_path / "shelf", policy="pi05", checkpoint=str(mirror))
    cached(tmp_path / "hub", "someone/tuned", "", mirror)
    with pytest.raises(BadRequest, match=r"assets holds no norm_stats\.json"):
        obtain(tmp_path / "shelf", policy="pi05", checkpoint="someone/tuned")


def test_a_checkpoint_of_ones_own_brings_statistics_and_perhaps_a_tokenizer(mirror: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(PI05 / "pi05_libero/checkpoint", tmp_path / "own"))
    again = rf"`vla-eval run --task libero_10 --policy pi05 --checkpoint {own} --yes` downloads"
    with pytest.raises(BadRequest, match=rf"caches: {BUCKETS}/{SENTENCEPIECE} \(--tokenizer\)\. Either {again}"):
        obtain(tmp_path / "shelf", policy="pi05", checkpoint=str(own), agree=lambda offer: False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadRequest, match=r"no \.safetensors file"):
        obtain(tmp_path / "shelf", policy="pi05", checkpoint=str(tmp_path / "empty"))  # and nobody is asked for a tokenizer
    shutil.copy(SOURCES[SENTENCEPIECE], own / "tokenizer.model")
    first, _ = obtain(tmp_path / "shelf", policy="pi05", checkpoint=str(own))
    assert obtain(tmp_path / "shelf", policy="pi05", checkpoint=str(own)) == (first, [f"using bundle {first}, made of {own}"])


def test_the_same_weights_with_other_statistics_are_another_bundle(mirror: Path, tmp_path: Path) -> None:
    """No identity covers statistics, so the bundle remembers what it was made of."""
    own = Path(shutil.copytree(PI05 / "pi05_libero/checkpoint", tmp_path / "own"))
    shutil.copy(SOURCES[SENTENCEPIECE], own / "tokenizer.model")
    first, _ = obtain(tmp_path / "shelf", policy="pi05", checkpoint=str(own))
    (file,) = own.rglob("norm_stats.json")
    other = json.loads(file.read_text())
    other["norm_stats"]["actions"]["q99"][0] += 1.0
    file.write_text(json.dumps(other))
    second, said = obtain(tmp_path / "shelf", policy="pi05", checkpoint=str(own))
    assert said[-1].startswith("exporting ")
    assert second != first
    for bundle, wanted in ((first, SOURCES[STATISTICS]), (second, file)):
        assert (bundle / "assets/physical-intelligence/libero/norm_stats.json").read_bytes() == wanted.read_bytes()


def test_pi05_says_where_it_is_published_and_under_which_digests() -> None:
    published = registry.load_published("pi05")
    assert published is not None
    weights, statistics, tokenizer = published("libero_10").parts
    assert (weights.repo, weights.digests["model.safetensors"]) == (MIRROR, "21b87117")
    assert (statistics.url, statistics.bytes) == (f"{BUCKETS}/{STATISTICS}", 1914)
    assert statistics.sha256 == "b3a44bb2810436fb62917decaea58bd4d9110255df527dea21e8fd40c960bd84"
    assert (tokenizer.url, tokenizer.bytes) == (f"{BUCKETS}/{SENTENCEPIECE}", 4264023)
    assert tokenizer.sha256 == "8986bb4f423f07f8c7f70d0dbe3526fb2316056c17bae71b1ea975e77a168fc6"
    assert published("libero_90") is None


def test_gr00t_says_where_it_is_published() -> None:
    published = registry.load_published("gr00t")
    assert published is not None
    assert [str(part) for part in published("libero_spatial").parts] == [f"{WEIGHTS}/libero_spatial", TOKENIZER]
    assert published("libero_90") is None
    assert registry.load_published("zero") is None


def test_a_policy_that_says_nothing_of_its_engines_is_known_by_its_bundle(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, _ = obtain(tmp_path / "shelf")
    monkeypatch.setattr("vla_eval.registry.load_policy", lambda name, **options: zero())
    _, facts = cli._loaded("gr00t", bundle, "libero_10@openpi", {})
    assert facts["engines"] == {name: {"dtype": "fp32"} for name in open_bundle(bundle).components}
    assert facts["backend"] == "unknown"
