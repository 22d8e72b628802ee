"""The plugin without an engine: what it names, what it refuses, and the head's loop beside the torch engine's."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm import ModelRegistry

from domino_core.checkpoint import load_drafter, read_config
from domino_core.decode import RoundShape, draft_block
from domino_core.decode_state import DecodeState
from domino_core.sampling import RowSampling
from domino_core.sampling_params import SamplingParams
from domino_core.target import load_target
from domino_core.vllm import plugin
from domino_core.vllm.refused import Refused
from domino_core.vllm.rollout import Proposals, most_likely, roll_out
from domino_core.vllm.settings import is_ours, read_drafter, setting_problems, tensor_problems
from tests.conftest import ROOT

CASES = [f"draft_shift{shift}_p{prefix}" for shift in (0, 1) for prefix in (0, 1, 2)]


@pytest.fixture(scope="module")
def target(reference_dir):
    return load_target(reference_dir / "target")


def engine_settings(drafter: str, target: str, num_drafts: int, **changes: Any) -> Any:
    """As much of a VllmConfig as is asked of it."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(target)
    speculative = {
        "method": "dflash",
        "num_speculative_tokens": num_drafts,
        "draft_tensor_parallel_size": 1,
        "draft_model_config": SimpleNamespace(model=drafter, hf_config=AutoConfig.from_pretrained(drafter)),
    }
    parallel = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**{**speculative, **changes}),
        model_config=SimpleNamespace(model=target, hf_config=hf_config, hf_text_config=hf_config),
        parallel_config=SimpleNamespace(**parallel),
    )


def test_entry_point_names_register():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"domino": "domino_core.vllm.plugin:register"}
    assert callable(plugin.register)


def test_naming_the_plugin_imports_nothing():
    """Every process of vLLM loads it, also those that will never see a drafter."""
    code = "import sys, domino_core.vllm.plugin; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert told.stdout.strip() == "[]"


@pytest.mark.slow
def test_registering_imports_no_draft_model():
    code = (
        "import sys, vllm; from vllm import ModelRegistry; before = set(sys.modules)\n"
        "from domino_core.vllm.plugin import register; register(); register()\n"
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('packaging')))\n"
        "print({'DominoDraftModel', 'DFlashDominoDraftModel'} <= set(ModelRegistry.get_supported_archs()))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded, known = told.stdout.strip().splitlines()[-2:]
    assert loaded == "['domino_core', 'domino_core.vllm', 'domino_core.vllm.plugin']"
    assert known == "True"


def test_unknown_version_is_refused_where_a_domino_drafter_is_loaded(monkeypatch):
    before = dict(ModelRegistry.models)
    monkeypatch.setattr(ModelRegistry, "models", dict(before))
    monkeypatch.setattr(vllm, "__version__", "0.31.7+cpu")
    plugin.register()
    assert ModelRegistry.models["DominoDraftModel"].load_model_cls() is Refused  # pyright: ignore
    assert ModelRegistry.models["DFlashDraftModel"] is before["DFlashDraftModel"]  # other people's drafters
    with pytest.raises(ValueError, match=r"vLLM 0\.31\.7\+cpu is installed.* 0\.26\.0 and 0\.32\.0 only: install"):
        Refused(vllm_config=None)


