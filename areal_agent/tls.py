"""How this project's own clients trust a gateway that speaks TLS. Invariant: a certificate is always verified."""

from __future__ import annotations

import os
import ssl


def client_context(url: str) -> ssl.SSLContext | bool:
    """httpx's `verify` for `url`: the system's authorities, and those of SSL_CERT_FILE where that is set.

    Raises FileNotFoundError or ssl.SSLError when SSL_CERT_FILE names no usable file.
    """
    if not url.startswith("https:"):
        return True
    context = ssl.create_default_context()
    if extra := os.environ.get("SSL_CERT_FILE"):
        context.load_verify_locations(cafile=extra)
    return context
