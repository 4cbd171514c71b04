"""TLS: every client of ours verifies the gateway's certificate, and without TLS it is bound to loopback only."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from gateway_support import ADMIN_KEY, Served, make_app

from areal_agent import checks
from areal_agent.config import GatewayConfig
from areal_agent.errors import ConfigError, GatewayError
from areal_agent.session import GatewayClient
from areal_gateway.server import bind, tls
from areal_gateway.serving import GatewayRunner
from areal_gateway.tokens import Tokens
from areal_trainers.client import TrainerClient


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> GatewayConfig:
    """Self-signed, for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return GatewayConfig(tls_cert=str(cert), tls_key=str(key))


async def test_our_clients_speak_it_and_verify_it(
    tokens: Tokens, tmp_path: Path, certificate: GatewayConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: Served = make_app(tokens, tmp_path)
    runner = GatewayRunner(served.app)
    await runner.setup()
    sock = bind(certificate)
    await web.SockSite(runner, sock, ssl_context=tls(certificate)).start()
    url = f"https://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with GatewayClient(url, ADMIN_KEY) as stranger:
            with pytest.raises(GatewayError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.status()
        monkeypatch.setenv("SSL_CERT_FILE", certificate.tls_cert)
        async with GatewayClient(url, ADMIN_KEY) as client:
            session = await client.open_session("t")
            assert session.base_url == url + "/v1"
            async with httpx.AsyncClient(trust_env=True) as agent:
                asked = {"messages": [{"role": "user", "content": "hi"}]}
                key = {"Authorization": f"Bearer {session.api_key}"}
                answer = await agent.post(session.base_url + "/chat/completions", json=asked, headers=key)
            assert answer.status_code == 200, answer.text
            assert served.ledger.call_totals()[0] == {"complete": 1}
        trainer = TrainerClient(url, ADMIN_KEY)
        lease = await asyncio.to_thread(trainer.lease, groups=1, max_staleness=None, wait_s=0.0, lease_s=1.0)
        assert lease is None
        trainer.close()
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False) as plain:
                await plain.get(url.replace("https", "http") + "/health")
    finally:
        await runner.cleanup()
        served.ledger.close()


def test_with_tls_another_address_may_be_bound(certificate: GatewayConfig) -> None:
    remote = certificate.model_copy(update={"host": "0.0.0.0"})
    checks.address(remote)
    bind(remote).close()


def test_half_of_it_or_a_wrong_file_is_a_sentence(certificate: GatewayConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="go together"):
        checks.address(GatewayConfig(tls_cert=certificate.tls_cert))
    with pytest.raises(ConfigError, match=r"tls_key.*no such file"):
        checks.address(certificate.model_copy(update={"tls_key": str(tmp_path / "none")}))
    (tmp_path / "bad.pem").write_text("no key")
    with pytest.raises(ConfigError, match="cannot be used"):
        tls(certificate.model_copy(update={"tls_key": str(tmp_path / "bad.pem")}))
