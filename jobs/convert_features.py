r"""Convert features between this project, speculators (hs_{i}.safetensors) and SpecForge (.ckpt), or to half the bytes.

    python -m jobs.convert_features theirs ours --from speculators --to domino --layer-ids 2,10,18,26,34 \
        --preset qwen3_8b target=Qwen/Qwen3-8B
    python -m jobs.convert_features ours theirs --from domino --to specforge
    python -m jobs.convert_features ours half --from domino --to domino capture.features_dtype=float8_e4m3fn

Foreign files say neither which target they are of nor which layers they hold: name both, the ids as the other project
counts them. Some of their states are computed again with the target (--check, on evaluate.device), and files that
disagree are refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jobs.overrides import PRESET_NAMES, load, run_job

if TYPE_CHECKING:
    from domino_core.features import FeatureMeta
    from jobs.presets import JobConfig

KINDS = ("domino", "speculators", "specforge")


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    job = load(args, required=("target",))
    from tqdm import tqdm

    from domino_core.target import load_target, read_target_config
    from pipelines import feature_check, feature_files
    from pipelines.evaluate import placement
    from pipelines.feature_store import Events, record

    meta = described(args, job)
    config = read_target_config(meta.target)
    source = feature_files.open_source(args.origin, args.source, meta, config.vocab_size, args.prompts)
    print(f"{len(source):,} rows of {meta.target}, outputs of blocks {list(meta.layer_ids)}, from {args.source}")
    lacks_final = args.to == "speculators" and meta.layer_ids[-1] != config.num_hidden_layers - 1
    checked = args.check if args.origin != "domino" else 0
    device, dtype = placement(job.evaluate)
    target = load_target(meta.target, device=device, dtype=dtype) if checked or lacks_final else None
    if checked and target is not None:
        error = feature_check.check_states(source, meta, target, args.origin, checked)
        print(f"states agree with the target's: relative error at most {error:.4f}")
    events = Events()
    rows = feature_files.usable(tqdm(source, unit="row", desc="convert"), events)
    if lacks_final and target is not None:
        print("the last block's output is computed with the target: speculators' files end with it")
        rows = feature_check.with_final_layer(rows, target)
    with feature_files.complete_or_absent(args.destination) as folder:
        feature_files.write(args.to, folder, replace(meta, dtype=job.capture.features_dtype), rows)
        if args.to == "domino":
            record(folder / "events", events)
    ids = [block + feature_files.ID_OFFSET[args.to] for block in meta.layer_ids]
    print(f"{len(events.captured):,} rows in {args.destination}, {args.to} layer ids {ids}\n{events.summary()}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder to read")
    parser.add_argument("destination", help="folder to write; it must not exist")
    parser.add_argument("--from", dest="origin", choices=KINDS, required=True, help="whose files they are")
    parser.add_argument("--to", choices=KINDS, required=True, help="whose files they become")
    parser.add_argument("--layer-ids", help="layers in the files, as their project counts them: 2,10,18")
    parser.add_argument("--prompts", help="speculators' prompt dataset, if it is not in the source folder")
    parser.add_argument(
        "--check", type=int, default=4, help="rows to compare with the target's own states (4; 0: none)"
    )
    parser.add_argument("--preset", default="tiny", choices=PRESET_NAMES, help="recipe that the overrides start from")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="target=, capture.features_dtype=, evaluate.device="
    )
    return parser.parse_intermixed_args(argv)


def described(args: argparse.Namespace, job: JobConfig) -> FeatureMeta:
    """What the source holds: ours say it themselves, of others the user does."""
    from domino_core.features import FeatureMeta
    from domino_core.target import load_tokenizer, read_target_config, target_hash, tokenizer_hash
    from pipelines.feature_files import blocks_of
    from pipelines.feature_store import read_manifest

    named = any(override.startswith("target=") for override in args.overrides)
    if args.origin == "domino":
        if args.layer_ids:
            raise ValueError("--layer-ids is for files of others: these features name their layers")
        meta = read_manifest(args.source)
        if named and target_hash(job.target) != meta.target_hash:
            raise ValueError(f"target={job.target} is not the target of {args.source}, which is {meta.target}")
        return replace(meta, target=job.target) if named else meta
    if not named or not args.layer_ids:
        raise ValueError(f"files of {args.origin} name neither target nor layers: give target= and --layer-ids")
    config = read_target_config(job.target)
    ids = [int(part) for part in args.layer_ids.split(",")]
    return FeatureMeta(
        target=job.target,
        target_hash=target_hash(job.target),
        layer_ids=blocks_of(args.origin, ids, config.num_hidden_layers),
        hidden_size=config.hidden_size,
        tokenizer_hash=tokenizer_hash(load_tokenizer(job.target)),
    )


if __name__ == "__main__":
    sys.exit(run_job(main))
