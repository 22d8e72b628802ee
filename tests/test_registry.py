"""The registry: register, gate, promote, roll back; a failed gate names its number and changes no alias."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_core.checkpoint import folder_digest, load_drafter, provenance, save_drafter
from domino_core.config import DrafterConfig
from domino_core.drafter import Drafter
from domino_core.target import load_vocabulary, read_target_config, target_hash
from jobs import promote
from pipelines import gate, registry
from pipelines.evaluate import EvalConfig
from pipelines.gate import GateConfig
from pipelines.measurement import Measurement, Mismatch
from pipelines.registry import CHAMPION, PREVIOUS, find_version
from pipelines.tracking import connect, start_run, tracking_uri
from serve.drafter_cache import DrafterCache
from serve.registry_alias import Alias, look_up


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def client(root):
    return connect(tracking_uri(f"sqlite:///{root}/mlflow.db", root))


@pytest.fixture(scope="module")
def target(embedded_target) -> str:
    return str(embedded_target)


@pytest.fixture(scope="module")
def prompt_file(root):
    path = root / "heldout.jsonl"
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"def f{i}(x):"}]} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drafter_folder(root, target: str, seed: int, **provenance_fields):
    """A random drafter of the target's shape as an exported folder."""
    shape = read_target_config(target)
    config = DrafterConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_target_layers=shape.num_hidden_layers,
        target_layer_ids=(1, 6), mask_token_id=shape.vocab_size - 1, block_size=4, emb_dim=8, gru_hidden_dim=16,
    )  # fmt: skip
    torch.manual_seed(seed)
    drafter = Drafter(config, *load_vocabulary(target))
    fields = {"target_hash": target_hash(target), "data_hash": "d" * 16} | provenance_fields
    return save_drafter(drafter, root / f"drafter-{seed}", provenance(**fields))


EVALUATE = EvalConfig(num_prompts=2, max_tokens=12, repeats=1, device="cpu", temperature=0.7)
LENIENT = GateConfig(min_tau=1.0, min_speedup=0.0, margin=0.9)


def aliases(client, name) -> dict[str, str]:
    return {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}


def test_life_of_three_versions(client, root, target, prompt_file):
    name = registry.registered_name(target)
    first = registry.register(client, drafter_folder(root, target, 1), target, root)
    assert registry.register(client, root / "drafter-1", target, root) == first
    assert aliases(client, name) == {}  # nobody is to serve it before its gate
    version = find_version(client, name, version=first)
    assert str(version.source).startswith("models:/m-")
    assert version.tags["target_hash"] == target_hash(target)
    assert version.tags["target_layer_ids"] == "1,6"
    assert version.tags["data_hash"] == "d" * 16
    with registry.fetched(client, version) as folder:
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "provenance.json"}
        load_drafter(folder, *load_vocabulary(target))

    # Nothing is champion yet: absolute limits count. Each number that fails is named, and no alias moves.
    strict = GateConfig(min_tau=4.9, min_speedup=50.0)
    result = gate.examine(client, version, target, prompt_file, EVALUATE, strict)
    assert not result.passed
    assert [failure.split()[0] for failure in result.failures] == ["tau", "speedup"]
    assert "gate.min_tau 4.900" in result.failures[0]
    assert result.measurement is not None
    gate.record(client, version, result, "heldout")
    assert aliases(client, name) == {}
    tags = find_version(client, name, version=first).tags
    assert tags["gate"].startswith("failed: tau")
    assert tags["greedy_identical"] == "true"
    assert float(tags["tau.heldout"]) == pytest.approx(result.measurement.tau, abs=1e-3)

    result = gate.examine(client, version, target, prompt_file, EVALUATE, LENIENT)
    assert result.passed
    assert result.champion_tau is None
    assert result.measurement is not None
    assert result.measurement.greedy_identical is True  # greedy whatever the configuration samples
    gate.record(client, version, result, "heldout")
    registry.promote(client, version)
    assert aliases(client, name) == {CHAMPION: first}
    assert find_version(client, name, version=first).tags["gate"] == "passed"

    # The second and third are compared with the champion of their time.
    second = registry.register(client, drafter_folder(root, target, 2), target, root)
    version = find_version(client, name, version=second)
    result = gate.examine(client, version, target, prompt_file, EVALUATE, LENIENT)
    assert result.champion_tau is not None
    registry.promote(client, version)
    assert aliases(client, name) == {CHAMPION: second, PREVIOUS: first}
    third = registry.register(client, drafter_folder(root, target, 3), target, root)
    registry.promote(client, find_version(client, name, version=third))
    assert aliases(client, name) == {CHAMPION: third, PREVIOUS: second}

    # Two rollbacks go back twice, a third one has nowhere to go and changes nothing.
    assert registry.rollback(client, name) == (third, second)
    assert aliases(client, name) == {CHAMPION: second, PREVIOUS: first}
    assert "rolled_back" in find_version(client, name, version=third).tags
    assert registry.rollback(client, name) == (second, first)
    assert aliases(client, name) == {CHAMPION: first}
    with pytest.raises(ValueError, match=r"has no alias 'previous'.*its versions are 1, 2, 3"):
        registry.rollback(client, name)
    assert aliases(client, name) == {CHAMPION: first}

    # Nor has a second one, where the version that it would go to has been deleted.
    for number in (second, third):
        registry.promote(client, find_version(client, name, version=number))
    client.delete_model_version(name, first)
    assert registry.rollback(client, name) == (third, second)
    assert aliases(client, name) == {CHAMPION: second}


