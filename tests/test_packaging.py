"""The distribution is whole: packages, links, lock, and a wheel that works without the source."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONAL = {"tensorrt", "tensorrt_rtx", "cuda", "nvmath"}  # of the extras, and of no test here
LINKS = ("envs", "policies", "tasks")


def packages() -> set[str]:
    """Every folder with Python in it, by its import name."""
    folders = {path.parent for top in ("vla_eval", *LINKS) for path in (ROOT / top).rglob("*.py") if "__pycache__" not in path.parts}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    return {name if name.startswith("vla_eval") else f"vla_eval.{name}" for name in names}


def test_every_package_is_listed() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(packages())


@pytest.mark.parametrize("name", LINKS)
def test_the_rooms_are_relative_links_that_resolve(name: str) -> None:
    link = ROOT / "vla_eval" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


def test_every_entry_point_of_ours_names_a_module_that_is_packaged() -> None:
    listed = packages()
    for group in PROJECT["project"]["entry-points"].values():
        for value in group.values():
            module = value.partition(":")[0]
            assert module in listed or module.rpartition(".")[0] in listed, value


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below, at any depth; what they are made of imports nothing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


def test_everything_imported_is_asked_for_by_name() -> None:
    """A package that only comes along with another one may stay away in that one's next version."""
    owners = packages_distributions()
    wanted = [*PROJECT["project"]["dependencies"], *(e for extra in PROJECT["project"]["optional-dependencies"].values() for e in extra)]
    declared = {canonicalize_name(Requirement(entry).name) for entry in wanted}
    files = [path for top in ("vla_eval", *LINKS) for path in (ROOT / top).rglob("*.py")]
    for path in files:
        for node in statements(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [str(node.module)]
            for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"vla_eval"}:
                assert {canonicalize_name(name) for name in owners.get(top, [])} & declared or top in OPTIONAL, f"{path}: {top}"


def lock() -> list[Requirement]:
    lines = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    return [Requirement(line.partition(" --hash")[0]) for line in lines if line and not line.startswith("#")]


def test_the_lock_names_no_index_and_no_machine() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"https?://|file:|--index|--find-links|-f |--trusted", text)
    assert " @ " not in text


def test_everything_in_the_lock_is_pinned_with_a_hash() -> None:
    lines = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    for line in lines:
        if not line.startswith("#"):
            assert re.match(r"[\w.-]+==\S+.* --hash=sha256:[0-9a-f]{64}", line), line[:80]


def test_the_lock_answers_what_pyproject_asks_for() -> None:
    asked = [*PROJECT["project"]["dependencies"], *(entry for group in PROJECT["dependency-groups"].values() for entry in group)]
    pinned = {canonicalize_name(entry.name): next(iter(entry.specifier)).version for entry in lock()}
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name} is missing: make lock"
        assert requirement.specifier.contains(pinned[name], prereleases=True), f"{name}: make lock"


def test_the_commands_that_the_readme_promises_are_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "check", "bench", "matrix", "docs", "clean"} <= targets


def test_the_matrix_plays_every_version_that_is_here_and_says_what_failed_and_what_is_not(tmp_path: Path) -> None:
    here = "{}.{}".format(*sys.version_info)
    (tmp_path / f"python{here}").symlink_to(sys.executable)
    make = tmp_path / "make"  # stands in for the suite
    make.write_text('#!/bin/sh\necho "$@" >> made; echo "FAILED tests/a.py::b"; echo "=== 1 failed, 2 passed in 3.0s ==="; exit 2\n')
    make.chmod(0o755)
    (tmp_path / "tools").mkdir()
    script = shutil.copy(ROOT / "tools" / "matrix.sh", tmp_path / "tools")
    played = subprocess.run(
        [script, "3.99", here],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert played.returncode == 1
    assert played.stdout.splitlines()[-3:] == [
        "3.99  not on this machine: uv python install 3.99, or pyenv install 3.99",
        f"{here}  FAILED in 0 min: 1 failed, 2 passed in 3.0s",
        "      FAILED tests/a.py::b",
    ]
    assert (tmp_path / "made").read_text() == f"--no-print-directory test VENV=.venv-{here} PYTHON=python{here}\n"
    make.write_text('#!/bin/sh\necho "=== 3 passed in 3.0s ==="\n')
    played = subprocess.run(
        [script, here], env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert (played.returncode, played.stdout.splitlines()[-1]) == (0, f"{here}  passed in 0 min: 3 passed in 3.0s")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert "://" in target or (ROOT / target).exists(), target


def build(source: Path, kind: str, out: Path) -> Path:
    """Build with the installed setuptools, as an isolated build without the network would."""
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(out)], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from an sdist made from what git knows; the source is gone by the time anybody uses it."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    for name in (*LINKS, "vla_eval"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    sdist = build(source, "sdist", folder / "dist")
    shutil.rmtree(source)
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's Python 3.11.2 knows none yet, later ones warn without
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    built = build(unpacked, "wheel", folder / "dist")
    shutil.rmtree(unpacked)
    return built


def test_the_wheel_holds_every_file_under_one_name(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        f"{package.replace('.', '/')}/{path.name}"
        for package in packages()
        for path in (ROOT / package.replace(".", "/")).iterdir()
        if path.is_file()
    }
    assert files == wanted


def site_packages() -> list[Path]:
    return [Path(entry) for entry in sys.path if Path(entry).name == "site-packages"]


def test_the_wheel_alone_runs_the_toy_task(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The interpreter behind the virtual environment, its packages by path: then no .pth file brings the checkout back.
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *map(str, site_packages())])}
    command = [str(python), "-m", "vla_eval", "run", "--task", "toy/0", "--policy", "zero", "--trials", "1", "--out", "runs", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["episodes"] == 1
    code = "import vla_eval, vla_eval.envs, vla_eval.policies, vla_eval.tasks as t; print(vla_eval.__file__, t.__file__)"
    where = subprocess.run([str(python), "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert all(Path(path).is_relative_to(site) for path in where.stdout.split())
