"""What an environment offers against what a policy needs, compared before the first step."""

from __future__ import annotations

from .types import ContractMismatch, Interface


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


def _told(offered: object) -> str:
    return ", ".join(sorted(offered)) if offered else "none"  # type: ignore[call-overload]


def _first_difference(needs: Interface, offers: Interface) -> str:
    if len(needs.action) != len(offers.action):
        return f"{len(needs.action)} numbers against {len(offers.action)}"
    index = next(i for i, (a, b) in enumerate(zip(needs.action, offers.action, strict=True)) if a != b)
    return f"number {index} is {needs.action[index]} against {offers.action[index]}"
