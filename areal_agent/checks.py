"""What can be known to fail before anything is started: each a sentence, not a traceback later."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import json
import socket
from pathlib import Path

from areal_agent.config import GatewayConfig, RunConfig
from areal_agent.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def model_folder(path: str) -> Path:
    """The Hugging Face folder a policy starts from. Raises ConfigError unless it can be read as one."""
    if not path:
        raise ConfigError(
            "no model: pass model='path/to/folder', a Hugging Face model folder on this machine"
        )
    folder = Path(path)
    if not folder.is_dir():
        hint = "; download it first, hubs are not asked" if "/" in path and not folder.is_absolute() else ""
        raise ConfigError(f"the model folder {path} does not exist{hint}")
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"the model folder {path} has no config.json") from None
    except (OSError, UnicodeDecodeError, ValueError) as e:
        raise ConfigError(f"the model folder {path} has an unreadable config.json: {e}") from None
    if not isinstance(config, dict) or not (config.get("architectures") or config.get("model_type")):
        raise ConfigError(f"the model folder {path}: config.json names no architectures")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"the model folder {path} has no tokenizer ({TOKENIZER_FILES[0]})")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"the model folder {path} has no weights (*.safetensors)")
    return folder


def address(gateway: GatewayConfig) -> None:
    """Raises ConfigError when the gateway could not bind there, or should not."""
    host, port = gateway.host, gateway.port
    if bool(gateway.tls_cert) != bool(gateway.tls_key):
        raise ConfigError("gateway.tls_cert and gateway.tls_key go together; only one of them is set")
    for name in ("tls_cert", "tls_key"):
        if (file := getattr(gateway, name)) and not Path(file).is_file():
            raise ConfigError(f"gateway.{name} = {file}: there is no such file")
    try:
        loopback = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not gateway.allow_remote and not gateway.tls_cert:
        raise ConfigError(
            f"gateway.host={host} is not a loopback address: anybody who reaches it could try keys, and without TLS "
            "read them. Set gateway.tls_cert and gateway.tls_key, or gateway.allow_remote=true if you mean it"
        )
    if port == 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            why = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be bound ({e.strerror})"
            raise ConfigError(
                f"port {port} on {host} {why}; stop what holds it, or set gateway.port=0 to pick a free one"
            ) from None


def installed(*, trainer: bool) -> None:
    """Raises ConfigError, with the command to run, where a part that the run needs is not installed."""
    needed = {"aiohttp": "gateway", "renderers": "gateway"} | ({"torch": "trainer"} if trainer else {})
    missing = sorted({extra for module, extra in needed.items() if importlib.util.find_spec(module) is None})
    if missing:
        raise ConfigError(
            f"this needs more than the base install: pip install 'areal-agent[{','.join(missing)}]' "
            "(or [cpu], [cuda], [npu], which bring the engines as well)"
        )


def trainable(config: RunConfig) -> None:
    """Raises ConfigError when what is sampled cannot be trained on."""
    s = config.sampling
    if s.top_p != 1 or s.top_k != 0:
        raise ConfigError(
            f"sampling.top_p = {s.top_p:g} and sampling.top_k = {s.top_k}: replies then come from a truncated "
            "distribution, whose logprobs the trainer does not compute; train with top_p 1 and top_k 0"
        )
    config.algorithm.check(config.rollout.max_staleness)
    _ = config.served_adapter


def before_start(config: RunConfig, *, trainer: bool) -> None:
    """All of the above for one run."""
    if trainer:
        trainable(config)
    model_folder(config.model)
    address(config.gateway)
    installed(trainer=trainer)
