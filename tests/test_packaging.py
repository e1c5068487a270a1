"""What is shipped: the wheel and its data files, the commands that README names, the compose file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dash_kernels", "tuner", "server", "dashboard")
KERNELS_ONLY = {"torch", "triton", "nvidia-ml-py"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as a release would be, but with the backend of this environment: no network."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def shipped_files() -> set[str]:
    """Files of the four packages, but for what running them leaves behind."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".sqlite" not in path.name
    }


def test_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == shipped_files()


@pytest.mark.parametrize(
    "pattern",
    [
        r"dash_kernels/tables/\w+\.json",
        r"dash_kernels/schedules/\w+\.py",
        r"tuner/data/.+",
        r"tuner/results/migrations/versions/\w+\.py",
        r"dashboard/templates/.+\.html",
        r"dashboard/static/.+",
        r"dash_kernels/py\.typed",
    ],
)
def test_wheel_holds_the_data_that_runs_need(wheel: zipfile.ZipFile, pattern: str) -> None:
    assert any(re.fullmatch(pattern, name) for name in wheel.namelist())


def test_wheel_says_its_version_and_commands(wheel: zipfile.ZipFile, project: Any) -> None:
    import dash_kernels

    version = project["project"]["version"]
    assert dash_kernels.__version__ == version
    (entry_points,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    text = wheel.read(entry_points).decode()
    assert "dash-tune = tuner.entry:main" in text
    assert "dash-serve = server.cli:main" in text
    for name in (f"dash-server:{version}", f"dash-tuner:{version}"):
        assert name in (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {req.name: req for req in map(Requirement, lines)}


def test_constraints_are_inside_the_ranges(project: Any) -> None:
    ranges = requirements(project["project"]["dependencies"])
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = requirements([line for line in lines if line and not line.startswith("#")])
    assert set(pins) == {"torch", "triton"}
    for name, pin in pins.items():
        (only,) = pin.specifier
        assert only.operator == "=="
        assert only.version in ranges[name].specifier


def test_triton_is_required_on_linux_only(project: Any) -> None:
    marker = requirements(project["project"]["dependencies"])["triton"].marker
    assert marker is not None
    assert marker.evaluate({"sys_platform": "linux"})
    assert not marker.evaluate({"sys_platform": "darwin"})
    assert not marker.evaluate({"sys_platform": "win32"})


def test_server_group_is_the_dependencies_without_those_of_kernels(project: Any) -> None:
    full = requirements(project["project"]["dependencies"])
    postgres = requirements(project["project"]["optional-dependencies"]["postgres"])
    served = requirements(project["dependency-groups"]["server"])
    expected = {name: req for name, req in full.items() if name not in KERNELS_ONLY} | postgres
    assert {str(req) for req in served.values()} == {str(req) for req in expected.values()}


def readme_commands() -> list[list[str]]:
    """Command lines of README's console blocks, comments cut off."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:bash|console|sh)\n(.*?)```", text, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line.split() for line in lines if line]


def test_readme_is_short_and_its_files_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_make_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z_-]+):", makefile, re.MULTILINE))
    named = {
        word
        for command in readme_commands()
        if command[0] == "make"
        for word in command[1:]
        if "=" not in word
    }
    assert {"run", "test"} <= named
    assert named <= targets


def test_readme_dash_tune_commands_and_options_exist() -> None:
    import typer.main

    from tuner.cli import app

    root = typer.main.get_command(app)
    commands = getattr(root, "commands", {})
    used = [command[1:] for command in readme_commands() if command[0] == "dash-tune"]
    assert used
    for words in used:
        sub = next((word for word in words if not word.startswith("-") and word in commands), None)
        command = commands[sub] if sub else root
        options = {name for param in command.params for name in param.opts}
        assert {word for word in words if word.startswith("--")} <= options, words


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def test_compose_starts_database_and_server_and_the_tuner_only_when_asked(compose: Any) -> None:
    services = compose["services"]
    assert {name for name, service in services.items() if not service.get("profiles")} == {
        "db",
        "server",
    }
    assert services["tuner"]["profiles"] == ["gpu"]
    assert "deploy" not in services["server"], "the server must start without an NVIDIA runtime"
    for name in ("db", "server"):
        assert services[name]["healthcheck"]["test"]


def test_images_do_not_run_as_root(compose: Any) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", dockerfile, re.M | re.S))
    for service in compose["services"].values():
        if "build" in service:
            users = re.findall(r"^USER (\S+)", stages[service["build"]["target"]], re.M)
            assert users
            assert users[-1] not in {"root", "0"}
        else:
            assert service["user"] not in {"root", "0"}


def test_docker_compose_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("no docker client here")
    if subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("this docker client has no compose command")
    for profile in ([], ["--profile", "gpu"]):
        done = subprocess.run(
            [docker, "compose", *profile, "config", "--quiet"],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def make(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
class TestMakeSaysWhatIsWrong:
    """One clear line before the long set-up."""

    def test_port_taken(self) -> None:
        import socket

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            done = make("port-check", f"PORT={port}", f"PYTHON={sys.executable}")
        assert done.returncode != 0
        assert done.stderr.splitlines()[0].startswith(f"Port {port} on 127.0.0.1 is taken")

    def test_old_python(self, tmp_path: Path) -> None:
        old = tmp_path / "python3"
        old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        old.chmod(0o755)
        done = make("python-check", f"PYTHON={old}")
        assert done.returncode != 0
        assert "3.10 to 3.13" in done.stderr.splitlines()[0]

    def test_no_python(self) -> None:
        done = make("python-check", "PYTHON=")
        assert done.returncode != 0
        assert done.stderr.splitlines()[0].startswith("No Python 3.10 to 3.13 found")

    @pytest.mark.parametrize(
        ("setting", "line"),
        [
            ("MAX_HEAD_DIM=big", "MAX_HEAD_DIM is 'big'; it must be a number such as 128"),
            ("KERNEL_DEBUG=2", "KERNEL_DEBUG is '2'; choose 0 or 1"),
        ],
    )
    def test_dash_kernel_setting(self, tmp_path: Path, setting: str, line: str) -> None:
        (tmp_path / ".installed").touch()
        done = make("dash_kernel", f"VENV={tmp_path}", setting)
        assert done.returncode != 0
        assert done.stderr.splitlines()[0] == line
