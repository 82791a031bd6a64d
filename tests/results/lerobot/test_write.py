"""What the writer makes of a run, and what it leaves behind when it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from imageio_ffmpeg import get_ffmpeg_exe

from vla_eval.results import lerobot
from vla_eval.results.folder import RunFolder
from vla_eval.results.lerobot import write
from vla_eval.results.lerobot_check import check
from vla_eval.results.lerobot_convention import CONVENTIONS
from vla_eval.results.lerobot_meta import open_dataset
from vla_eval.results.lerobot_stats import write_stats
from vla_eval.types import BadRequest

CASES = Path(__file__).parents[2] / "cases" / "datasets"
MakeRun = Callable[..., RunFolder]
Studio = Any


def load(root: Path, file: str) -> Any:
    return json.loads((root / file).read_text())


def table(root: Path, index: int) -> pa.Table:
    return pq.read_table(root / f"data/chunk-000/episode_{index:06d}.parquet")


def bytes_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_rows_are_the_recorded_ones_with_the_seven_columns_in_order(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path)
    write([run], tmp_path / "out")
    rows = table(tmp_path / "out", 2)
    assert [(field.name, str(field.type)) for field in rows.schema] == [
        ("observation.state", "fixed_size_list<element: float>[8]"), ("action", "fixed_size_list<element: float>[7]"),
        ("timestamp", "float"), ("frame_index", "int64"), ("episode_index", "int64"), ("index", "int64"), ("task_index", "int64"),
    ]  # fmt: skip
    episode = run.episode("pick@v1/1", 0)
    state, action = (np.stack(rows.column(name).to_numpy()) for name in ("observation.state", "action"))
    assert np.array_equal(state, episode.proprio[:-1])  # row t: before action t
    assert np.array_equal(action[:, :6], episode.actions[:, :6])
    assert np.array_equal(action[:, 6], (1 - episode.actions[:, 6]) / 2)
    assert rows.column("index").to_pylist() == list(range(51, 74))
    assert set(rows.column("task_index").to_pylist()) == {1}


def test_pandas_sees_arrays_and_never_lists(tmp_path: Path, make_run: MakeRun) -> None:
    """The loader takes its one path for numpy arrays and another for everything else."""
    write([make_run(tmp_path)], tmp_path / "out")
    cell = table(tmp_path / "out", 0).to_pandas()["action"].iloc[0]
    assert isinstance(cell, np.ndarray)
    assert (cell.dtype, cell.shape) == (np.float32, (7,))


def test_the_metadata_is_what_gr00t_reads(dataset: Path) -> None:
    info = load(dataset, "meta/info.json")
    assert {key: value for key, value in info.items() if key not in ("features", "vla_eval")} == {
        "codebase_version": "v2.1",
        "robot_type": "panda",
        "total_episodes": 3,
        "total_frames": 74,
        "total_tasks": 2,
        "total_videos": 6,
        "total_chunks": 1,
        "chunks_size": 1000,
        "fps": 20,
        "splits": {"train": "0:3"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    assert info["features"]["observation.images.wrist_image"]["info"]["video.fps"] == 20
    assert load(dataset, "meta/modality.json") == load(CASES, "modality/good.json") | {
        "annotation": {"human.action.task_description": {"original_key": "task_index"}}
    }
    assert (dataset / "meta/tasks.jsonl").read_bytes() == (
        b'{"task_index": 0, "task": "put the bowl on the plate"}\n{"task_index": 1, "task": "\\u00f6ffne die Schublade"}\n'
    )
    assert json.loads((dataset / "meta/episodes.jsonl").read_text().splitlines()[2]) == {
        "episode_index": 2,
        "tasks": ["öffne die Schublade"],
        "length": 23,
        "source": {"run": "20260101T000000Z-pick@v1-oracle-0001", "task": "pick@v1/1", "trial": 0, "seed": 7, "outcome": "failure"},
    }


def test_a_video_has_the_pictures_of_its_rows_and_is_mirrored_as_the_policy_saw_them(dataset: Path) -> None:
    path = dataset / "videos/chunk-000/observation.images.wrist_image/episode_000001.mp4"
    command = [get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    frames = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8).reshape(-1, 32, 32, 3)
    assert len(frames) == 20
    for step, frame in enumerate(frames):
        # Lossy: a few grey levels. The bright corner is upper left in the upright picture, so upper right here.
        assert abs(frame[2:14, 18:30].mean() - 200) < 4
        assert abs(frame[2:14, 2:14].mean()) < 4
        assert abs(frame[18:30].mean() - (20 + 8 * (step % 16) + 4)) < 4


def test_the_env_convention_leaves_numbers_and_pictures_as_they_are(tmp_path: Path, make_run: MakeRun, draw_views: Studio) -> None:
    run = make_run(tmp_path)
    write([run], tmp_path / "out", convention="env", size=16, studio=draw_views)
    assert np.array_equal(np.stack(table(tmp_path / "out", 0).column("action").to_numpy()), run.episode("pick@v1/0", 0).actions)
    assert load(tmp_path / "out", "meta/info.json")["vla_eval"]["convention"] == "env"
    assert list(load(tmp_path / "out", "meta/modality.json")["video"]) == ["agentview", "robot0_eye_in_hand"]
    assert list(check(tmp_path / "out")) == []


@given(st.floats(-1, 1, width=32))
def test_the_gripper_s_sign_survives_the_convention(command: float) -> None:
    """The simulator obeys the sign alone, so a replay that keeps it is exact; the six others are stored as they are."""
    convention = CONVENTIONS["libero_sim"]
    action = np.full((1, 7), command, np.float32)
    stored = convention.stored(action)
    assert 0 <= stored[0, 6] <= 1
    back = convention.executed(stored)
    assert np.array_equal(back[0, :6], action[0, :6])
    assert np.sign(back[0, 6]) == np.sign(action[0, 6])
    assert abs(back[0, 6] - action[0, 6]) <= 2.0**-23


def test_open_is_one_and_closed_zero() -> None:
    convention = CONVENTIONS["libero_sim"]
    commands = np.array([[0] * 6 + [command] for command in (-1, 0, 1)], np.float32)
    assert convention.stored(commands)[:, 6].tolist() == [1.0, 0.5, 0.0]
    assert np.array_equal(convention.executed(convention.stored(commands)), commands)


@pytest.mark.parametrize("case", load(CASES, "timestamps.json")["cases"], ids=lambda case: str(case["fps"]))
def test_timestamps_are_divided_in_double_precision(case: dict[str, Any], tmp_path: Path, make_run: MakeRun) -> None:
    """In the first episode and in the second, which begins at zero again."""
    run = make_run(tmp_path, [(0, 0, "success", 10_000), (0, 1, "success", 10_000)], control_hz=case["fps"])
    write([run], tmp_path / "out")
    for index in (0, 1):
        times = table(tmp_path / "out", index).column("timestamp").to_numpy()
        assert {row: times[int(row)] for row in case["timestamp"]} == case["timestamp"]
        assert np.abs(np.diff(times.astype(np.float64)) - 1 / case["fps"]).max() <= 4e-5
    assert list(check(tmp_path / "out")) == []


def test_the_order_of_finishing_does_not_change_the_dataset(tmp_path: Path, make_run: MakeRun, draw_views: Studio) -> None:
    played = [(0, 0, "success", 20), (0, 1, "success", 18), (1, 0, "success", 17)]
    first = make_run(tmp_path / "a", played)
    write([first], tmp_path / "one", size=16, studio=draw_views)
    lines = (first.path / "episodes.jsonl").read_text().splitlines(keepends=True)
    (first.path / "episodes.jsonl").write_text("".join(reversed(lines)))
    write([first], tmp_path / "two", size=16, studio=draw_views)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_only_successes_are_written_when_asked(tmp_path: Path, make_run: MakeRun) -> None:
    written = write([make_run(tmp_path)], tmp_path / "out", only="successes")
    assert (written.episodes, written.left_out) == (2, {"error": 1, "not chosen": 1})
    assert list(check(tmp_path / "out")) == []


def test_appending_keeps_indices_and_statistics_right(dataset: Path, tmp_path: Path, make_run: MakeRun, draw_views: Studio) -> None:
    """`dataset` was written from the first run."""
    first, second = make_run(tmp_path), make_run(tmp_path, [(1, 5, "success", 40), (0, 5, "success", 19)], "another-run")
    written = write([second], dataset, size=32, studio=draw_views, append=True)
    assert (written.episodes, written.total_episodes, written.frames, written.total_frames) == (2, 5, 59, 133)
    write([first, second], tmp_path / "whole", size=32, studio=draw_views)
    assert bytes_of(dataset) == bytes_of(tmp_path / "whole")
    assert list(check(dataset)) == []


def test_nothing_but_the_dataset_is_left_beside_it(tmp_path: Path, make_run: MakeRun) -> None:
    write([make_run(tmp_path / "runs")], tmp_path / "data" / "out")
    write([make_run(tmp_path / "runs", run_id="another")], tmp_path / "data" / "out", append=True)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["out"]


def refused(match: str, tmp_path: Path, *runs: RunFolder, **options: Any) -> None:
    """The write is refused with that sentence, and what lay beside `out` lies there unchanged."""
    before = bytes_of(tmp_path)
    with pytest.raises(BadRequest, match=match) as caught:
        write(list(runs), tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert bytes_of(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def test_a_rate_other_than_the_control_rate_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    refused(r"one rate, but here are 20 .* and 10 \(--fps\)", tmp_path, make_run(tmp_path), fps=10)


def test_runs_of_two_rates_are_no_dataset(tmp_path: Path, make_run: MakeRun) -> None:
    refused("one dataset has one rate", tmp_path, make_run(tmp_path), make_run(tmp_path, run_id="slow", control_hz=10.0))


def test_a_run_that_does_not_say_its_rate_needs_it_said(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path, control_hz=None)
    refused("say it with --fps", tmp_path, run)
    assert write([run], tmp_path / "out", fps=20).episodes == 3


def test_odd_pictures_are_refused_before_anything_is_drawn(tmp_path: Path, make_run: MakeRun, draw_views: Studio) -> None:
    refused("needs an even size", tmp_path, make_run(tmp_path), size=33, studio=draw_views)


def test_a_run_named_twice_or_added_twice_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path)
    refused("named twice", tmp_path, run, run)
    write([run], tmp_path / "out")
    refused("holds run .* already", tmp_path, run, append=True)


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path, make_run: MakeRun) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    refused("exists; add to it with --append", tmp_path, make_run(tmp_path))
    refused("meta/info.json: is not there", tmp_path, make_run(tmp_path, run_id="b"), append=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"convention": "env"}, "has convention 'libero_sim', the new episodes 'env'"),
        ({"studio": None}, "has videos"),
        ({"size": 48}, "choose the same --size"),
    ],
)
def test_what_does_not_fit_is_not_added(
    options: dict[str, Any], match: str, dataset: Path, tmp_path: Path, make_run: MakeRun, draw_views: Studio
) -> None:
    dataset.rename(tmp_path / "out")
    refused(match, tmp_path, make_run(tmp_path, run_id="b"), append=True, **({"size": 32, "studio": draw_views} | options))


def test_a_run_without_a_written_episode_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    refused(r"no episode to write \(1 error\)", tmp_path, make_run(tmp_path, [(0, 0, "error", 5)]))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lerobot, "write_stats", full)
    refused("cannot be written .No space left on device.; nothing was changed", tmp_path, make_run(tmp_path))


def test_a_second_writer_is_refused(tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / "runs"), make_run(tmp_path / "runs", run_id="b")]

    def meanwhile(dataset: Any, progress: Any) -> None:
        with pytest.raises(BadRequest, match="another process is writing this dataset"):
            write([runs[1]], tmp_path / "out")
        write_stats(dataset, progress)

    monkeypatch.setattr(lerobot, "write_stats", meanwhile)
    write([runs[0]], tmp_path / "out")
    assert list(check(tmp_path / "out")) == []


KILLED = """
import sys, time
from pathlib import Path
from vla_eval.results import lerobot
from vla_eval.results.folder import open_run

