"""Domino as a plugin of vLLM (entry point group vllm.general_plugins): names the architecture and nothing more.

vLLM calls `register` in every one of its processes. What it names is imported where a Domino drafter is loaded.
"""

from __future__ import annotations

FIRST, SECOND = "first", "second"  # vLLM's model runners; VLLM_USE_V2_MODEL_RUNNER=0 and 1 choose
TESTED = {"0.26.0": (FIRST, SECOND), "0.32.0": (FIRST,)}
"""Which versions drafting.py was written for, and with which runners."""

# What config.json calls a drafter, and what the method "dflash" makes of that.
OURS = ("DominoDraftModel", "DFlashDominoDraftModel")
SHARED = "DFlashDraftModel"  # released Domino files say this, too; drafting.py tells them apart


def register() -> None:
    """Have vLLM find the draft model; in a version that is not known, one that refuses to load and says why."""
    from vllm import ModelRegistry

    known = version_problem() is None
    found = "domino_core.vllm.drafting:DominoDraft" if known else "domino_core.vllm.refused:Refused"
    for architecture in (*OURS, SHARED) if known else OURS:
        ModelRegistry.register_model(architecture, found)


def version_problem() -> str | None:
    """Why the installed vLLM cannot run a Domino drafter."""
    import vllm

    if base_version(vllm.__version__) in TESTED:
        return None
    return (
        f"vLLM {vllm.__version__} is installed; Domino drafters use its private API and run in {' and '.join(TESTED)} "
        "only: install one of these (pip install vllm==0.32.0)"
    )


def runner_problem(version: str, runner: str) -> str | None:
    """Why this runner of a known version cannot run a Domino drafter."""
    runners = TESTED[base_version(version)]
    if runner in runners:
        return None
    setting = {FIRST: 0, SECOND: 1}
    return (
        f"vLLM {version} runs Domino drafters with its {' or '.join(runners)} model runner, not with the {runner}: "
        f"set VLLM_USE_V2_MODEL_RUNNER={setting[runners[0]]}"
    )


def base_version(version: str) -> str:
    """0.32.0 of 0.32.0+cpu."""
    from packaging.version import Version

    return Version(version).base_version
