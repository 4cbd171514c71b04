"""The trainer's half of the weight transaction, against the receiver that runs inside real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer_kit import MiniGateway, make_model, reference

from areal_agent.config import FleetConfig, WeightsConfig
from areal_agent.errors import WeightUpdateError
from areal_trainers import weights_sender
from areal_trainers.client import TrainerClient
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.weights_sender import WeightsSender, wire_dtype

QUICK = dict(join_timeout_s=3.0, transfer_timeout_s=3.0, pause_timeout_s=3.0, bucket_mib=0.01)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(weights_sender, "RETRY_PAUSE_S", 0.01)
    with join_ranks(get_platform("cpu")) as joined:
        yield joined


def sender_of(folder: Path, ranks: Ranks, gateway: MiniGateway, **over: object):
    lm = load_causal_lm(folder)
    shard(lm, ranks.mesh)
    client = TrainerClient(gateway.url, gateway.KEY)
    config = WeightsConfig(**{**QUICK, **over})  # type: ignore[arg-type]
    return lm, WeightsSender(lm, client, ranks, get_platform("cpu"), config, "float32")


def shift(lm: torch.nn.Module, by: float) -> None:
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(by)


@pytest.mark.parametrize("kind", ["qwen3 tied", "qwen3 untied"])
def test_the_engine_holds_what_the_trainer_holds(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    folder = make_model(tmp_path / "m", kind)
    with MiniGateway(folder) as gateway:
        lm, sender = sender_of(folder, ranks, gateway)
        assert len(sender.manifest.buckets) > 3  # several, so that order and offsets matter
        shift(lm, 0.125)
        pushed = sender.push(1)
        sender.close()
    assert (pushed.version, pushed.engines, pushed.attempts) == (1, 1, 1)
    for (name, old), (_, new) in zip(
        reference(folder).named_parameters(), gateway.models[1].named_parameters(), strict=True
    ):
        assert torch.equal(old + 0.125, new), name


def test_tied_weights_travel_once_under_the_name_engines_load(tmp_path: Path, ranks: Ranks) -> None:
    folder = make_model(tmp_path / "m", "qwen3 tied")
    with MiniGateway(folder) as gateway:
        _, sender = sender_of(folder, ranks, gateway)
        names = [t.name for b in sender.manifest.buckets for t in b.tensors]
    assert "lm_head.weight" not in names
    assert names.count("model.embed_tokens.weight") == 1


def test_the_group_is_reused_until_something_breaks(tmp_path: Path, ranks: Ranks) -> None:
    folder = make_model(tmp_path / "m")
    with MiniGateway(folder) as gateway:
        lm, sender = sender_of(folder, ranks, gateway)
        for version in (1, 2):
            shift(lm, 0.125)
            sender.push(version)
        assert gateway.epoch == 1
        gateway.fail_commits = 1
        pushed = sender.push(3)
        sender.close()
    assert pushed.attempts == 2
    assert gateway.epoch == 2
    assert gateway.version == 3


def test_gives_up_after_its_retries_and_says_what_the_gateway_said(tmp_path: Path, ranks: Ranks) -> None:
    folder = make_model(tmp_path / "m")
    with MiniGateway(folder, fail_commits=99) as gateway:
        _, sender = sender_of(folder, ranks, gateway, retries=1)
        with pytest.raises(WeightUpdateError, match=r"in 2 attempts.*the test broke it"):
            sender.push(1)
    assert gateway.version == 0


def test_an_engine_that_never_joins_costs_a_deadline_not_a_hang(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "m")
    with MiniGateway(folder) as gateway:
        _, sender = sender_of(folder, ranks, gateway, retries=0, join_timeout_s=1.0)
        from areal_gateway import worker_extension

        monkeypatch.setattr(worker_extension.WeightReceiver, "join", lambda self, **_: {})
        monkeypatch.setattr(worker_extension.WeightReceiver, "receive", lambda self, **_: {})
        with pytest.raises(WeightUpdateError, match="version 1 did not reach the engines"):
            sender.push(1)
    assert gateway.names("weights/abort") == ["weights/abort"]
    assert gateway.update is None


def test_a_held_fleet_is_not_asked_again(tmp_path: Path, ranks: Ranks) -> None:
    folder = make_model(tmp_path / "m")
    with MiniGateway(folder) as gateway:
        _, sender = sender_of(folder, ranks, gateway)

        async def held(_: object):
            gateway.drop()
            return gateway._error(409, "weights_held", "no engine survived")

        gateway.commit = held  # type: ignore[method-assign]
        with pytest.raises(WeightUpdateError, match=r"in 1 attempt: .*no engine survived"):
            sender.push(1)


def test_the_store_listens_on_loopback_only(tmp_path: Path, ranks: Ranks) -> None:
    folder = make_model(tmp_path / "m")
    with MiniGateway(folder) as gateway:
        _, sender = sender_of(folder, ranks, gateway)
        port = f":{sender._store.port:04X} "  # type: ignore[union-attr]
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    listening = [line.split()[1] for line in tables.splitlines() if port in line and line.split()[3] == "0A"]
    assert [address.split(":")[0] for address in listening] == ["0100007F"]


@pytest.mark.parametrize(
    ("weights", "fleet", "wanted"),
    [("auto", "auto", "float32"), ("auto", "bfloat16", "bfloat16"), ("float16", "bfloat16", "float16")],
)
def test_wire_dtype(weights: str, fleet: str, wanted: str) -> None:
    assert wire_dtype(WeightsConfig(dtype=weights), FleetConfig(dtype=fleet)) == wanted  # type: ignore[arg-type]
