"""The files under deploy/: flags, ports and names in them exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from forerun.main import build_app

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def known_flags() -> set[str]:
    """The flags of `forerun serve`."""
    app: Any = typer.main.get_command(build_app("serve"))
    serve = app.commands["serve"] if hasattr(app, "commands") else app
    return {flag for each in serve.params for flag in (*each.opts, *each.secondary_opts)}


def files() -> Iterator[Path]:
    return (path for path in DEPLOY.rglob("*") if path.is_file())


def test_flags_are_those_of_the_server() -> None:
    """Of the server in every file; those of other commands stand in lines that name these."""
    others = re.compile(
        r"apt-get|systemctl|/bin/pip|docker |HEALTHCHECK|--interval|COPY|--constraint|--uid"
    )
    found = set()
    for path in files():
        for line in path.read_text(encoding="utf-8").splitlines():
            line = line.partition("forerun:cuda ")[2] if "docker run" in line else line
            if not others.search(line):
                found |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line))
    found -= {"--extra-index-url"}
    assert found >= {"--host", "--port", "--speculative-algorithm", "--model-path", "--log-format"}
    assert found <= known_flags()


def test_compose_mounts_what_is_there() -> None:
    folder = DEPLOY / "compose"
    compose = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
    build = compose["services"]["forerun"]["build"]
    context = (folder / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]).is_file()
    mounts = [m for service in compose["services"].values() for m in service["volumes"]]
    sources = [mount.partition(":")[0] for mount in mounts]
    assert all((folder / s).exists() for s in sources if s.startswith("."))
    assert {s for s in sources if not s.startswith(".")} == set(compose["volumes"])
    targets = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
    assert targets["scrape_configs"][0]["static_configs"] == [{"targets": ["forerun:30000"]}]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_the_objects_of_kubernetes_fit_together(folder: str) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = {each["kind"]: each for each in yaml.safe_load_all(text)}
    deployment = objects["Deployment"]["spec"]["template"]
    container = deployment["spec"]["containers"][0]
    assert (
        objects["Service"]["spec"]["selector"].items() <= deployment["metadata"]["labels"].items()
    )
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": 30000}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"}
    volumes = {each["name"] for each in deployment["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    claims = [v for v in deployment["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert len(claims) == ("PersistentVolumeClaim" in objects)
    if folder == "gpu":
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        assert target["name"] == objects["Deployment"]["metadata"]["name"]
        monitor = objects["PodMonitor"]["spec"]
        assert (
            monitor["selector"]["matchLabels"].items() <= deployment["metadata"]["labels"].items()
        )


def test_the_image_takes_what_it_copies() -> None:
    """.dockerignore leaves out everything else."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
        for name in line.split()
    }
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name.removeprefix("./")).exists() for name in copied)
