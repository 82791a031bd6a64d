"""Writes the names of a TensorRT package's Python API: its classes and enumerations with their members.

Where the full package's libraries cannot be had, its bindings alone are enough: the wheel `tensorrt-cu13-bindings`, and for each of
libnvinfer, libnvinfer_plugin and libnvonnxparser an empty library that exports the entry points the bindings look for.

    LD_LIBRARY_PATH=STUBS PYTHONPATH=SITE python3.12 tools/tensorrt_api.py tensorrt_bindings tests/golden/tensorrt_api.json
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from pathlib import Path


def names(module: str) -> dict[str, object]:
    """The module's version, its public names, and the public members of each class."""
    api = import_module(module)
    public = {name: value for name, value in vars(api).items() if not name.startswith("_") and not inspect.ismodule(value)}
    for name, value in vars(getattr(api, "tensorrt", api)).items():  # the extension module beneath, where there is one
        if not name.startswith("_") and not inspect.ismodule(value):
            public.setdefault(name, value)
    classes = {
        name: sorted(member for member in dir(value) if not member.startswith("_"))
        for name, value in sorted(public.items())
        if inspect.isclass(value)
    }
    return {"version": api.__version__, "names": sorted(set(public) - set(classes)), "classes": classes}


if __name__ == "__main__":
    module, out = sys.argv[1:]
    Path(out).write_text(json.dumps(names(module), indent=0, sort_keys=True) + "\n", encoding="utf-8")
