"""`python -m small_model FOLDER`: make the starting model, say how it goes, write it in one move."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Before torch is imported: a model this small gains little from a second thread, and on busy cores threads
# that wait for one another made its small matrix products up to a thousand times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import transformers

from areal_agent.errors import ArealError
from small_model.warm_start import RECIPE, make_reliably


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m small_model", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write the model to; must not exist")
    parser.add_argument("--seed", type=int, default=2, help="of the weights and the questions")
    arguments = parser.parse_args()
    target: Path = arguments.folder
    transformers.utils.logging.disable_progress_bar()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        try:
            made = make_reliably(
                Path(scratch), RECIPE, arguments.seed, say=lambda line: print(line, flush=True)
            )
        except ArealError as e:
            print(f"small_model: {e}", file=sys.stderr)
            return 1
        shutil.rmtree(target, ignore_errors=True)
        os.replace(made, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
