"""The habits of this repository, as assertions: layout, sizes, import directions, light imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("autopar", "passes", "runtime")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_IMPORT_SECONDS = 0.3
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}

# The only files inside autopar/ that see everything.
ENTRANCES = re.compile(r"^autopar/(api|cli|cli_\w+|commands/\w+|workflow/\w+)\.py$")
# Files directly in autopar/ that hold no type: they name the entrances.
DOORS = {"__init__.py", "__main__.py"}


def sources(folder: str) -> Iterator[Path]:
    """Python files of one folder, without entering the links to its neighbours."""
    for parent, _, files in os.walk(ROOT / folder, followlinks=False):
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(parent) / name


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> set[str]:
    """Modules of ours that the file imports anywhere, also inside functions and `TYPE_CHECKING`."""
    found: set[str] = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} has a relative import"
            found.add(node.module or "")
            # `from autopar import passes` imports a module too.
            if node.module == "autopar":
                found.update(f"autopar.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] in FOLDERS}


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def repository_files() -> list[Path]:
    """Tracked files and those about to be; every file where there is no git (an unpacked sdist)."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return [path for folder in (*FOLDERS, "tests", "examples") for path in sources(folder)]
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_links_lead_to_the_folders_beside(name: str) -> None:
    link = ROOT / "autopar" / name
    assert link.is_symlink(), f"{link} is no link: clone with core.symlinks=true"
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_bare_import_is_refused(name: str) -> None:
    done = python("-c", f"import {name}")
    assert done.returncode != 0
    assert f"autopar.{name}" in done.stderr


def test_every_pass_and_runtime_file_has_its_test() -> None:
    missing = [
        f"{relative(path)} -> {wanted}"
        for folder in ("passes", "runtime")
        for path in sources(folder)
        if path.name != "__init__.py"
        for wanted in [f"tests/{relative(path.parent)}/test_{path.name}"]
        if not (ROOT / wanted).is_file()
    ]
    assert not missing, "\n".join(missing)


def test_files_are_short_enough_to_read() -> None:
    long = {
        relative(path): lines
        for folder in FOLDERS
        for path in sources(folder)
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short_enough_to_read() -> None:
    long = {
        f"{relative(path)}:{node.name}": lines
        for folder in FOLDERS
        for path in sources(folder)
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_names_say_what_a_file_holds() -> None:
    vague = [relative(p) for f in FOLDERS for p in sources(f) if p.name in VAGUE_NAMES]
    assert not vague


def test_passes_and_runtime_never_import_each_other() -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for folder, other in (("passes", "runtime"), ("runtime", "passes"))
        for path in sources(folder)
        for name in sorted(imports(path))
        if under(name, f"autopar.{other}") or name.split(".")[0] != "autopar"
    ]
    assert not wrong, "\n".join(wrong)


def test_data_types_import_nothing_else_of_ours() -> None:
    # Files directly in autopar/ are what all parts speak in: they know each other only.
    types = {
        f"autopar.{path.stem}": path
        for path in (ROOT / "autopar").glob("*.py")
        if path.name not in DOORS and not ENTRANCES.match(relative(path))
    }
    wrong = [
        f"{module} imports {name}"
        for module, path in sorted(types.items())
        for name in sorted(imports(path))
        if not any(under(name, known) for known in types)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_entrances_see_passes_and_runtime() -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for path in sources("autopar")
        if not ENTRANCES.match(relative(path))
        for name in sorted(imports(path))
        if under(name, "autopar.passes") or under(name, "autopar.runtime")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_names_the_machine_it_was_written_on() -> None:
    # Absolute folders of one machine mean nothing in a clone. Spelled so as not to match itself.
    private = re.compile(r"(?<![\w.~])/(?:" + "work" + r"|tmp/v|root" + r")/")
    wrong = [
        f"{relative(path)}:{number}"
        for path in repository_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if private.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def python(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def test_import_is_light() -> None:
    # CPU time, best of three: the wall clock of a shared machine says little.
    program = (
        "import sys, time; start = time.process_time(); import autopar; "
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    seconds = []
    for _ in range(3):
        done = python("-c", program)
        assert done.returncode == 0, done.stderr
        spent, torch_loaded = done.stdout.split()
        assert torch_loaded == "False"
        seconds.append(float(spent))
    assert min(seconds) < MAX_IMPORT_SECONDS


@pytest.mark.skipif(not (ROOT / "autopar/cli.py").exists(), reason="no command line yet")
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"]])
def test_help_does_not_load_torch(arguments: list[str]) -> None:
    done = python("-X", "importtime", "-m", "autopar", *arguments)
    assert done.returncode == 0, done.stderr
    assert "plan" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert not loaded & {"torch", "transformers", "ortools", "sympy"}


@pytest.mark.slow
def test_wheel_holds_code_of_all_folders_and_data(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    # From the sdist, as an installer does it: the links must have become real files on the way.
    program = (
        "import sys; from hatchling.build import build_sdist, build_wheel; "
        "print({'sdist': build_sdist, 'wheel': build_wheel}[sys.argv[1]](sys.argv[2]))"
    )
    done = python("-c", program, "sdist", str(tmp_path), timeout=120)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path, filter="data")
    unpacked = next(path for path in tmp_path.iterdir() if path.is_dir())
    done = subprocess.run(
        [sys.executable, "-c", program, "wheel", str(tmp_path)],
        cwd=unpacked,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = set(wheel.namelist())
    expected = {relative(path) for path in sources("autopar")} | {"autopar/py.typed"}
    for folder in ("passes", "runtime"):
        expected |= {f"autopar/{relative(path)}" for path in sources(folder)}
    expected |= {relative(p) for p in (ROOT / "autopar/data").rglob("*") if p.is_file()}
    assert not expected - held
    assert any(name.startswith("autopar/passes/") for name in held)
    assert any(name.startswith("autopar/runtime/") for name in held)
    assert not {name for name in held if name.startswith(("passes/", "runtime/", "tests/"))}
