"""Gymnasium environments; importing this package registers them."""

from __future__ import annotations

from gymnasium.envs.registration import register

from vla_eval.types import Check

register(id="vla_eval/Libero-v0", entry_point="vla_eval.envs.libero:LiberoEnv")
register(id="vla_eval/Toy-v0", entry_point="vla_eval.envs.toy:ToyEnv")


def checks() -> list[Check]:
    """What `vla-eval doctor` should say about the simulator on this machine."""
    from .machine import checks as found

    return found()