def hang(*arguments, **options):
    print("ready", flush=True)
    time.sleep(60)

{where} = hang
lerobot.write([open_run(sys.argv[1])], Path(sys.argv[2]), append=sys.argv[3] == "append")
"""


@pytest.mark.parametrize("where", ["lerobot.write_stats", "lerobot._exchange", "lerobot.shutil.rmtree"])
def test_a_write_that_is_killed_leaves_the_old_dataset_or_the_new_one(where: str, tmp_path: Path, make_run: MakeRun) -> None:
    """Killed before the statistics, before the swap, and after it before the old one is cleared away; the next write mends what is left."""
    out = tmp_path / "data" / "out"
    write([make_run(tmp_path)], out)
    second = make_run(tmp_path, run_id="b")
    before = bytes_of(out)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(where=where), str(second.path), str(out), "append"], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    added = where == "lerobot.shutil.rmtree"
    assert (bytes_of(out) != before) == added
    assert list(check(out)) == []
    write([make_run(tmp_path, run_id="c")], out, append=True)
    assert open_dataset(out).info["total_episodes"] == (9 if added else 6)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_where_folders_cannot_be_swapped_the_old_one_steps_aside(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoSwap:
        def __init__(self, *arguments: object, **options: object) -> None: ...

    write([make_run(tmp_path)], tmp_path / "data" / "out")
    monkeypatch.setattr("ctypes.CDLL", NoSwap)
    write([make_run(tmp_path, run_id="b")], tmp_path / "data" / "out", append=True)
    assert open_dataset(tmp_path / "data" / "out").info["total_episodes"] == 6
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["out"]


def test_episode_1000_begins_the_second_folder(tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "CHUNK", 2)
    write([make_run(tmp_path)], tmp_path / "out")
    assert (tmp_path / "out/data/chunk-001/episode_000002.parquet").exists()
    assert load(tmp_path / "out", "meta/info.json")["total_chunks"] == 2
    assert list(check(tmp_path / "out")) == []


def test_the_folder_one_is_in_is_not_swapped_from_under_one(
    make_run: MakeRun, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "new" / "deeper"
    inside.mkdir(parents=True)
    for here, out, append in ((dataset, ".", True), (dataset / "meta", "..", True), (inside, ".", False)):
        monkeypatch.chdir(here)
        with pytest.raises(BadRequest, match="folder you are in"):
            write([make_run(tmp_path / here.name, run_id="other")], Path(out), append=append)
        assert Path.cwd() == here


def test_adding_through_a_link_adds_to_what_it_names(make_run: MakeRun, tmp_path: Path) -> None:
    """A data folder on another disk, linked into the project."""
    real, link = tmp_path / "disk" / "data", tmp_path / "data"
    write([make_run(tmp_path)], real)
    link.symlink_to(real)
    assert write([make_run(tmp_path, run_id="other")], link, append=True).total_episodes == 6
    assert link.is_symlink()
    assert len(open_dataset(real).episodes) == 6
    assert sorted(path.name for path in tmp_path.rglob("*.partial")) == []


@pytest.mark.parametrize("runs", [None, ["x"], [{}], "gone"])
def test_adding_to_a_set_whose_origin_cannot_be_read_is_refused(runs: object, make_run: MakeRun, tmp_path: Path) -> None:
    dataset = write([make_run(tmp_path)], tmp_path / "out").path
    said = load(dataset, "meta/info.json")
    said["vla_eval"] = {"convention": "libero_sim"} | ({} if runs == "gone" else {"runs": runs})
    (dataset / "meta/info.json").write_text(json.dumps(said))
    with pytest.raises(BadRequest, match=r"info\.json: vla_eval\.runs"):
        write([make_run(tmp_path, run_id="other")], dataset, append=True)


def test_adding_to_a_set_that_does_not_hold_what_it_says_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    """Its indices would go on from a number of rows that is wrong."""
    out, other = tmp_path / "out", make_run(tmp_path, run_id="other")
    write([make_run(tmp_path)], out)
    lines = (out / "meta/episodes.jsonl").read_text()
    (out / "meta/episodes.jsonl").write_text(lines.replace('"length": 31', '"length": 32'))
    with pytest.raises(BadRequest, match=r"episode_000000\.parquet has 31 rows, .*episodes\.jsonl says 32"):
        write([other], out, append=True)
    (out / "meta/episodes.jsonl").write_text(lines)
    (out / "data/chunk-000/episode_000000.parquet").unlink()
    with pytest.raises(BadRequest, match=r"episode_000000\.parquet: is not there"):
        write([other], out, append=True)


def test_adding_keeps_to_the_numbers_that_tasks_have_and_to_our_own_paths(make_run: MakeRun, tmp_path: Path) -> None:
    """Somebody took a task out, which leaves a hole in the numbers, and put the files elsewhere."""
    out = tmp_path / "out"
    write([make_run(tmp_path, played=[(1, 0, "success", 20)])], out)
    (out / "meta/tasks.jsonl").write_text((out / "meta/tasks.jsonl").read_text().replace('"task_index": 0', '"task_index": 1'))
    rows = pq.read_table(out / "data/chunk-000/episode_000000.parquet")
    rows = rows.set_column(rows.schema.get_field_index("task_index"), "task_index", pa.array([1] * 20))
    (out / "rows").mkdir()
    pq.write_table(rows, out / "rows/0.parquet")
    said = load(out, "meta/info.json") | {"data_path": "rows/{episode_index}.parquet", "chunks_size": 7}
    (out / "meta/info.json").write_text(json.dumps(said))
    write([make_run(tmp_path, run_id="other")], out, append=True)
    assert [finding for finding in check(out) if finding.severity == "error"] == []
    assert {line["task_index"] for line in map(json.loads, (out / "meta/tasks.jsonl").read_text().splitlines())} == {1, 2}


def test_a_video_that_is_gone_is_named_when_episodes_are_added(
    make_run: MakeRun, draw_views: Studio, dataset: Path, tmp_path: Path
) -> None:
    gone = dataset / "videos/chunk-000/observation.images.image/episode_000001.mp4"
    gone.unlink()
    with pytest.raises(BadRequest, match=r"image/episode_000001\.mp4: No such file or directory"):
        write([make_run(tmp_path, run_id="other")], dataset, append=True, size=32, studio=draw_views)
