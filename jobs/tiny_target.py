"""Make the embedded target: a small Qwen3 language model of Python, trained on the standard library's source.

python -m jobs.tiny_target --out runs/tiny-qwen3                a GPU: minutes; a CPU: many hours
python -m jobs.tiny_target --steps 20 --batch 4 --out runs/trial    a CPU: does the command work?
python -m jobs.tiny_target --prompts 12000 --out runs/prompts.jsonl    trains nothing: more training prompts
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from jobs.overrides import run_job


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.tiny_target", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Left out, a number is that of TrainOptions, which is imported late.
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="rows of a step")
    parser.add_argument("--length", type=int, help="tokens of a row")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--eval-tokens", type=int, help="held-out tokens scored")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers (CUDA, a minute at the start)")
    parser.add_argument("--source", type=Path, help="folder of Python modules instead of this interpreter's library")
    parser.add_argument("--source-name", help="how the card names the source")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny-qwen3"), help="model folder to write")
    parser.add_argument("--prompts", type=int, help="train nothing; write this many training prompts to OUT (.jsonl)")
    args = parser.parse_args(argv)
    import torch

    from jobs.tiny_target_train import TrainOptions, make, write_more_prompts

    source = args.source or Path(sysconfig.get_path("stdlib"))
    if args.prompts is not None:
        write_more_prompts(source, args.prompts, args.out, TrainOptions().seed if args.seed is None else args.seed)
        return
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch sees no CUDA device; use --device cpu")
    numbers = {name: getattr(args, name) for name in ("steps", "batch", "length", "seed", "eval_tokens")}
    given = {name: value for name, value in numbers.items() if value is not None}
    own_library = f"the standard library of CPython {platform.python_version()}"
    make(
        TrainOptions(**given, device=device, compile=args.compile),
        source=source,
        source_name=args.source_name or (args.source.name if args.source else own_library),
        out=args.out,
        command=shlex.join(["python", "-m", "jobs.tiny_target", *argv]),
    )


if __name__ == "__main__":
    sys.exit(run_job(main))