@pytest.fixture
def own_store(root, tmp_path):
    yield connect(f"sqlite:///{tmp_path}/mlflow.db")
    connect(f"sqlite:///{root}/mlflow.db")  # the process-wide store of the other tests


def test_odd_orders_of_promotions_and_rollbacks(own_store, target, tmp_path, capsys):
    client, name = own_store, registry.registered_name(target)
    numbers = [registry.register(client, drafter_folder(tmp_path, target, seed), target, tmp_path) for seed in (1, 2)]
    assert numbers == ["1", "2"]

    def champions(*order: str) -> None:
        for number in order:
            registry.promote(client, find_version(client, name, version=number))

    # The champion was taken back by hand: nothing is taken back once more, and the good version is not marked.
    champions("1", "2")
    client.set_registered_model_alias(name, CHAMPION, "1")
    store = f"tracking_uri=sqlite:///{tmp_path}/mlflow.db"  # whatever other tests left in the environment
    assert promote.main(["--rollback", store, f"root={tmp_path}", f"target={target}"]) == 0
    assert "champion is version 1 already" in capsys.readouterr().out
    assert aliases(client, name) == {CHAMPION: "1"}
    assert registry.ROLLED_BACK not in find_version(client, name, version="1").tags

    # A version that was champion twice: rollbacks end, and do not go forth to what they have taken back.
    champions("2", "1")
    assert registry.rollback(client, name) == ("1", "2")
    assert aliases(client, name) == {CHAMPION: "2"}
    with pytest.raises(ValueError, match="has no alias 'previous'"):
        registry.rollback(client, name)
    champions("1")
    assert registry.ROLLED_BACK not in find_version(client, name, version="1").tags
    champions("2")
    assert registry.rollback(client, name) == ("2", "1")

    # A rollback that is interrupted after it moved the champion goes one version back, not two.
    third = registry.register(client, drafter_folder(tmp_path, target, 3), target, tmp_path)
    champions("2", third)
    client.set_registered_model_alias(name, CHAMPION, "2")
    assert registry.rollback(client, name) == ("2", "2")
    assert aliases(client, name) == {CHAMPION: "2", PREVIOUS: "1"}


