"""One mutation a rule: each plants one fault into a sound dataset, and exactly that rule is reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vla_eval.results.lerobot_check import check
from vla_eval.results.lerobot_meta import open_dataset
from vla_eval.results.lerobot_policy import NeededGroup, PolicyNeeds
from vla_eval.results.lerobot_rules import RULES, Finding
from vla_eval.results.lerobot_stats import fingerprint, write_stats
from vla_eval.results.lerobot_video import write_videos
from vla_eval.types import BadRequest

CASES = Path(__file__).parents[2] / "cases" / "datasets"
FIRST = "data/chunk-000/episode_000000.parquet"
FILM = "videos/chunk-000/observation.images.image/episode_000000.mp4"
VIDEO_FIELDS = "/{video_key}/{episode_index}"
AXES = ("x", "y", "z", "roll", "pitch", "yaw")
# Bounds wide enough for anything these made-up arms do, and no wider than a twentieth of it.
NEEDS = PolicyNeeds(
    {
        "state": {**{axis: NeededGroup(1, ((-2.0, 2.0),)) for axis in AXES}, "gripper": NeededGroup(2, ((-2.0, 2.0),) * 2)},
        "action": {**{axis: NeededGroup(1, ((-1.0, 1.0),)) for axis in AXES}, "gripper": NeededGroup(1, ((0.0, 1.0),))},
    },
    cameras=("image", "wrist_image"),
    horizon=16,
    trained_for=("pick",),
    language="annotation.human.action.task_description",
)
MUTATIONS: dict[str, Callable[[Path], None]] = {}


def breaks(rule: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a mutation under the one rule that it breaks."""

    def register(mutation: Callable[[Path], None]) -> Callable[[Path], None]:
        assert rule not in MUTATIONS
        MUTATIONS[rule] = mutation
        return mutation

    return register


