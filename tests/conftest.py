"""What tests share: compiled LIBERO environments, since compiling one takes two to four seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vla_eval.envs.libero import LiberoEnv

ALIVE = 3  # environments at once: four that have drawn take 4.8 GB


@pytest.fixture(scope="session")
def libero() -> Iterator[Callable[[str, int], LiberoEnv]]:
    """The environment of (suite, task), compiled once and shared: @openpi, pictures on request. Reset it before use.

    The three used last stay alive. To try another cap or another number of settling steps,
    use `monkeypatch.setattr(env, "_max_steps", 5)` instead of compiling the task again.
    """
    from vla_eval.envs.libero import LiberoEnv

    alive: OrderedDict[tuple[str, int], LiberoEnv] = OrderedDict()

    def compiled(suite: str, task: int) -> LiberoEnv:
        if (suite, task) not in alive:
            while len(alive) >= ALIVE:
                alive.popitem(last=False)[1].close()
            alive[suite, task] = LiberoEnv(suite, task, pictures="on_request")
        alive.move_to_end((suite, task))
        return alive[suite, task]

    yield compiled
    for env in alive.values():
        env.close()
