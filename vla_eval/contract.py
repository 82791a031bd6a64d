"""What an environment offers against what a policy needs, compared before the first step."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import gymnasium

from .types import BadRequest, ContractMismatch, Interface, Task

Env = gymnasium.Env[Any, Any]


def check_contract(policy: str, needs: Interface, task: str, offers: Interface) -> None:
    """Raise ContractMismatch unless the environment offers everything the policy needs, under the same meaning.

    More cameras and more state than needed are fine; actions must be the same, one by one. A policy that does not care about the rate needs
    `control_hz` 0.
    """
    for camera, size in needs.cameras.items():
        if (offered := offers.cameras.get(camera)) is None:
            raise ContractMismatch(
                f"{policy} needs camera {camera!r} {tuple(size)}; {task} offers {_told(offers.cameras)}. "
                "Choose another suite, or map the camera in the policy's processor."
            )
        if tuple(offered) != tuple(size):
            raise ContractMismatch(
                f"{policy} needs camera {camera!r} at {tuple(size)}; {task} draws it at {tuple(offered)}. "
                "Choose a protocol with that size, or resize in the policy's processor and say so in its `needs`."
            )
    for key, meaning in needs.state.items():
        if (said := offers.state.get(key)) is None:
            raise ContractMismatch(
                f"{policy} needs state {key!r} ({meaning}); {task} offers {_told(offers.state)}. "
                "Choose another suite, or take the state from what is offered."
            )
        if said != meaning:
            raise ContractMismatch(
                f"{policy} takes state {key!r} as {meaning}; {task} gives {said}. Convert it in the policy and say so in `needs`."
            )
    if list(needs.action) != list(offers.action):
        raise ContractMismatch(
            f"{policy} and {task} do not mean the same actions: {_first_difference(needs, offers)}. Adapt the policy's output."
        )
    if needs.control_hz and needs.control_hz != offers.control_hz:
        raise ContractMismatch(
            f"{policy} acts at {needs.control_hz:g} Hz; {task} takes actions at {offers.control_hz:g} Hz. Choose a suite at that rate."
        )
    if needs.privileged and not offers.privileged:
        raise ContractMismatch(f"{policy} needs the simulator's truth; {task} has no `privileged()`. Choose a suite that offers it.")


def open_env(task: Task) -> Env:
    """The task's environment, from the module that its name gives. Raises BadRequest if there is no such environment."""
    module, _, name = task.env.rpartition(":")
    try:
        if module:
            import_module(module)
    except ImportError as error:
        raise BadRequest(f"{task.id}: its environment module {module!r} cannot be imported ({error}); install what it needs") from error
    try:
        return gymnasium.make(name, disable_env_checker=True, **task.env_kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise BadRequest(f"{task.id}: no environment {name!r} after importing {module or 'nothing'!r} ({error})") from error


def offers(env: Env, task: Task) -> Interface:
    """What the environment says it offers. Raises ContractMismatch if it says nothing."""
    interface = env.unwrapped.metadata.get("interface")
    if not isinstance(interface, Interface):
        raise ContractMismatch(f"{task.env}: metadata['interface'] is no vla_eval.Interface; say there what the environment offers")
    return replace(interface, privileged=hasattr(env.unwrapped, "privileged"))


def _told(offered: object) -> str:
    return ", ".join(sorted(offered)) if offered else "none"  # type: ignore[call-overload]


def _first_difference(needs: Interface, offers: Interface) -> str:
    if len(needs.action) != len(offers.action):
        return f"{len(needs.action)} numbers against {len(offers.action)}"
    index = next(i for i, (a, b) in enumerate(zip(needs.action, offers.action, strict=True)) if a != b)
    return f"number {index} is {needs.action[index]} against {offers.action[index]}"
