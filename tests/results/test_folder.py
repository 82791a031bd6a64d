"""The run folder: written whole or not at all, read with suspicion."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval.arrays import write_npz
from vla_eval.policies.baseline import zero
from vla_eval.registry import load_tasks
from vla_eval.results.folder import Episode, RunFolder, amend, create, open_run, read_episode, untimed, write_episode
from vla_eval.run.loop import start
from vla_eval.types import BadRequest, EpisodeRecord


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with start(zero(), load_tasks("toy")[2:3], trials=2, workers=0, out=tmp_path_factory.mktemp("runs")) as run:
        list(run)
    assert run.folder is not None
    return run.folder


@pytest.fixture
def folder(played: RunFolder, tmp_path: Path) -> RunFolder:
    return create(tmp_path, played.manifest)


def record(trial: int = 0, **kwargs: Any) -> EpisodeRecord:
    return EpisodeRecord("toy@v1/2", trial, 0, "success", 5, 1, 1, 0.5, 0.1, **kwargs)


def test_what_is_written_is_what_is_read(folder: RunFolder, played: RunFolder) -> None:
    assert open_run(folder.path) == folder
    folder.append(record(0, timing={"reset": 0.25}))
    folder.append(record(1, error="Fehler: ü\n2"))
    assert folder.records() == [record(0, timing={"reset": 0.25}), record(1, error="Fehler: ü\n2")]
    episode = played.episode("toy@v1/2", 0)
    path = write_episode(folder.episode_path("toy@v1/2", 0), episode)
    for field in fields(Episode):
        np.testing.assert_array_equal(getattr(read_episode(path), field.name), getattr(episode, field.name))
    assert path.name == "2-0.npz"


def test_an_episode_has_the_schema(played: RunFolder) -> None:
    episode = played.episode("toy@v1/2", 1)
    shapes = {field.name: (getattr(episode, field.name).dtype.kind, getattr(episode, field.name).shape) for field in fields(Episode)}
    assert shapes == {
        "actions": ("f", (80, 7)), "states": ("f", (81, 14)), "proprio": ("f", (81, 8)), "predicates": ("b", (81, 1)),
        "predicate_names": ("U", (1,)), "objects": ("f", (81, 2, 7)), "object_names": ("U", (2,)), "held": ("b", (81, 2)),
        "fixture_names": ("U", (1,)), "fixture_poses": ("f", (1, 7)), "request_step": ("i", (10,)), "request_seconds": ("f", (10, 1)),
        "request_stages": ("U", (1,)), "request_batch": ("i", (10,)),
    }  # fmt: skip
    assert episode.predicate_names.tolist() == ["on(red_block, pad)"]
    assert episode.request_step.tolist() == list(range(0, 80, 8))
    assert episode.states[:, 0] == pytest.approx(np.arange(81) / 20)
    assert list(episode.fixtures) == ["pad"]
    assert [episode.states.dtype.str, episode.actions.dtype.str] == ["<f8", "<f4"]


def test_the_same_episode_is_the_same_bytes(played: RunFolder, tmp_path: Path) -> None:
    episode = played.episode("toy@v1/2", 0)
    one, other = (write_episode(tmp_path / name, episode).read_bytes() for name in ("a.npz", "b.npz"))
    assert one == other


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"actions": np.zeros((80, 7))}, "'actions' is float64; f4 is wanted"),
        ({"actions": np.zeros((80, 7), ">f4")}, None),
        ({"actions": np.zeros(80, np.float32)}, r"'actions' has the shape \(80,\); \[T, A\] is wanted"),
        ({"states": np.zeros((80, 14))}, r"'states' has the shape \(80, 14\); T\+1 is 81"),
        ({"objects": np.zeros((81, 2, 6), np.float32)}, r"'objects' has the shape \(81, 2, 6\); 7 is 7"),
        ({"held": np.zeros((81, 3), bool)}, r"'held' has the shape \(81, 3\); K is 2"),
        ({"predicate_names": np.zeros(1)}, "'predicate_names' is float64; U is wanted"),
        ({"request_step": np.zeros(10, np.int64)}, "'request_step' is int64; i4 is wanted"),
        ({"surprise": np.zeros(1)}, "unknown field 'surprise'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_episode_with_another_layout_is_refused(played: RunFolder, tmp_path: Path, change: dict[str, Any], says: str | None) -> None:
    arrays = {field.name: getattr(played.episode("toy@v1/2", 0), field.name) for field in fields(Episode)}
    write_npz(tmp_path / "2-0.npz", {**arrays, **change})
    if says is None:
        assert read_episode(tmp_path / "2-0.npz").actions.shape == (80, 7)
        return
    with pytest.raises(BadRequest, match=says):
        read_episode(tmp_path / "2-0.npz")


def test_a_missing_or_damaged_episode_is_refused(folder: RunFolder, played: RunFolder) -> None:
    with pytest.raises(BadRequest, match=r"2-0\.npz: cannot be read"):
        folder.episode("toy@v1/2", 0)
    whole = played.episode_path("toy@v1/2", 0).read_bytes()
    folder.episode_path("toy@v1/2", 0).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadRequest, match=r"2-0\.npz: not a \.npz archive"):
        folder.episode("toy@v1/2", 0)
    arrays = {field.name: getattr(played.episode("toy@v1/2", 0), field.name) for field in fields(Episode)}
    del arrays["held"]
    write_npz(folder.episode_path("toy@v1/2", 0), arrays)
    with pytest.raises(BadRequest, match=r"missing 1 required.*'held'"):
        folder.episode("toy@v1/2", 0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("no json", r"line 1 is no JSON \(.*\); delete that line, and vla-eval run --resume .* plays its episode again"),
        ("[]", "line 1: no EpisodeRecord"),
        ('{"task": "a"}', "line 1: missing"),
        ({"surprise": 1}, "line 1: unknown field 'surprise'; was it written by a newer vla-eval"),
        ({"outcome": "maybe"}, "line 1: 'outcome' is 'maybe', which it cannot be"),
        ({"steps": "5"}, "line 1: 'steps' is '5'"),
        ({"steps": True}, "line 1: 'steps' is True"),
        ({"seconds": float("nan")}, "line 1: 'seconds' is nan"),
        ({"seconds": 10**400}, "line 1: 'seconds' is 1000"),
        ({"timing": {"reset": "x"}}, "line 1: 'timing' is"),
        ({"video": "../../secret.mp4"}, "line 1: 'video' is '../../secret.mp4', which leaves the run folder"),
        ({"video": "/secret.mp4"}, "line 1: 'video' is '/secret.mp4', which leaves the run folder"),
    ],
    ids=str,
)
def test_a_line_that_is_no_record_is_refused_by_its_number(folder: RunFolder, line: Any, says: str) -> None:
    text = json.dumps(asdict(record()) | line) if isinstance(line, dict) else line
    (folder.path / "episodes.jsonl").write_text(text + "\n")
    with pytest.raises(BadRequest, match=says):
        folder.records()


def test_a_record_that_was_played_again_counts_once(folder: RunFolder) -> None:
    folder.append(replace(record(0), outcome="error", error="x"))
    folder.append(record(1))
    assert not folder.complete
    folder.append(record(0))
    assert folder.records() == [record(1), record(0)]
    assert folder.complete


def test_a_torn_last_line_is_left_out_while_reading_and_cut_by_repair(folder: RunFolder) -> None:
    folder.append(record(0))
    whole = (folder.path / "episodes.jsonl").read_bytes()
    (folder.path / "episodes.jsonl").write_bytes(whole + '{"task": "ü'.encode()[:-1])
    assert folder.records() == [record(0)]
    said = folder.repair()
    assert said is not None
    assert "torn after 11 bytes" in said
    assert (folder.path / "episodes.jsonl").read_bytes() == whole
    assert folder.repair() is None


def test_a_separator_inside_a_message_does_not_end_its_line(folder: RunFolder) -> None:
    strange = record(0, error="a\u2028b\u0085c\x1dd\x0be")
    folder.append(strange)
    folder.append(record(1))
    assert folder.records() == [strange, record(1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON"),
        ("[1]", "no manifest of a run"),
        ('{"schema": 99}', "schema 99 is newer than 1, which this vla-eval reads; upgrade vla-eval-trt"),
        ('{"schema": 1}', "missing"),
        ({"ledger": [["toy@v1/2"]]}, "'ledger' is"),
        ({"ledger": [["toy@v1/2", "0"]]}, "'ledger' is"),
        ({"seed": "1"}, "'seed' is '1'"),
    ],
    ids=str,
)
def test_a_manifest_that_is_none_is_refused(folder: RunFolder, text: Any, says: str) -> None:
    changed = json.dumps(asdict(folder.manifest) | text) if isinstance(text, dict) else text
    (folder.path / "manifest.json").write_text(changed)
    with pytest.raises(BadRequest, match=says):
        open_run(folder.path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no run folder \(it has no manifest\.json\)"):
        open_run(tmp_path)
    with pytest.raises(BadRequest, match="cannot be read"):
        open_run(Path(__file__))


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 600 bytes: what a full disk does, without one. Not around pytest's own output, which may be a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_leaves_nothing_of_itself(folder: RunFolder) -> None:
    folder.append(record(0))
    before = (folder.path / "episodes.jsonl").read_bytes()
    with small_files():
        with pytest.raises(BadRequest, match=r"episodes\.jsonl: cannot be written \(File too large\); make room and go on with --resume"):
            folder.append(record(1, error="x" * 500))
        assert (folder.path / "episodes.jsonl").read_bytes() == before
        with pytest.raises(BadRequest, match="cannot be written"):
            amend(folder, replace(folder.manifest, seed=9))
        assert open_run(folder.path) == folder
        assert [path.name for path in folder.path.iterdir() if path.name.endswith(".tmp")] == []
        with pytest.raises(BadRequest, match="cannot make the run folder"):
            create(folder.path / "deep/down", folder.manifest)
        assert not (folder.path / "deep").exists()


def test_what_a_killed_writer_left_is_swept(folder: RunFolder) -> None:
    left = [folder.path / ".manifest.json.7.tmp", folder.episodes / ".2-0.npz.7.tmp", folder.episodes / ".2-0.7.part.mp4"]
    kept = [folder.episodes / "2-0.npz", folder.path / ".lock"]
    for path in left + kept:
        path.touch()
    folder.sweep()
    assert [path.exists() for path in left + kept] == [False] * 3 + [True] * 2


def test_untimed_forgets_the_times_alone() -> None:
    assert untimed(record(0, timing={"reset": 1.0})) == replace(record(0), seconds=0, policy_seconds=0)
