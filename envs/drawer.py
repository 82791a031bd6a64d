"""Pictures of a compiled MuJoCo model, off screen, and a renderer that is freed before its library is."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import numpy as np

from vla_eval.types import BadRequest, Image

from . import machine


class Drawer:
    """Draws a compiled model off screen, size × size. It moves nothing: it never calls forward.

    Raises VlaEvalError if nothing can draw here.
    """

    def __init__(self, model: Any, size: int, choice: machine.Choice) -> None:
        mujoco = machine.mujoco()
        self._gl = machine.gl_context(choice, size, size)
        self._gl.make_current()
        self.told = machine.told(choice)
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, size)
        model.vis.global_.offheight = max(model.vis.global_.offheight, size)
        self._model, self._size = model, size
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[0] = 0  # collision geometry
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        if not _open_drawers:
            atexit.register(_close_drawers)  # after MuJoCo's own hook was registered, hence before it runs
        _open_drawers.add(self)

    def draw(self, data: Any, name: str) -> Image:
        """[size, size, 3] upright, through the camera of that name. Raises BadRequest, with the names there are."""
        mujoco = machine.mujoco()
        number = mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_CAMERA, name)
        if number < 0:
            known = [self._model.camera(k).name for k in range(self._model.ncam)]
            raise BadRequest(f"this scene has no camera {name!r}; it has {', '.join(known)}")
        camera = mujoco.MjvCamera()
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, number
        self._gl.make_current()
        mujoco.mjv_updateScene(self._model, data, self._option, None, camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene)
        view = mujoco.MjrRect(0, 0, self._size, self._size)
        rows = np.empty((self._size, self._size, 3), np.uint8)
        mujoco.mjr_render(view, self._scene, self._context)
        mujoco.mjr_readPixels(rows, None, view, self._context)
        return rows[::-1].copy()  # OpenGL's first row is the bottom one

    def close(self) -> None:
        """Free the renderer, while its library can still do so."""
        self._gl.make_current()
        self._context.free()
        self._gl.free()
        _open_drawers.discard(self)


_open_drawers: weakref.WeakSet[Drawer] = weakref.WeakSet()


def _close_drawers() -> None:
    """At exit, for environments that nobody closed: their destructors would call into a display that is gone."""
    for drawer in list(_open_drawers):
        drawer.close()
