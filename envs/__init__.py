"""Gymnasium environments; importing this package registers them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gymnasium.envs.registration import register

from vla_eval.types import Check, Play, Probe

register(id="vla_eval/Libero-v0", entry_point="vla_eval.envs.libero:LiberoEnv")
register(id="vla_eval/Toy-v0", entry_point="vla_eval.envs.toy:ToyEnv")


def checks() -> list[Check]:
    """What `vla-eval doctor` should say about the simulator on this machine."""
    from .machine import checks as found

    return found()


def certify(suites: Sequence[str], play: Play) -> Iterator[Probe]:
    """What `vla-eval doctor --certify` measures of LIBERO's suites; of the cheapest that shows all, if none is named."""
    from .certificate import certify as probes

    return probes(suites, play)
