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

from forerun import __version__
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


def test_images_are_of_this_version() -> None:
    found = [
        tag
        for path in KUBERNETES.rglob("*.yaml")
        for tag in re.findall(r"(?:newTag: |/forerun:)(\S+)", path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == [f"{__version__}-cpu", *[f"{__version__}-cuda"] * 2]


def test_the_pool_of_llm_d_has_the_pods_and_their_port() -> None:
    def objects(path: str) -> dict[str, Any]:
        text = (KUBERNETES / path).read_text(encoding="utf-8")
        return {each["kind"]: each for each in yaml.safe_load_all(text)}

    made, pods = objects("llm-d.yaml"), objects("base/deployment.yaml")["Deployment"]
    pool = made["InferencePool"]["spec"]
    labels = objects("base/kustomization.yaml")["Kustomization"]["labels"][0]["pairs"]
    assert pool["selector"]["matchLabels"] == labels
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    ports = [{"number": each["containerPort"]} for each in container["ports"]]
    assert pool["targetPorts"] == ports
    (backend,) = made["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (
        "InferencePool",
        made["InferencePool"]["metadata"]["name"],
    )


def test_metrics_that_others_scale_by_exist() -> None:
    """The autoscaler's rule in docs/deploy.md, and what llm-d reads."""
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    pool = (KUBERNETES / "llm-d.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"vllm:\w+", page + pool))
    code = "".join(p.read_text("utf-8") for p in (ROOT / "src/forerun/server").rglob("*.py"))
    assert named == {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    assert all(f'"{name}"' in code for name in named)


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
