"""jobs.convert: formats change, weights and what they draft do not."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_core import checkpoint, convert
from domino_core.checkpoint import folder_digest, load_drafter, read_config, read_format, read_provenance, save_drafter
from domino_core.convert import convert_drafter
from domino_core.drafter import Drafter
from domino_core.engine import Engine, Request
from domino_core.target import load_target
from jobs.convert import main

PROMPTS = ((8, 42, 227, 149, 23, 50, 94), (250, 7, 7, 1, 90, 12, 33))


@pytest.fixture(scope="module")
def target(reference_dir):
    return load_target(reference_dir / "target")


@pytest.fixture(params=["domino shifted", "domino unshifted", "dflash shifted", "dflash unshifted"])
def source(request, reference_dir, target, tmp_path):
    """A folder that we wrote, in bfloat16, with a provenance."""
    kind, convention = request.param.split()
    torch.manual_seed(5)
    config = replace(read_config(reference_dir / "draft_shift1_p1"), dtype="bfloat16", initializer_range=0.1)
    config = replace(config, shift_label=convention == "shifted", rope_theta=5e5)
    if kind == "dflash":
        config = replace(config, head=False, emb_dim=256, gru_hidden_dim=1024)  # the defaults: the file has neither
    drafter = Drafter(config, target.embed_VD, target.lm_head_VD)
    return save_drafter(drafter, tmp_path / "source", {"target": "a/model", "data_hash": "abc"})


def decode(target, folder):
    drafter = load_drafter(folder, target.embed_VD, target.lm_head_VD, dtype=torch.float32)
    drafter.config.check_fits(target.config)
    engine = Engine(target, drafter, max_rows=2, max_length=64)
    requests = [Request(prompt_ids=prompt, max_tokens=12) for prompt in PROMPTS]
    return [(completion.tokens, completion.acceptance) for completion in engine.generate(requests)]


def test_there_and_back_is_the_same_folder(source, target, tmp_path, capsys):
    main([str(source), str(tmp_path / "speculator"), "--to", "speculators"])
    said = capsys.readouterr().out
    assert "tensors with every bit kept" in said
    assert f"sha256 {folder_digest(source)[:12]}" in said
    main([str(tmp_path / "speculator"), str(tmp_path / "back"), "--to", "published"])
    assert [read_format(tmp_path / name) for name in ("source", "speculator", "back")] == [
        "published",
        "speculators",
        "published",
    ]
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert folder_digest(tmp_path / "back") == folder_digest(source)
    assert read_config(tmp_path / "speculator") == read_config(source)
    there = load_file(tmp_path / "speculator" / "model.safetensors")
    ours = load_file(source / "model.safetensors")
    head = ("prefix_gru.", "embed_proj.")
    renamed = {("logits_correction." if name.startswith(head) else "") + name: tensor for name, tensor in ours.items()}
    assert there.keys() == renamed.keys()
    assert all(
        torch.equal(there[name], tensor) and there[name].dtype == tensor.dtype for name, tensor in renamed.items()
    )
    assert decode(target, tmp_path / "speculator") == decode(target, source)


def test_provenance_says_what_it_came_from(source, reference_dir, tmp_path):
    done = convert_drafter(source, tmp_path / "a", "speculators")
    made = read_provenance(tmp_path / "a")
    assert (made["target"], made["data_hash"]) == ("a/model", "abc")  # what it was, it still is
    assert made["converted"]["source"] == {
        "folder": str(source),
        "format": "published",
        "digest": folder_digest(source),
    }
    assert {"created", "command", "commit", "packages", "format"} <= made["converted"].keys()
    assert done.digest == folder_digest(tmp_path / "a")
    verifier = json.loads((tmp_path / "a" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "a/model", "architectures": []}
    named = str(reference_dir / "target")
    convert_drafter(source, tmp_path / "b", "speculators", named)
    verifier = json.loads((tmp_path / "b" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": named, "architectures": ["Qwen3ForCausalLM"]}


def test_what_speculators_repeats_of_the_target_is_compared_with_it(source, target, reference_dir, tmp_path):
    """A file from elsewhere: no num_target_layers, no provenance, the target's embedding and output matrix inside."""
    folder = tmp_path / "speculator"
    convert_drafter(source, folder, "speculators")
    (folder / "provenance.json").unlink()
    raw = json.loads((folder / "config.json").read_text())
    del raw["num_target_layers"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"num_target_layers.* give --target"):
        convert_drafter(folder, tmp_path / "back", "published")
    weights = load_file(folder / "model.safetensors")
    repeated = {"embed_tokens.weight": target.embed_VD.bfloat16(), "lm_head.weight": target.lm_head_VD.bfloat16()}
    save_file(weights | repeated, folder / "model.safetensors")
    assert decode(target, folder) == decode(target, source)  # it is served as it is
    with pytest.raises(ValueError, match=r"embed_tokens\.weight repeats"):
        convert_drafter(folder, tmp_path / "again", "speculators")
    named = str(reference_dir / "target")
    convert_drafter(folder, tmp_path / "back", "published", named)
    assert folder_digest(tmp_path / "back") == folder_digest(source)
    save_file(weights | repeated | {"lm_head.weight": repeated["lm_head.weight"] * 2}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the target's"):
        convert_drafter(folder, tmp_path / "again", "published", named)
    assert not (tmp_path / "again").exists()


def test_mistakes_are_said_and_nothing_is_written(source, tiny_target_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="exists; name a folder"):
        convert_drafter(source, source, "speculators")
    with pytest.raises(ValueError, match="format 'onnx'"):
        convert_drafter(source, out, "onnx")
    with pytest.raises(ValueError, match="no drafter"):
        convert_drafter(tmp_path / "nothing", out, "published")
    with pytest.raises(ValueError, match="does not fit the target"):
        convert_drafter(source, out, "speculators", str(tiny_target_dir))

    def worked(*args):
        raise AssertionError("work has begun")

    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    monkeypatch.setattr(convert, "read_state", worked)
    for place, said in (
        ("link", "link is a link to what does not exist"),
        ("file", "file exists; name a folder"),
        ("file/out", r"file/out cannot be created: (Not a directory|File exists); name another folder"),
        ("file/a/b", r"file/a/b cannot be created: Not a directory"),
        ("x" * 300, "x cannot be created: File name too long"),
    ):
        with pytest.raises(ValueError, match=said):
            convert_drafter(source, tmp_path / place, "speculators")
    monkeypatch.undo()
    (tmp_path / "link").unlink()
    (tmp_path / "file").unlink()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_drafter(source, out, "speculators")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
