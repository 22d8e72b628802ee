"""jobs.deploy before anything is started: what it resolves, and the mistakes that it names."""

import shutil
import socket

import pytest

from jobs.deploy import main, serve_config
from jobs.overrides import apply
from jobs.presets import tiny


@pytest.fixture
def busy_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_default_is_the_champion_of_the_target(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = serve_config(apply(tiny(), [f"root={tmp_path}"]))
    assert config.drafter == "models:/domino-tiny-qwen3@champion"
    assert config.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert config.cache_dir == f"{tmp_path}/drafters"
    assert config.served_name == "tiny-qwen3"


def test_settings_of_the_serve_section_win(tmp_path):
    (tmp_path / "d").mkdir()
    given = [f"serve.drafter={tmp_path}/d", "serve.tracking_uri=http://t", "serve.cache_dir=/c", "serve.port=8123"]
    config = serve_config(apply(tiny(), given))
    expected = (str(tmp_path / "d"), "http://t", "/c", 8123)
    assert (config.drafter, config.tracking_uri, config.cache_dir, config.port) == expected


def test_plan_prints_what_would_be_served_and_starts_nothing(capsys):
    main(["--plan", "serve.port=8123", "serve.drafter=none"])
    printed = capsys.readouterr().out
    assert "port = 8123" in printed
    assert "will serve tiny-qwen3 at http://127.0.0.1:8123/v1" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve.prot=1"], "unknown key 'serve.prot'"),
        (["serve.port=many"], "serve.port=many"),
        (["target=no/such/model", "serve.drafter=none"], "no/such/model"),
        (["serve.drafter=/no/such/drafter"], "no such folder"),
        (["serve.drafter=models:/domino-x"], "NAME@ALIAS"),
        (["serve.drafter=tests"], "tests is no drafter"),
        (["serve.drafter=tests/data/reference/draft_shift1_p1"], "does not fit the target"),
        (["serve.drafter=none", "serve.max_length=99999"], "serve.max_length=99999 exceeds the 2048 positions"),
        (["serve.drafter=none", "--ui", "--ui-port", "99999"], "--ui-port=99999"),
        (["serve.drafter=none", "serve.engine=vllm", "serve.vllm_args=--port 3"], "Ray Serve listens"),
        (["serve.drafter=models:/x@y", "serve.tracking_uri=http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_mistakes_are_named_before_anything_starts(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main([f"root={tmp_path}", *arguments])


def test_drafter_made_for_another_target_is_named(reference_dir, tmp_path):
    folder = shutil.copytree(reference_dir / "draft_shift1_p1", tmp_path / "drafter")
    (folder / "provenance.json").write_text('{"target_hash": "of another"}')
    with pytest.raises(ValueError, match=r"made for a target with hash of another, .* has "):
        main([f"target={reference_dir / 'target'}", f"serve.drafter={folder}", "serve.max_length=64"])


def test_alias_that_was_never_set_is_named(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    MlflowClient(tracking_uri=uri, registry_uri=uri).create_registered_model("domino-tiny-qwen3")
    with pytest.raises(ValueError, match=r"domino-tiny-qwen3@champion does not exist.*jobs\.promote"):
        main([f"root={tmp_path}", f"tracking_uri={uri}"])


@pytest.mark.parametrize("arguments", [["serve.port={}"], ["--ui", "--ui-port", "{}"]])
def test_port_in_use_is_named_with_the_setting(busy_port, arguments):
    filled = [argument.format(busy_port) for argument in arguments]
    with pytest.raises(ValueError, match=rf"port {busy_port} on 127.0.0.1 .*port="):
        main(["serve.drafter=none", *filled])