@pytest.mark.parametrize(
    ("version", "runner", "message"),
    [
        ("0.26.0", plugin.FIRST, None),
        ("0.26.0", plugin.SECOND, None),
        ("0.32.0+cpu", plugin.FIRST, None),
        ("0.32.0", plugin.SECOND, "set VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_runners(version, runner, message):
    problem = plugin.runner_problem(version, runner)
    assert problem is None if message is None else message in problem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle3"}, '"dflash" is how'),
        ({"num_speculative_tokens": 0}, "hold 1 to"),
        ({"num_speculative_tokens": 99}, "hold 1 to"),
        ({"draft_tensor_parallel_size": 2}, "leave it out"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction"),
    ],
)
def test_settings_that_are_refused(reference_dir, changes, message):
    folder, target = str(reference_dir / "draft_shift1_p1"), str(reference_dir / "target")
    config = read_config(folder)
    assert setting_problems(config, engine_settings(folder, target, config.num_drafts)) == []
    (problem,) = setting_problems(config, engine_settings(folder, target, config.num_drafts, **changes))
    assert message in problem


def test_drafter_of_another_target_is_refused(reference_dir, embedded_target):
    folder = str(reference_dir / "draft_shift1_p1")
    with pytest.raises(ValueError, match=r"does not fit the target: hidden_size is .* in the drafter"):
        read_drafter(engine_settings(folder, str(embedded_target), 1))


def test_drafter_of_a_target_of_the_same_shape_is_refused(reference_dir, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(reference_dir / "draft_shift1_p1", tmp_path / "drafter")
    (folder / "provenance.json").write_text(json.dumps({"target_hash": "0123456789abcdef"}))
    with pytest.raises(ValueError, match="made for a target with hash 0123456789abcdef"):
        read_drafter(engine_settings(str(folder), str(reference_dir / "target"), 1))


def test_which_drafters_named_dflash_are_ours(reference_dir):
    folder, target = str(reference_dir / "draft_shift0_p1"), str(reference_dir / "target")
    settings = engine_settings(folder, target, 1)
    hf_config = settings.speculative_config.draft_model_config.hf_config
    assert is_ours(settings)
    for dflash, ours in (({}, False), ({"shift_label": True}, True), ({"projector_type": "dflash"}, False)):
        hf_config.dflash_config = dflash
        assert is_ours(settings) is ours


def test_tensors_that_do_not_fit_are_named(reference_dir, target):
    from safetensors.torch import load_file

    folder = reference_dir / "draft_shift1_p1"
    config, tensors = read_config(folder), load_file(folder / "model.safetensors")
    assert tensor_problems(config, tensors) == []
    del tensors["fc.weight"]
    tensors["markov.weight"] = tensors["norm.weight"]
    tensors["hidden_norm.weight"] = tensors["norm.weight"][:3]
    missing, unknown, misshapen = tensor_problems(config, tensors)
    assert (missing, unknown) == ("fc.weight is missing", "markov.weight is unknown")
    assert misshapen.startswith("hidden_norm.weight is [3], not [")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_drafts", [1, 2, None])
def test_the_loop_drafts_what_the_torch_engine_drafts(reference_dir, target, case, num_drafts):
    drafter = load_drafter(reference_dir / case, target.embed_VD, target.lm_head_VD)
    num_drafts = num_drafts or drafter.config.num_drafts
    anchors, length = torch.tensor([5, 42, 90]), 7
    state = DecodeState.allocate(target, drafter, 3, 64)
    assert state.draft_cache is not None
    torch.manual_seed(1)
    features = torch.randn(3, length, drafter.config.feature_width)
    drafter.extend_context(state.draft_cache, features, torch.arange(length).expand(3, -1))
    state.anchor_B.copy_(anchors)
    state.length_B.fill_(length)
    sampling = RowSampling.stack([SamplingParams()] * 3, target.device)
    with torch.inference_mode():
        shape = RoundShape(num_rows=3, num_drafts=num_drafts, num_keys=length + num_drafts + 1)
        expected, _ = draft_block(drafter, state, sampling, None, shape)
        z_BQD = drafter.draft_hidden(state.draft_cache, anchors, state.length_B)[:, :num_drafts]
        base_BQV = drafter.base_logits(z_BQD)
        drafts = roll_out(drafter.head, drafter.embed, anchors, z_BQD, base_BQV, most_likely)
    assert torch.equal(drafts, expected)


def test_proposals_are_drawn_from_what_is_kept_of_them():
    torch.manual_seed(0)
    rows, logits_V = 20_000, torch.randn(7)
    temperature_B = torch.full((rows,), 0.7)
    temperature_B[:10] = 0.0
    proposals = Proposals(temperature_B, 1e-5)
    drafts_BT = proposals(logits_V.expand(rows, 2, 7), 0)
    q_BQV = proposals.distributions()
    assert q_BQV.shape == (rows, 2, 7)
    assert torch.allclose(q_BQV[-1, 1], (logits_V / 0.7).softmax(-1))
    assert (drafts_BT[:10] == logits_V.argmax()).all()
    for slot in range(2):
        share_V = torch.bincount(drafts_BT[10:, slot], minlength=7) / (rows - 10)
        assert (share_V - q_BQV[-1, slot]).abs().max() < 4 * (0.25 / rows) ** 0.5


def test_later_proposals_depend_on_the_drafts_before_them(reference_dir, target):
    """q of a corrected slot is that of the head's state after what was really drafted."""
    drafter = load_drafter(reference_dir / "draft_shift1_p1", target.embed_VD, target.lm_head_VD)
    head, num_drafts = drafter.head, drafter.config.num_drafts
    assert head is not None
    torch.manual_seed(2)
    anchor_B = torch.tensor([3, 50])
    z_BQD = torch.randn(2, num_drafts, drafter.config.hidden_size)
    base_BQV = drafter.base_logits(z_BQD)
    proposals = Proposals(torch.ones(2), 1e-5)
    with torch.inference_mode():
        drafts_BQ = roll_out(head, drafter.embed, anchor_B, z_BQD, base_BQV, proposals)
        read_BQ = torch.cat((anchor_B[:, None], drafts_BQ[:, :-1]), dim=1)
        _, final_BQV = drafter.logits(z_BQD, read_BQ)
    assert torch.allclose(proposals.distributions(), final_BQV.softmax(-1), atol=1e-5)


def test_a_block_of_pure_drafts_needs_no_head_steps(reference_dir, target):
    drafter = load_drafter(reference_dir / "draft_shift1_p2", target.embed_VD, target.lm_head_VD)
    z_BQD = torch.randn(2, 2, drafter.config.hidden_size)
    base_BQV = drafter.base_logits(z_BQD)
    assert replace(drafter.config).pure_draft_prefix_len == 2
    drafts_BQ = roll_out(drafter.head, drafter.embed, torch.tensor([1, 2]), z_BQD, base_BQV, most_likely)
    assert torch.equal(drafts_BQ, base_BQV.argmax(-1))
