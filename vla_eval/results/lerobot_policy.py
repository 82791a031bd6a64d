"""A dataset against the policy that shall learn from it: groups, widths, cameras, and its bounds, dimension by dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..types import BadRequest
from .lerobot_meta import ACTION, INFO, MODALITY, STATE, STATS, Dataset, Section, is_int, read_object
from .lerobot_rules import Finding, Steps, settled

POLICY = "action/policy.json"  # where a GR00T bundle says what its robot is
FAMILY = "gr00t_n1d7"
PI_POLICY, PI_FAMILY = "policy.json", "pi05"  # the same of a pi0.5 bundle, which slices no column
_NORMAL_Q99 = 2.326  # deviations from the mean below which 99 % of a normal distribution lies
FAR, BEYOND, LITTLE = 0.75, 0.2, 0.05  # of the policy's own range
STILL = 1e-6  # a dimension with a smaller range never moved in training

Bounds = tuple[tuple[float, float], ...]  # [D] of (q01, q99), or of mean ∓ 2.3 deviations


@dataclass(frozen=True, slots=True)
class NeededGroup:
    """One group that the policy reads or writes."""

    width: int
    bounds: Bounds = ()  # none: the policy has no bounds for it


@dataclass(frozen=True, slots=True)
class PolicyNeeds:
    """What a policy wants from a dataset, by the dataset's names."""

    groups: Mapping[Section, Mapping[str, NeededGroup]]
    cameras: tuple[str, ...]
    horizon: int | None = None
    trained_for: tuple[str, ...] = ()  # suites; none: it does not say
    language: str | None = None  # "annotation.…", where the instruction comes from
    columns: Mapping[str, NeededGroup] = field(default_factory=dict)  # for a policy that reads whole columns


@dataclass(frozen=True, slots=True)
class Compared:
    """One dimension: where the dataset's numbers lie, and where the policy's."""

    name: str  # "action.gripper[0]"
    low: float
    high: float
    policy_low: float
    policy_high: float

    @property
    def beyond(self) -> float:
        """How far the dataset leaves the policy's range, in such ranges."""
        return max(self.policy_low - self.low, self.high - self.policy_high, 0.0) / max(self.policy_high - self.policy_low, STILL)

    @property
    def filled(self) -> float:
        """How much of the policy's range the dataset spans."""
        return (self.high - self.low) / max(self.policy_high - self.policy_low, STILL)


def read_needs(bundle: Path) -> PolicyNeeds:
    """What a bundle's policy.json asks for. Raises BadRequest if there is none, or it is a model's or robot's that is not compared here."""
    if (bundle / PI_POLICY).is_file():
        return _pi05(bundle)
    if not (bundle / POLICY).is_file():
        raise BadRequest(f"{bundle / POLICY} is not there; --against wants the folder of an exported bundle")
    data = settled(read_object(bundle, POLICY), bundle) or {}
    if data.get("model_family") != FAMILY:
        raise BadRequest(
            f"{bundle / POLICY}: model_family is {data.get('model_family')!r}; datasets are compared with {FAMILY!r} bundles only"
        )
    groups: dict[Section, Mapping[str, NeededGroup]] = {}
    sections: tuple[Section, Section] = ("state", "action")
    for section in sections:
        try:
            groups[section] = {str(entry["key"]): _needed(entry) for entry in data[section]["groups"]}
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise BadRequest(f"{bundle / POLICY}: {section}.groups cannot be read ({error!r}); export the checkpoint again") from error
    horizon = data["action"].get("horizon")
    cameras, suites = (tuple(map(str, data.get(key) or ())) for key in ("cameras", "trained_for"))
    language = data.get("language_key")
    return PolicyNeeds(groups, cameras, horizon if is_int(horizon) else None, suites, language if isinstance(language, str) else None)


def compare(dataset: Dataset, needs: PolicyNeeds, stats: Mapping[str, Mapping[str, list[float]]]) -> list[Compared]:
    """Each dimension that both sides have numbers for."""
    found = []
    for section, wanted in needs.groups.items():
        for name, need in wanted.items():
            group = dataset.groups.get(section, {}).get(name)
            said = stats.get(group.column, {}) if group else {}
            if group is None or group.end - group.start != need.width or not {"q01", "q99"} <= said.keys():
                continue
            for i, (low, high) in enumerate(need.bounds):
                place = group.start + i
                found.append(Compared(f"{section}.{name}[{i}]", said["q01"][place], said["q99"][place], low, high))
    for column, need in needs.columns.items():
        said = stats.get(column, {})
        if column not in dataset.columns or dataset.columns[column].width != need.width or not {"q01", "q99"} <= said.keys():
            continue
        for i, (low, high) in enumerate(need.bounds):
            name = "gripper" if column == ACTION and i == need.width - 1 else str(i)
            found.append(Compared(f"{column}[{name}]", said["q01"][i], said["q99"][i], low, high))
    return found


