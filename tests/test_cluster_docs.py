"""docs/cluster.md and its manifests: they parse, and name images, commands, options and times that the project has."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer.main
import yaml

from tuner.cli import app
from tuner.engines import ray, share
from tuner.results import claims, database
from tuner.results.rows import LEASE_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CLUSTER = (DOCS / "cluster.md").read_text(encoding="utf-8")
SLURM = DOCS / "ray-slurm.sh"


def dash_tune_options() -> set[str]:
    return {option for param in typer.main.get_command(app).params for option in param.opts}


def assert_is_a_sweep(command: str) -> None:
    words = shlex.split(command)
    assert words[0] == "dash-tune"
    options = {word for word in words if word.startswith("--")}
    assert options
    assert options <= dash_tune_options()


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    text = (DOCS / "ray-kubernetes.yaml").read_text(encoding="utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return dict(loaded["services"])


def pods(manifests: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod specs of the Ray cluster, the head's first."""
    cluster = manifests["RayJob"]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_images_are_those_that_compose_builds_and_runs(
    manifests: dict[str, Any], compose: dict[str, Any]
) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {container["image"] for pod in pods(manifests) for container in pod["containers"]}
    assert images == {compose["tuner"]["image"]} == {f"dash-tuner:{version}"}
    (db,) = manifests["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert db["image"] == compose["db"]["image"]
    assert f"--tag dash-tuner:{version} ." in CLUSTER


def test_the_job_runs_a_sweep_on_ray_and_its_image_has_ray(manifests: dict[str, Any]) -> None:
    entrypoint = manifests["RayJob"]["spec"]["entrypoint"]
    assert_is_a_sweep(entrypoint)
    assert "--engine ray" in entrypoint
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert '[postgres,ray]" "ray[default]"' in dockerfile
    assert " wget " in dockerfile


def test_the_url_names_the_database_that_is_there(manifests: dict[str, Any]) -> None:
    secret = manifests["Secret"]
    url = urlsplit(secret["stringData"]["url"])
    service, db = manifests["Service"], manifests["StatefulSet"]["spec"]
    assert url.hostname == service["metadata"]["name"] == db["serviceName"]
    assert url.port == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"].items() <= db["template"]["metadata"]["labels"].items()
    assert url.password == secret["stringData"]["password"]
    (container,) = db["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert (url.username, url.path) == (env["POSTGRES_USER"], f"/{env['POSTGRES_DB']}")
    everyone = [container, *(one for pod in pods(manifests) for one in pod["containers"])]
    references = [
        one["valueFrom"]["secretKeyRef"]
        for each in everyone
        for one in each["env"]
        if "valueFrom" in one
    ]
    assert len(references) == len(everyone)
    for reference in references:
        assert reference["name"] == secret["metadata"]["name"]
        assert reference["key"] in secret["stringData"]


def test_workers_have_gpus_and_a_cache_that_their_user_can_write(manifests: dict[str, Any]) -> None:
    head, *workers = pods(manifests)
    assert "nvidia.com/gpu" not in str(head)
    (user,) = set(re.findall(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    for pod in workers:
        (container,) = pod["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) >= 1
        assert pod["securityContext"]["fsGroup"] == int(user)
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert env["TRITON_CACHE_DIR"].startswith(mounts["cache"] + "/")


def test_the_times_that_the_page_gives_are_those_of_the_code() -> None:
    assert f"every {LEASE_S / claims.BEATS_A_LEASE:.0f} s a process moves" in CLUSTER
    assert f"it holds {LEASE_S:.0f} s\non" in CLUSTER or f"it holds {LEASE_S:.0f} s on" in CLUSTER
    assert f"nobody has refreshed for **{LEASE_S:.0f} s**" in CLUSTER
    assert f"agent within {ray.LOOK_S:.0f} s" in CLUSTER
    assert f"for up to {share.OUTAGE_S / 60:.0f} minutes" in CLUSTER
    assert f"after {database.SILENT_SECONDS:.0f} s of silence" in CLUSTER


def test_commands_and_files_of_the_page_exist() -> None:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", CLUSTER, re.DOTALL))
    for line in re.findall(
        r"dash-tune [^\n`|]*",
        blocks + "\n" + "\n".join(re.findall(r"`(dash-tune [^`]*)`", CLUSTER)),
    ):
        assert_is_a_sweep(line)
    for target in re.findall(r"\]\(([^)#]+)\)", CLUSTER):
        assert (DOCS / target).exists(), target
    for path in re.findall(r"\b((?:tests|docs|benchmarks)/[\w./-]+\w)", CLUSTER):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)", CLUSTER):
        assert f"\n{target}:" in makefile


# -- Slurm ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def allocation(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of four nodes; srun, ray and dash-tune write down what they were asked."""
    log = tmp_path / "log"
    programs = {
        "srun": f'echo "srun $*" >> {log}',
        "ray": f'echo "ray $*" >> {log}',
        "hostname": "echo node-1",
        "dash-tune": f"trap 'echo term >> {log}; exit 130' TERM\n"
        f'echo "dash-tune $* at $RAY_ADDRESS" >> {log}\n'
        'if [ -n "${LONG:-}" ]; then while :; do sleep 0.05; done; fi\nexit 3',
    }
    for name, body in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "USER": "someone",
        "DASH_DB": "postgresql://db/dash",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_GPUS_PER_NODE": "h200:8",
    }


def test_the_slurm_job_starts_a_head_the_other_nodes_and_one_sweep(
    allocation: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        ["bash", SLURM, "--budget", "90m"], env=allocation, capture_output=True, timeout=30
    )
    assert done.returncode == 3, "the sweep's exit code is the job's"
    lines = (tmp_path / "log").read_text().splitlines()
    head = next(line for line in lines if "--head" in line)
    others = next(line for line in lines if line.startswith("srun") and "--head" not in line)
    common = "ray start --block --num-cpus=64 --num-gpus=8"
    assert head == (
        f"srun --overlap --ntasks-per-node=1 --nodes=1 --nodelist=node-1 {common} --head --port=6379"
    )
    assert others == (
        f"srun --overlap --ntasks-per-node=1 --nodes=3 --exclude=node-1 {common} --address=node-1:6379"
    )
    (sweep,) = [line for line in lines if line.startswith("dash-tune")]
    assert sweep == "dash-tune --gpu auto --engine ray --budget 90m at node-1:6379"
    assert_is_a_sweep(sweep.partition(" at ")[0])


def test_the_time_limit_ends_the_sweep_in_order(allocation: dict[str, str], tmp_path: Path) -> None:
    job = subprocess.Popen(["bash", SLURM], env={**allocation, "LONG": "1"})
    log, deadline = tmp_path / "log", time.monotonic() + 20
    while not (log.exists() and "dash-tune" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # the trap is set right after the sweep's start
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 130
    assert "term" in log.read_text()


def test_the_slurm_job_says_what_it_needs(allocation: dict[str, str]) -> None:
    del allocation["DASH_DB"]
    done = subprocess.run(
        ["bash", SLURM], env=allocation, capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert "set it to postgresql://" in done.stderr


def test_ray_has_the_options_that_the_slurm_job_uses() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed")
    known = {option for param in scripts.start.params for option in param.opts}
    used = set(re.findall(r"--(?:block|head|port|address|num-cpus|num-gpus)\b", SLURM.read_text()))
    assert len(used) == 6
    assert used <= known