@pytest.mark.slow
def test_the_same_over_http(root, target, prompt_file, tmp_path):
    """A tracking server with proxied artifacts, as several machines share it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    command += ["--artifacts-destination", f"{tmp_path}/artifacts", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        server = subprocess.Popen(
            [*command, "--workers", "1"], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        client = when_up(f"http://127.0.0.1:{port}", tmp_path / "log")
        run_id = start_run(client, "domino", root, "trained", {"train.seed": "1"}, {})
        number = registry.register(client, drafter_folder(root, target, 8), target, root, run_id)
        version = find_version(client, registry.registered_name(target), version=number)
        result = gate.examine(client, version, target, prompt_file, EVALUATE, LENIENT)
        assert result.passed
        assert result.measurement is not None
        gate.record(client, version, result, "heldout")
        registry.promote(client, version)
        champion = find_version(client, version.name, alias=CHAMPION)
        assert champion.version == number
        assert client.get_run(run_id).data.metrics["gate.tau"] == pytest.approx(result.measurement.tau)
        assert list((tmp_path / "artifacts").rglob("model.safetensors"))
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        connect(f"sqlite:///{root}/mlflow.db")  # the process-wide store of the other tests


def when_up(uri: str, log):
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            return connect(uri)
        except ValueError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


def test_another_alias_leaves_the_champion_alone(client, root, target):
    name = registry.registered_name(target)
    number = registry.register(client, drafter_folder(root, target, 4), target, root)
    before = aliases(client, name)
    registry.promote(client, find_version(client, name, version=number), alias="canary")
    after = aliases(client, name)
    assert after.pop("canary") == number
    assert after == before


def test_damaged_artifacts_fail_the_gate(client, root, target, prompt_file):
    number = registry.register(client, drafter_folder(root, target, 5), target, root)
    version = find_version(client, registry.registered_name(target), version=number)
    model = client.get_logged_model(str(version.source).removeprefix("models:/"))
    weights = model.artifact_location.removeprefix("file://") + "/model.safetensors"
    with open(weights, "r+b") as file:
        file.truncate(2000)
    result = gate.examine(client, version, target, prompt_file, EVALUATE, LENIENT)
    assert not result.passed
    assert result.failures[0].startswith("reload:")
    assert "model.safetensors" in result.failures[0]
    gate.record(client, version, result, "heldout")


def test_another_target_is_refused(client, root, target, tiny_target_dir, prompt_file):
    with pytest.raises(ValueError, match="hidden_size is 192"):
        registry.register(client, root / "drafter-1", str(tiny_target_dir), root)
    with pytest.raises(ValueError, match="trained for a target with hash feed"):
        registry.register(client, drafter_folder(root, target, 6, target_hash="feed"), target, root)
    number = registry.register(client, drafter_folder(root, target, 7), target, root)
    name = registry.registered_name(target)
    client.set_model_version_tag(name, number, "target_hash", "feed")
    version = find_version(client, name, version=number)
    result = gate.examine(client, version, target, prompt_file, EVALUATE, LENIENT)
    assert result.failures[0].startswith("target_hash: made for feed")


def test_the_same_files_for_another_target_of_the_same_name_are_another_version(client, root, target, tmp_path):
    other = tmp_path / Path(target).name
    shutil.copytree(target, other, ignore=shutil.ignore_patterns("prompts"))
    weights = other / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights)
    assert registry.registered_name(str(other)) == registry.registered_name(target)
    first = registry.register(client, drafter_folder(root, target, 17), target, root)
    folder = root / "drafter-17"
    (folder / "provenance.json").unlink()  # of a drafter from elsewhere, which does not say what it was made for
    second = registry.register(client, folder, str(other), root)
    assert second != first
    assert registry.register(client, folder, str(other), root) == second
    assert registry.register(client, folder, target, root) == first


def test_missing_versions_are_named(client, target):
    with pytest.raises(ValueError, match=r"domino-nothing has no alias 'champion'; it has no"):
        find_version(client, "domino-nothing", alias=CHAMPION)
    with pytest.raises(ValueError, match="no version 99"):
        find_version(client, registry.registered_name(target), version="99")


def measurement(**changes) -> Measurement:
    values = {
        "tau": 2.0, "acceptance": {}, "acceptance_by_position": [], "plain_tokens_per_s": 1.0, "tokens_per_s": 2.0,
        "speedup": 2.0, "identical": True, "mismatches": [], "num_prompts": 4, "num_tokens": 1, "plain_seconds": [],
        "seconds": [], "dtype": "float32", "device": "cpu", "settings": {"temperature": 0.0},
    }  # fmt: skip
    return Measurement(**(values | changes))


def test_judgement_against_the_champion():
    limits = GateConfig(min_tau=5.0, min_speedup=9.0, margin=0.05)
    assert gate.judge(measurement(), limits, champion_tau=2.1) == []  # absolute limits do not count
    (failure,) = gate.judge(measurement(), limits, champion_tau=2.2)
    assert failure.startswith("tau 2.000 < 2.090, the champion's 2.200")


@pytest.mark.parametrize(
    ("dtype", "gap", "passes"), [("float32", 0.0, False), ("bfloat16", 0.2, True), ("bfloat16", 3.0, False)]
)
def test_outputs_may_part_at_near_ties_in_bfloat16_only(dtype, gap, passes):
    parted = [Mismatch(prompt=2, position=7, plain=5, speculative=6, gap=gap)]
    failures = gate.judge(
        measurement(identical=False, mismatches=parted, dtype=dtype), GateConfig(max_tie_gap=0.25), None
    )
    assert (failures == []) is passes
    assert passes or "prompt 2 at token 7" in failures[0]


@pytest.mark.parametrize("target", ["Qwen/Qwen3-8B", "/models/Qwen3-8B", "/models/qwen3-8b/"])
def test_name_of_the_registered_model(target):
    assert registry.registered_name(target) == "domino-qwen3-8b"


def test_a_downloaded_version_whose_files_have_changed_is_downloaded_again(client, root, target, tmp_path):
    """What replicas keep on their disk, by the digest that `register` has noted."""
    number = registry.register(client, drafter_folder(root, target, 20), target, root)
    name = registry.registered_name(target)
    registry.promote(client, find_version(client, name, version=number), alias="cached")
    alias = Alias(name=name, alias="cached", tracking_uri=client.tracking_uri)
    cache, version = DrafterCache(tmp_path), look_up(alias)
    folder = cache.fetch(alias, version)
    weights, config = folder / "model.safetensors", folder / "config.json"
    assert folder_digest(folder) == version.digest != ""
    before = weights.stat().st_ino
    assert cache.fetch(alias, version) == folder
    assert weights.stat().st_ino == before  # as it should be, so nothing is downloaded
    for damage in (
        lambda: weights.write_bytes(weights.read_bytes()[:-1]),
        lambda: weights.write_bytes(weights.read_bytes()[:-1] + b"x"),
        weights.unlink,
        config.unlink,
    ):
        damage()
        assert folder_digest(cache.fetch(alias, version)) == version.digest
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
