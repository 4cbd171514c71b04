"""The examples' model with random weights, and room for replies of some thousand tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples" / "agents"))

from small_model.warm_start import RECIPE, blank

LONGEST_CONTEXT = 4096


def small_model(scratch: Path) -> Path:
    """A Hugging Face folder under `scratch`."""
    folder = blank(scratch / "model", RECIPE, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST_CONTEXT}))
    return folder
