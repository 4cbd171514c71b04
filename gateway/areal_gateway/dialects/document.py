"""docs/gateway_fields.md, written from the tables: `python -m areal_gateway.dialects.document FILE`.

Invariant: the page says what the code does, because it is made of what the code looks at.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_gateway.dialects import COUNTERS, DIALECTS
from areal_gateway.dialects.fields import Field, Treatment

_HEAD = """# Request fields

What becomes of every field of a request, by API. Made from the code's own tables; do not edit it:

```sh
python -m areal_gateway.dialects.document docs/gateway_fields.md
```

"""

_TAIL = """
A field that is not listed is ignored. Whatever a request sets and has no effect is named in the
`x-areal-ignored` header of the reply, unless its value asks for nothing (null, or the default).
"""


def page() -> str:
    """The whole page, as Markdown."""
    meanings = "".join(f"- **{t}**: {t.meaning}.\n" for t in Treatment)
    rows = [(path, d.fields) for path, d in (*DIALECTS.items(), *COUNTERS.items())]
    return _HEAD + meanings + _TAIL + "".join(_section(path, fields) for path, fields in rows)


def _section(path: str, fields: dict[str, Field]) -> str:
    lines = [f"\n## POST {path}\n", "| field | treatment | |", "|---|---|---|"]
    lines += [f"| `{name}` | {f.treatment} | {f.why} |" for name, f in fields.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m areal_gateway.dialects.document FILE")
    Path(sys.argv[1]).write_text(page())


if __name__ == "__main__":
    main()