def edit(root: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((root / file).read_text())
    change(data)
    (root / file).write_text(json.dumps(data))


def info(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(root, "meta/info.json", change)


def modality(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(root, "meta/modality.json", change)


def stats(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(root, "meta/stats.json", change)


def lines(root: Path, file: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
    data = [json.loads(line) for line in (root / file).read_text().splitlines()]
    change(data)
    (root / file).write_text("".join(json.dumps(line) + "\n" for line in data))


def column(root: Path, name: str, change: Callable[[pa.Array], pa.Array | None], file: str = FIRST) -> None:
    """Replaces one column of a parquet file; None takes it out."""
    table = pq.read_table(root / file)
    new = change(table.column(name).combine_chunks())
    at = table.schema.get_field_index(name)
    pq.write_table(table.remove_column(at) if new is None else table.set_column(at, name, new), root / file)


def numbers(root: Path, name: str, change: Callable[[np.ndarray[Any, Any]], object], file: str = FIRST) -> None:
    """Changes the numbers of a column, its type kept."""

    def changed(array: pa.Array) -> pa.Array:
        fixed = pa.types.is_fixed_size_list(array.type)
        values = np.array(array.flatten() if fixed else array)
        values = values.reshape(len(array), -1) if fixed else values
        change(values)
        flat = pa.array(values.reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if fixed else flat

    column(root, name, changed, file)


@breaks("file-missing")
def _(root: Path) -> None:
    (root / "meta/tasks.jsonl").unlink()


@breaks("json-syntax")
def _(root: Path) -> None:
    path = root / "meta/stats.json"
    path.write_text(path.read_text()[:-40])


@breaks("jsonl-blank-line")
def _(root: Path) -> None:
    shutil.copy(CASES / "tasks/blank_last_line.jsonl", root / "meta/tasks.jsonl")
    only_first_task(root)


@breaks("jsonl-byte-order-mark")
def _(root: Path) -> None:
    shutil.copy(CASES / "tasks/byte_order_mark.jsonl", root / "meta/tasks.jsonl")
    only_first_task(root)


@breaks("jsonl-spread")
def _(root: Path) -> None:
    shutil.copy(CASES / "tasks/pretty_printed.jsonl", root / "meta/tasks.jsonl")
    only_first_task(root)


@breaks("jsonl-line-ends")
def _(root: Path) -> None:
    shutil.copy(CASES / "tasks/windows_line_ends.jsonl", root / "meta/tasks.jsonl")
    only_first_task(root)


def only_first_task(root: Path) -> None:
    """The third episode, the only one of the second task, becomes one of the first: the case files know one task."""
    lines(root, "meta/episodes.jsonl", lambda all_: all_[2].update(tasks=all_[0]["tasks"]))
    numbers(root, "task_index", lambda values: values.fill(0), "data/chunk-000/episode_000002.parquet")
    info(root, lambda data: data.update(total_tasks=1))


@breaks("layout-v3")
def _(root: Path) -> None:
    shutil.copy(CASES / "info/v30.json", root / "meta/info.json")


@breaks("version-claim")
def _(root: Path) -> None:
    info(root, lambda data: data.update(codebase_version="v3.0"))


@breaks("info-field")
def _(root: Path) -> None:
    info(root, lambda data: data.update(chunks_size="1000"))


@breaks("info-feature")
def _(root: Path) -> None:
    info(root, lambda data: data["features"].update(note={"dtype": "string", "shape": 1}))


@breaks("path-template")
def _(root: Path) -> None:
    info(root, lambda data: data.update(data_path="../other/episode_{episode_index:06d}.parquet"))


@breaks("info-optional")
def _(root: Path) -> None:
    info(root, lambda data: data.pop("robot_type"))


@breaks("info-total")
def _(root: Path) -> None:
    info(root, lambda data: data.update(total_chunks=0))


@breaks("info-splits")
def _(root: Path) -> None:
    info(root, lambda data: data.update(splits={"train": "0:50"}))


@breaks("feature-standard")
def _(root: Path) -> None:
    info(root, lambda data: data["features"].pop("frame_index"))
    for episode in range(3):
        column(root, "frame_index", lambda _: None, f"data/chunk-000/episode_{episode:06d}.parquet")


@breaks("feature-dtype")
def _(root: Path) -> None:
    info(root, lambda data: data["features"]["action"].update(dtype="float64"))
    for episode in range(3):
        column(root, "action", lambda array: array.cast(pa.list_(pa.float64(), 7)), f"data/chunk-000/episode_{episode:06d}.parquet")


@breaks("video-info")
def _(root: Path) -> None:
    info(root, lambda data: (feature := data["features"]["observation.images.image"]).update(video_info=feature.pop("info")))


@breaks("task-field")
def _(root: Path) -> None:
    lines(root, "meta/tasks.jsonl", lambda all_: all_.append({"task_index": "2", "task": "lift it"}))


@breaks("task-empty")
def _(root: Path) -> None:
    lines(root, "meta/tasks.jsonl", lambda all_: all_[1].update(task=""))
    lines(root, "meta/episodes.jsonl", lambda all_: all_[2].update(tasks=[""]))


@breaks("task-duplicate")
def _(root: Path) -> None:
    lines(root, "meta/tasks.jsonl", lambda all_: all_.append(all_[1]))


@breaks("episode-field")
def _(root: Path) -> None:
    lines(root, "meta/episodes.jsonl", lambda all_: all_.append({"episode_index": 3, "tasks": all_[0]["tasks"]}))


@breaks("episode-duplicate")
def _(root: Path) -> None:
    lines(root, "meta/episodes.jsonl", lambda all_: all_.append(all_[1]))


@breaks("episode-missing")
def _(root: Path) -> None:
    """The second episode taken out, with everything it had, and nothing renumbered but the rows."""
    lines(root, "meta/episodes.jsonl", lambda all_: all_.pop(1))
    for file in [FIRST, *(f"videos/chunk-000/observation.images.{name}/x.mp4" for name in ("image", "wrist_image"))]:
        (root / file).with_name("episode_000001" + Path(file).suffix).unlink()
    numbers(root, "index", lambda values: np.subtract(values, 20, out=values), "data/chunk-000/episode_000002.parquet")
    info(root, lambda data: data.update(total_episodes=2, total_frames=54, total_videos=4, splits={"train": "0:2"}))
    write_stats(_unchecked(root))


def _unchecked(root: Path) -> Any:
    """The dataset as it is: `open_dataset` would refuse the fault that has just been planted."""
    from vla_eval.results.lerobot_meta import metadata
    from vla_eval.results.lerobot_rules import collected

    return collected(metadata(root))[1]


@breaks("episode-tasks")
def _(root: Path) -> None:
    lines(root, "meta/episodes.jsonl", lambda all_: all_[0].update(tasks=all_[2]["tasks"]))


@breaks("episode-length")
def _(root: Path) -> None:
    """One row too few in the last episode, its last one; its videos follow the rows."""
    file = "data/chunk-000/episode_000002.parquet"
    pq.write_table(pq.read_table(root / file).slice(0, 22), root / file)
    write_stats(open_dataset(root))


@breaks("episode-short")
def _(root: Path) -> None:
    """The last episode cut to 15 rows, everywhere."""
    file = "data/chunk-000/episode_000002.parquet"
    pq.write_table(pq.read_table(root / file).slice(0, 15), root / file)
    for name in ("image", "wrist_image"):
        film(root / f"videos/chunk-000/observation.images.{name}/episode_000002.mp4", 15)
    lines(root, "meta/episodes.jsonl", lambda all_: all_[2].update(length=15))
    info(root, lambda data: data.update(total_frames=66))
    write_stats(open_dataset(root))


@breaks("modality-section")
def _(root: Path) -> None:
    modality(root, lambda data: data.pop("action"))


@breaks("modality-group")
def _(root: Path) -> None:
    modality(root, lambda data: data["state"]["x"].pop("end"))


@breaks("modality-column")
def _(root: Path) -> None:
    modality(root, lambda data: data["state"]["x"].update(original_key="observation.position"))


@breaks("slice-negative")
def _(root: Path) -> None:
    shutil.copy(CASES / "modality/negative_start.json", root / "meta/modality.json")


@breaks("slice-reversed")
def _(root: Path) -> None:
    shutil.copy(CASES / "modality/start_after_end.json", root / "meta/modality.json")


@breaks("slice-empty")
def _(root: Path) -> None:
    shutil.copy(CASES / "modality/empty_slice.json", root / "meta/modality.json")


@breaks("slice-overrun")
def _(root: Path) -> None:
    shutil.copy(CASES / "modality/end_past_the_width.json", root / "meta/modality.json")


@breaks("slice-overlap")
def _(root: Path) -> None:
    shutil.copy(CASES / "modality/overlap.json", root / "meta/modality.json")


@breaks("slice-gap")
def _(root: Path) -> None:
    shutil.copy(CASES / "modality/gap.json", root / "meta/modality.json")


@breaks("camera-feature")
def _(root: Path) -> None:
    modality(root, lambda data: data["video"].update(front={}))


@breaks("camera-swapped")
def _(root: Path) -> None:
    shutil.copy(CASES / "modality/cameras_swapped.json", root / "meta/modality.json")


@breaks("annotation-column")
def _(root: Path) -> None:
    modality(root, lambda data: data["annotation"].update({"human.validity": {}}))


@breaks("data-missing")
def _(root: Path) -> None:
    (root / FIRST).unlink()


@breaks("data-unreadable")
def _(root: Path) -> None:
    (root / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 130\n")


@breaks("data-unlisted")
def _(root: Path) -> None:
    shutil.copy(root / FIRST, (root / FIRST).with_name("episode_000003.parquet"))


@breaks("column-missing")
def _(root: Path) -> None:
    column(root, "task_index", lambda _: None)


@breaks("column-undeclared")
def _(root: Path) -> None:
    table = pq.read_table(root / FIRST)
    pq.write_table(table.append_column("next.done", pa.array([False] * 30 + [True])), root / FIRST)


@breaks("column-dtype")
def _(root: Path) -> None:
    """What pandas makes of Python lists: float64."""
    column(root, "action", lambda array: pa.array(array.to_pylist(), pa.list_(pa.float64())))


@breaks("list-cells")
def _(root: Path) -> None:
    column(
        root,
        "action",
        lambda array: pa.array([[[number] for number in cell] for cell in array.to_pylist()], pa.list_(pa.list_(pa.float32()))),
    )


@breaks("scalar-cells")
def _(root: Path) -> None:
    column(root, "action", lambda array: pa.array(np.array(array.flatten()).reshape(-1, 7)[:, 0]))


@breaks("cell-width")
def _(root: Path) -> None:
    column(
        root,
        "action",
        lambda array: pa.array([cell[: 6 if row == 4 else 7] for row, cell in enumerate(array.to_pylist())], pa.list_(pa.float32())),
    )


@breaks("not-finite")
def _(root: Path) -> None:
    numbers(root, "action", lambda values: values.__setitem__((3, 2), np.nan))


@breaks("frame-index")
def _(root: Path) -> None:
    numbers(root, "frame_index", lambda values: values.__setitem__(7, 8))


@breaks("episode-index")
def _(root: Path) -> None:
    numbers(root, "episode_index", lambda values: values.fill(1))


@breaks("global-index")
def _(root: Path) -> None:
    numbers(root, "index", lambda values: np.subtract(values, values[0], out=values), "data/chunk-000/episode_000001.parquet")


@breaks("task-index")
def _(root: Path) -> None:
    numbers(root, "task_index", lambda values: values.__setitem__(0, 5))


@breaks("timestamps")
def _(root: Path) -> None:
    """On the clock of the whole dataset instead of the episode's own."""
    numbers(root, "timestamp", lambda values: np.add(values, np.float32(31 / 20), out=values), "data/chunk-000/episode_000001.parquet")
    write_stats(open_dataset(root))


@breaks("constant-dimension")
def _(root: Path) -> None:
    for episode in range(3):
        numbers(root, "action", lambda values: values[:, 5].fill(0.25), f"data/chunk-000/episode_{episode:06d}.parquet")
    write_stats(open_dataset(root))


@breaks("stats-feature")
def _(root: Path) -> None:
    stats(root, lambda data: data.pop("timestamp"))


@breaks("stats-field")
def _(root: Path) -> None:
    stats(root, lambda data: data["action"].pop("q99"))


@breaks("stats-extra-field")
def _(root: Path) -> None:
    stats(root, lambda data: data["action"].update(count=[74]))


@breaks("stats-width")
def _(root: Path) -> None:
    stats(root, lambda data: data["action"].update(mean=data["action"]["mean"][:1]))


@breaks("stats-not-finite")
def _(root: Path) -> None:
    stats(root, lambda data: data["action"]["std"].__setitem__(0, float("nan")))


@breaks("stats-unused")
def _(root: Path) -> None:
    stats(root, lambda data: data.update(frame_index=data["timestamp"]))


@breaks("stats-disagree")
def _(root: Path) -> None:
    """The statistics of the first two episodes: somebody added one and forgot them."""
    stats(root, lambda data: data["observation.state"]["q99"].__setitem__(1, data["observation.state"]["q99"][1] - 0.01))


@breaks("stats-fingerprint")
def _(root: Path) -> None:
    features = open_dataset(root).features
    prints = {name: fingerprint(name, features[name]) for name in ("observation.state", "action", "timestamp")}
    stats(root, lambda data: data.update(__fingerprints__={**prints, "action": prints["timestamp"]}))


@breaks("relative-stats")
def _(root: Path) -> None:
    fields = {field: [[0.0]] * 16 for field in ("mean", "std", "min", "max", "q01", "q99")}
    (root / "meta/relative_stats.json").write_text(
        json.dumps({"x": fields, "y": {**fields, "q99": [[0.0, 1.0]] * 16}, "__fingerprints__": {}})
    )


def film(path: Path, frames: int, size: int = 32, fps: float = 20.0) -> None:
    write_videos({"it": path}, ({"it": np.full((size, size, 3), 9 * (n % 20), np.uint8)} for n in range(frames)), fps)


@breaks("video-missing")
def _(root: Path) -> None:
    (root / FILM).unlink()


@breaks("video-unreadable")
def _(root: Path) -> None:
    (root / FILM).write_bytes((root / FILM).read_bytes()[:-60])


@breaks("video-frames")
def _(root: Path) -> None:
    film(root / FILM, 30)


@breaks("video-size")
def _(root: Path) -> None:
    film(root / FILM, 31, size=48)


@breaks("video-rate")
def _(root: Path) -> None:
    film(root / FILM, 31, fps=30)


@breaks("policy-group")
def _(root: Path) -> None:
    modality(root, lambda data: data["action"].update(roll_velocity=data["action"].pop("roll")))


@breaks("policy-camera")
def _(root: Path) -> None:
    shutil.copy(CASES / "modality/cameras_renamed.json", root / "meta/modality.json")
    modality(root, lambda data: data.update(annotation={"human.action.task_description": {"original_key": "task_index"}}))


@breaks("policy-language")
def _(root: Path) -> None:
    modality(root, lambda data: data.update(annotation={"human.task": {"original_key": "task_index"}}))


@breaks("policy-width")
def _(root: Path) -> None:
    modality(root, lambda data: data["state"].update(gripper={"start": 6, "end": 7}, finger={"start": 7, "end": 8}))


@breaks("policy-scale")
def _(root: Path) -> None:
    """The environment's gripper, -1…1, where the policy has 0…1."""
    for episode in range(3):
        numbers(
            root, "action", lambda values: np.copyto(values[:, 6], 1 - 2 * values[:, 6]), f"data/chunk-000/episode_{episode:06d}.parquet"
        )
    write_stats(open_dataset(root))


@breaks("policy-range")
def _(root: Path) -> None:
    """One state dimension beyond the bounds by less than their range."""
    for episode in range(3):
        numbers(
            root,
            "observation.state",
            lambda values: np.add(values[:, 0], 2, out=values[:, 0]),
            f"data/chunk-000/episode_{episode:06d}.parquet",
        )
    write_stats(open_dataset(root))


@breaks("policy-suite")
def _(root: Path) -> None:
    lines(root, "meta/episodes.jsonl", lambda all_: all_[1]["source"].update(task="stack@v1/0"))


def found(root: Path, rule: str = "policy-video") -> list[Finding]:
    """The findings. Videos are decoded where the rule is about them; a policy is asked likewise, to which a gap is a fault of its own."""
    return list(check(root, needs=NEEDS if "policy" in rule else None, videos="video" in rule))


def test_every_rule_has_a_mutation_and_every_mutation_a_rule() -> None:
    assert set(MUTATIONS) == set(RULES)


def test_a_sound_dataset_has_no_findings(dataset: Path) -> None:
    assert found(dataset) == []


@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_fault_is_found_by_its_rule_and_by_no_other(rule: str, dataset: Path) -> None:
    MUTATIONS[rule](dataset)
    findings = found(dataset, rule)
    assert {finding.rule for finding in findings} == {rule}, [str(finding) for finding in findings]
    assert all(finding.severity == RULES[rule] for finding in findings)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("jsonl-blank-line", "error: meta/tasks.jsonl:2: 1 empty line(s), this the first; leave them out [jsonl-blank-line]"),
        (
            "not-finite",
            "error: data/chunk-000/episode_000000.parquet:3: action[2] is not a finite number in 1 row(s), this the first [not-finite]",
        ),
        (
            "slice-overrun",
            "error: meta/modality.json: action.gripper is 6:8, but action is 7 wide; the loader would cut it to 6:7 [slice-overrun]",
        ),
        ("stats-width", "error: meta/stats.json: action.mean is a list of 1; it wants a list of 7 numbers [stats-width]"),
        (
            "video-frames",
            "error: videos/chunk-000/observation.images.image/episode_000000.mp4: has 30 frames; episode 0 has 31 rows [video-frames]",
        ),
    ],
)
def test_a_finding_is_one_line_that_says_what_where_and_which_rule(rule: str, sentence: str, dataset: Path) -> None:
    MUTATIONS[rule](dataset)
    assert [str(finding) for finding in found(dataset, rule)] == [sentence]


def test_what_the_loader_tolerates_is_no_finding(dataset: Path) -> None:
    modality(dataset, lambda data: data["video"].update(image={}))  # means observation.images.image
    info(dataset, lambda data: data.update(mask_path="masks/{episode_index:06d}.npz"))
    (dataset / "meta/initial_actions.npz").write_bytes(b"nobody opens this")
    column(dataset, "action", lambda array: array.cast(pa.list_(pa.float32())))  # a list of seven is an array to the loader
    assert found(dataset) == []


def test_a_folder_that_is_none_is_refused_and_not_checked(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no such folder"):
        list(check(tmp_path / "nowhere"))


def test_an_empty_folder_is_one_finding(tmp_path: Path) -> None:
    assert [finding.rule for finding in check(tmp_path)] == ["file-missing"]


@pytest.mark.parametrize(
    "template", ["/etc/{episode_index}", "{episode_index.__class__}", "{0}{episode_index}", "data/{episode_index!r}", "all.parquet"]
)
def test_a_path_template_names_an_episode_inside_the_dataset_or_is_refused(template: str, dataset: Path) -> None:
    info(dataset, lambda data: data.update(data_path=template))
    assert [finding.rule for finding in found(dataset, "")] == ["path-template"]


def test_a_parquet_file_that_claims_too_much_is_not_decoded(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_eval.results.lerobot_rows.ROWS_LIMIT", 30)
    findings = found(dataset, "")
    assert [(finding.rule, finding.file) for finding in findings] == [("data-unreadable", FIRST)]
    assert "claims 31 rows" in findings[0].text


def test_statistics_are_not_judged_by_half_the_rows(dataset: Path) -> None:
    (dataset / FIRST).unlink()
    assert [finding.rule for finding in found(dataset, "")] == ["data-missing"]


def test_numbers_no_machine_can_hold_are_findings_and_not_crashes(dataset: Path) -> None:
    lines(dataset, "meta/episodes.jsonl", lambda all_: all_[2].update(episode_index=10**30))
    lines(dataset, "meta/tasks.jsonl", lambda all_: all_[1].update(task_index=10**30))
    stats(dataset, lambda data: data["action"]["mean"].__setitem__(0, 10**400))
    modality(dataset, lambda data: data["state"]["gripper"].update(end=10**30))
    assert {"episode-field", "task-field", "stats-not-finite", "slice-overrun"} <= {finding.rule for finding in found(dataset, "")}


def test_two_columns_of_one_name_are_a_finding(dataset: Path) -> None:
    table = pq.read_table(dataset / FIRST)
    pq.write_table(table.append_column("index", table.column("index")), dataset / FIRST)
    (finding,) = found(dataset, "")
    assert (finding.rule, finding.text) == ("data-unreadable", "has two columns 'index'")


def test_a_playlist_named_like_a_video_is_not_followed(dataset: Path) -> None:
    (dataset / FILM).write_text("#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n")
    assert [finding.rule for finding in found(dataset)] == ["video-unreadable"]


@pytest.mark.parametrize("case", sorted(path.name for path in (CASES / "info").iterdir()))
def test_a_layout_is_judged_by_its_paths_and_not_by_its_claim(case: str, dataset: Path) -> None:
    shutil.copy(CASES / "info" / case, dataset / "meta/info.json")
    rules = {finding.rule for finding in check(dataset, videos=False)} - {"info-total", "info-splits", "video-info"}
    wanted = {"v20": set(), "v21": set(), "v21_says_v30": {"version-claim"}, "v30": {"layout-v3"}, "v30_says_v21": {"layout-v3"}}
    assert rules == wanted[case.removesuffix(".json")]


def test_a_v3_layout_is_refused_with_what_converts_it(dataset: Path) -> None:
    MUTATIONS["layout-v3"](dataset)
    (finding,) = found(dataset)
    assert "convert_v3_to_v2.py" in finding.text
    with pytest.raises(BadRequest, match=r"convert_v3_to_v2\.py"):
        open_dataset(dataset)


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("good", None), ("without_q99", "stats-field"), ("with_count", "stats-extra-field"),
        ("with_integer_column", "stats-unused"), ("one_number_for_seven", "stats-width"),
    ],
)  # fmt: skip
def test_the_statistics_of_the_cases_are_refused_by_column_and_field(case: str, rule: str | None, dataset: Path) -> None:
    shutil.copy(CASES / "stats" / f"{case}.json", dataset / "meta/stats.json")
    findings = [finding for finding in check(dataset, videos=False) if finding.rule != "stats-disagree"]  # they are of other rows
    assert {finding.rule for finding in findings} == ({rule} if rule else set())
    assert all(finding.severity == ("warning" if rule == "stats-unused" else "error") for finding in findings)


@pytest.mark.parametrize(
    ("case", "rules"),
    [
        ("good", set()), ("gap", {"slice-gap", "policy-group"}), ("cameras_renamed", {"policy-camera"}),
        ("camera_without_feature", {"camera-feature", "policy-camera"}), ("cameras_swapped", {"camera-swapped"}),
    ],
)  # fmt: skip
def test_the_modalities_of_the_cases_are_judged_with_the_policy_in_mind(case: str, rules: set[str], dataset: Path) -> None:
    shutil.copy(CASES / "modality" / f"{case}.json", dataset / "meta/modality.json")
    assert {finding.rule for finding in found(dataset, "policy")} - {"policy-language"} == rules  # the cases have no annotations
    assert {finding.rule for finding in found(dataset, "")} == {rule for rule in rules if not rule.startswith("policy")}


def test_a_policy_s_missing_camera_says_that_the_loader_pairs_by_position(dataset: Path) -> None:
    MUTATIONS["policy-camera"](dataset)
    assert "pair them by position" in found(dataset, "policy")[0].text


@pytest.mark.parametrize("file", [FIRST, FILM])
def test_a_folder_where_a_file_should_be_is_a_finding(file: str, dataset: Path) -> None:
    (dataset / file).unlink()
    (dataset / file).mkdir()
    assert [(finding.rule, finding.file) for finding in found(dataset)] == [
        ("data-unreadable" if file == FIRST else "video-unreadable", file)
    ]


def test_a_path_that_no_disk_can_hold_is_a_finding(dataset: Path) -> None:
    info(dataset, lambda data: data.update(data_path="data/" + "x" * 5000 + "/{episode_index}", video_path="v" * 300 + VIDEO_FIELDS))
    rules = [finding.rule for finding in found(dataset) if finding.rule != "data-unlisted"]
    assert rules == ["data-missing"] * 3 + ["video-missing"] * 6


@pytest.mark.parametrize("name", ["../../../escaped", "a/b", "..", "nul\0"])
def test_a_camera_s_name_is_no_way_out_of_the_dataset(name: str, dataset: Path) -> None:
    """It becomes a folder's name, in videos/ and, when episodes are added, in a new dataset."""
    info(dataset, lambda data: data["features"].update({name: data["features"]["observation.images.image"]}))
    (finding,) = [finding for finding in found(dataset) if finding.severity == "error"]
    assert (finding.rule, finding.file) == ("info-feature", "meta/info.json")
    with pytest.raises(BadRequest, match="info-feature"):
        open_dataset(dataset)


@pytest.mark.parametrize("shape", [[1 << 19], [1 << 19] * 40, [33, 33]])
def test_cells_of_absurd_width_are_a_finding_before_anything_is_set_aside_for_them(shape: list[int], dataset: Path) -> None:
    info(dataset, lambda data: data["features"].update(big={"dtype": "float32", "shape": shape, "names": None}))
    (finding,) = found(dataset, "")
    assert (finding.rule, "big" in finding.text) == ("info-feature", True)


@pytest.mark.parametrize("shape", [[], [32]])
def test_a_video_has_a_height_and_a_width_or_is_a_finding(shape: list[int], dataset: Path) -> None:
    info(dataset, lambda data: data["features"]["observation.images.image"].update(shape=shape))
    assert "info-feature" in {finding.rule for finding in found(dataset)}


def test_text_columns_are_not_decoded(dataset: Path) -> None:
    """A few kilobytes of dictionary can claim gigabytes of text, and nobody reads it."""
    table = pq.read_table(dataset / FIRST)
    note = pa.array(["x" * 1_000_000] * len(table)).dictionary_encode()
    pq.write_table(table.append_column("note", note), dataset / FIRST, store_schema=False)  # comes back as plain text: 31 MB
    info(dataset, lambda data: data["features"].update(note={"dtype": "string", "shape": [1], "names": None}))
    before = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(before)
    pa.set_memory_pool(counting)
    try:
        assert {finding.rule for finding in found(dataset, "")} == {"column-missing"}  # of the other episodes
    finally:
        pa.set_memory_pool(before)
    assert counting.max_memory() < 10_000_000


def test_a_finding_is_one_line_whatever_the_dataset_calls_its_things(dataset: Path) -> None:
    modality(dataset, lambda data: data["state"].update({"x\n\x1b[31m": {"start": 6, "end": 9}}))
    told = [str(finding) for finding in found(dataset, "")]
    assert any("state.x\\n\\x1b[31m is 6:9" in line for line in told)
    assert all(line.isprintable() for line in told)


def test_the_policy_s_instruction_is_looked_for(dataset: Path) -> None:
    MUTATIONS["policy-language"](dataset)
    (finding,) = found(dataset, "policy")
    assert "'annotation.human.action.task_description'" in finding.text


def test_a_set_without_episodes_is_no_sound_one(dataset: Path) -> None:
    (dataset / "meta/episodes.jsonl").write_text("")
    assert [finding.text for finding in found(dataset, "") if finding.severity == "error"] == ["holds no episode"]
    with pytest.raises(BadRequest, match="holds no episode"):
        open_dataset(dataset)