def against(dataset: Dataset, needs: PolicyNeeds, stats: Mapping[str, Mapping[str, list[float]]]) -> Steps[None]:
    """Where the dataset is not what the policy was made for."""
    for section, wanted in needs.groups.items():
        offered, named = dataset.groups.get(section, {}), dataset.named.get(section)
        for name, need in wanted.items():
            group = offered.get(name)
            if named is None or (group is None and name in named):
                continue  # what is wrong there has been said
            if group is None:
                yield Finding(
                    "policy-group",
                    MODALITY,
                    f"{section}.{name} is missing, which the policy needs; there are {', '.join(offered) or 'none'}",
                )
            elif (width := group.end - group.start) != need.width:
                yield Finding(
                    "policy-width", MODALITY, f"{section}.{name} is {group.start}:{group.end}, {width} wide; the policy has {need.width}"
                )
    for column, need in needs.columns.items():
        if column not in dataset.columns or dataset.columns[column].width != need.width:
            told = f"is {dataset.columns[column].width} wide" if column in dataset.columns else "is missing"
            yield Finding("policy-width", INFO, f"{column} {told}; the policy has {need.width}")
    cameras = dataset.named.get("video", frozenset())
    if missing := [name for name in needs.cameras if name not in cameras]:
        told = f"the policy looks through {', '.join(needs.cameras)}; there are {', '.join(sorted(cameras)) or 'none'}"
        by_place = (
            ", and as many as it wants: the loader would pair them by position"
            if needs.groups and len(cameras) == len(needs.cameras)
            else ""
        )
        yield Finding("policy-camera", MODALITY, f"camera {missing[0]!r} is missing: {told}{by_place}")
    annotations = dataset.named.get("annotation", frozenset())
    if dataset.named and needs.language is not None and needs.language.removeprefix("annotation.") not in annotations:
        yield Finding(
            "policy-language",
            MODALITY,
            f"the policy takes its instruction from {needs.language!r}; there are {', '.join(sorted(annotations)) or 'no annotations'}",
        )
    for one in compare(dataset, needs, stats):
        told = f"{one.name} runs {one.low:.4g}…{one.high:.4g} (q01…q99), the policy's bounds are {one.policy_low:.4g}…{one.policy_high:.4g}"
        moves = one.policy_high - one.policy_low > STILL
        if moves and (one.beyond > FAR or _half_gripper(one)):
            yield Finding("policy-scale", STATS, f"{told}{_reason(one)}")
        elif one.beyond > BEYOND or (moves and one.filled < LITTLE):
            yield Finding("policy-range", STATS, told)
    suites = {str(record.extra["source"].get("task", "")).partition("@")[0] for record in dataset.episodes if _has_source(record.extra)}
    if needs.trained_for and (strange := sorted(suites - set(needs.trained_for))):
        yield Finding(
            "policy-suite", INFO, f"episodes are of {', '.join(strange)}; the policy was trained for {', '.join(needs.trained_for)}"
        )


def _has_source(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("source"), dict)


def _reason(one: Compared) -> str:
    if 40 < one.filled < 80:
        return "; 57 times as far: degrees against radians?"
    if one.low < -0.9 and one.high > 0.9 and one.policy_low >= -0.1 and one.policy_high <= 1.1:
        return "; -1…1 against 0…1: the environment's gripper against the policy's?"
    if _half_gripper(one):
        return "; 0…1 against -1…1: another gripper than the policy's?"
    return ""


def _half_gripper(one: Compared) -> bool:
    """A gripper of 0…1 where the policy has -1…1 lies inside its bounds, and means something else."""
    is_half = abs(one.low) < 0.02 and abs(one.high - 1) < 0.02
    return "gripper" in one.name and is_half and one.policy_low < -0.9 and one.policy_high > 0.9


def _pi05(bundle: Path) -> PolicyNeeds:
    """What a pi0.5 bundle for LIBERO was trained on: the whole state and action, by the quantiles of its own normalisation."""
    data = settled(read_object(bundle, PI_POLICY), bundle) or {}
    if data.get("model_family") != PI_FAMILY or data.get("adapter") != "libero":
        raise BadRequest(
            f"{bundle / PI_POLICY}: model_family is {data.get('model_family')!r} and adapter {data.get('adapter')!r}; "
            "datasets are compared with GR00T bundles and with pi0.5's for LIBERO"
        )
    found = sorted(bundle.glob("assets/**/norm_stats.json"))
    if len(found) != 1:
        raise BadRequest(f"{bundle / 'assets'} holds {len(found)} norm_stats.json, one is wanted; export the checkpoint again")
    said = settled(read_object(bundle, found[0].relative_to(bundle).as_posix()), bundle) or {}
    try:
        said = said.get("norm_stats", said)
        columns: dict[str, NeededGroup] = {}
        for column, key, section in ((STATE, "state", "state"), (ACTION, "actions", "action")):
            width = int(data[section]["dim"])
            pairs = list(zip(said[key]["q01"], said[key]["q99"], strict=True))[:width]  # the file may be padded to the model's width
            columns[column] = NeededGroup(width, tuple((float(low), float(high)) for low, high in pairs))
        cameras = tuple(str(slot["name"]) for slot in data["cameras"]["slots"] if slot["required"])
        horizon = data["action"]["horizon"]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"{bundle}: policy.json or norm_stats.json cannot be read ({error!r}); export the checkpoint again") from error
    suites = tuple(map(str, data.get("trained_for") or ()))
    return PolicyNeeds({}, cameras, horizon if is_int(horizon) else None, suites, columns=columns)


def _needed(entry: Mapping[str, Any]) -> NeededGroup:
    encoding, width = entry["encoding"], int(entry["dim"])
    if encoding == "bounds":
        pairs = zip(entry["low"], entry["high"], strict=True)
        return NeededGroup(width, tuple((float(low), float(high)) for low, high in pairs))
    if encoding == "mean_std":
        spread = [(float(mean), _NORMAL_Q99 * float(std)) for mean, std in zip(entry["mean"], entry["std"], strict=True)]
        return NeededGroup(width, tuple((mean - far, mean + far) for mean, far in spread))
    return NeededGroup(width)  # sines and cosines have no bounds
