"""What is shipped: one package, with the folders that links stand for in it."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import paxkv

ROOT = Path(__file__).parents[1]
SHIPPED = ("paxkv", "models", "pallas_kernels", "LICENSE", "README.md", "pyproject.toml")


def _build(folder: Path, kind: str) -> Path:
    """Builds as an installer would, without what the tree's own environment adds."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (archive,) = (folder / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel made of the source archive made of a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, tree / name)
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(_build(tree, "sdist")) as archive:
        archive.extractall(unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    return zipfile.ZipFile(_build(folder, "wheel"))


def _modules(folder: str) -> set[str]:
    return {f"paxkv/{folder}/{file.name}" for file in (ROOT / folder).glob("*.py")}


def test_wheel_has_one_package(wheel: zipfile.ZipFile):
    top_level = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"paxkv"}


def test_wheel_has_every_module_once(wheel: zipfile.ZipFile):
    names = [name for name in wheel.namelist() if name.endswith(".py")]
    folders = ("paxkv", "paxkv/diagnose")
    own = {f"{folder}/{file.name}" for folder in folders for file in (ROOT / folder).glob("*.py")}
    assert sorted(names) == sorted(own | _modules("models") | _modules("pallas_kernels"))


def test_wheel_has_licence_types_and_command(wheel: zipfile.ZipFile):
    names = {name.partition(".dist-info/")[2] or name for name in wheel.namelist()}
    assert {"licenses/LICENSE", "entry_points.txt", "paxkv/py.typed"} <= names


def test_version_is_that_of_the_project():
    command = [Path(sys.executable).with_name("paxkv"), "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert importlib.metadata.version("paxkv") == paxkv.__version__
    assert paxkv.__version__ in result.stdout
