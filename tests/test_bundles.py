"""Which bundle a bare `run` plays: one on the shelf, else one made of what the local Hugging Face cache holds. No test has a network."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vla_eval import bundles, cli, registry
from vla_eval.engines.bundle import open_bundle
from vla_eval.policies.baseline import zero
from vla_eval.policies.gr00t import libero, recipe
from vla_eval.policies.gr00t.configuration import read_geometry
from vla_eval.results.folder import open_run
from vla_eval.results.leaderboard import of_run
from vla_eval.types import BadRequest

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


def obtain(folder: Path, suite: str = "libero_10@openpi", **arguments: Any) -> tuple[Path, list[str]]:
    said: list[str] = []

    @contextlib.contextmanager
    def busy(line: str) -> Iterator[None]:
        said.append(line)
        yield

    place = bundles.obtain("gr00t", suite, folder=folder, say=said.append, busy=busy, **{"agree": never, **arguments})
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
    assert of_run(played[0].path).precision == "fp32"  # a leaderboard's row says in which types it was computed
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
    assert "`vla-eval export --model gr00t --checkpoint DIR --out " in sentence
    assert not (tmp_path / "shelf").exists()


def test_a_pipe_is_never_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_size_of", lambda part: pytest.fail("the hub was asked"))
    assert cli.main(["run", "--task", "libero_10", "--policy", "gr00t", "--bundles", str(tmp_path), "--out", str(tmp_path / "runs")]) == 2
    assert "not in the local Hugging Face cache" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("lost", ["model-00002-of-00003.safetensors", "config.json"])
def test_half_a_download_is_missing(tmp_path: Path, lost: str) -> None:
    cached(tmp_path / "hub", WEIGHTS, "libero_10", GOLDEN / "checkpoint", but=lost)
    cached(tmp_path / "hub", TOKENIZER, "", GOLDEN / "checkpoint/tokenizer")
    with pytest.raises(BadRequest, match=f"cache: {WEIGHTS}/libero_10 \\(--checkpoint\\)\\. "):
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
    with pytest.raises(BadRequest, match=rf"{WEIGHTS}/libero_10 cannot be downloaded .* --checkpoint"):
        obtain(tmp_path / "shelf", agree=lambda offer: True)
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


def test_an_export_that_breaks_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(checkpoint: Path, out: Path, *, tokenizer: Path | None = None, embodiment: str | None = None) -> None:
        out.mkdir(parents=True)
        (out / "half").write_text("a component")
        raise OSError("disk full")

    monkeypatch.setattr(registry, "load_recipe", lambda name: breaks)
    own = tmp_path / "libero_goal"
    shutil.copytree(GOLDEN / "checkpoint", own)
    with pytest.raises(OSError, match="disk full"):
        obtain(tmp_path / "shelf", "libero_goal", checkpoint=str(own))
    assert list((tmp_path / "shelf").iterdir()) == []


def test_a_repository_may_be_named_with_a_folder(hub: Path, tmp_path: Path) -> None:
    cached(hub, "someone/robots", "tuned/libero_10", GOLDEN / "checkpoint")
    made, _ = obtain(tmp_path / "shelf", checkpoint="someone/robots/tuned/libero_10")
    assert bundles.suites(open_bundle(made)) == ["libero_10"]


@pytest.mark.parametrize("name", ["nowhere", "/not/there", "../up", "a/b/../../c"])
def test_what_is_neither_folder_nor_repository_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match="no such folder, and it is no REPO"):
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
