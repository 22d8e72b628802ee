"""Convert a drafter between the layouts of other projects and the published one, bit for bit.

    python -m jobs.convert path/to/drafter out --to speculators --target Qwen/Qwen3-8B      for vLLM and speculators
    python -m jobs.convert path/to/speculator out --to published                            for SGLang and SpecForge

SRC is in any format that serving and evaluation read too (docs/formats.md). The target's weights are read only if SRC
repeats them. DST must not exist; it appears whole or not at all. What a killed process (SIGKILL) leaves beside it,
.DST.new-*, can be removed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jobs.overrides import run_job


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC", help="folder of the drafter")
    parser.add_argument("folder", metavar="DST", help="folder to write, which does not exist")
    parser.add_argument("--to", required=True, choices=("published", "speculators"), help="format of DST")
    parser.add_argument("--target", help="the drafter's target: Hub id or folder")
    args = parser.parse_args(argv)
    from domino_core.convert import convert_drafter

    print(convert_drafter(args.source, args.folder, args.to, args.target).describe())


if __name__ == "__main__":
    sys.exit(run_job(main))
