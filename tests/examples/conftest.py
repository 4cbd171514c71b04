"""The examples are scripts in a folder of their own; python puts that folder on the path, and so do we."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
sys.path.insert(0, str(EXAMPLES))
