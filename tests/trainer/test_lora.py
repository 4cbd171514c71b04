"""LoRA: only adapters are trained, saved and, where asked, sent; what leaves under the model's names is merged."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from invariance_rank import fixed_batch, move
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from test_loop import finish, make_run, start
from test_resume import STEPS, TRAINER
from test_resume import train as train_until
from torch.distributed.checkpoint.filesystem import FileSystemReader
from trainer_kit import MiniGateway, make_model, reference, reference_logprobs
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_agent.config import LoRAConfig, RunConfig
from areal_agent.errors import ConfigError
from areal_agent.rundir import newest_state
from areal_trainers.algorithm.models import load_companions
from areal_trainers.batch import prepare
from areal_trainers.checkpoint import export, gathered
from areal_trainers.clock import Clock
from areal_trainers.export import export_run
from areal_trainers.learner import Learner
from areal_trainers.lora import adapter_tensors, attach, describe
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item, pack
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.state import TrainingState

LORA = LoRAConfig(rank=4, alpha=6.0)
KINDS = ("qwen3 tied", "qwen3 untied", "llama")
IDS = np.random.default_rng(0).integers(0, 48, 20)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with join_ranks(get_platform("cpu")) as joined:
        yield joined


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def adapted(model: Path, config: LoRAConfig = LORA) -> PreTrainedModel:
    lm = attach(load_causal_lm(model), config, seed=0)
    move(lm, seed=1)
    return lm


def by_peft(model: Path, lm: PreTrainedModel) -> PreTrainedModel:
    """The oracle: peft's own model with the adapter of `lm`, merged by peft."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear")  # type: ignore[arg-type]
    wrapped = get_peft_model(base, config)
    done = set_peft_model_state_dict(wrapped, dict(adapter_tensors(lm)))
    assert not done.unexpected_keys
    assert not [k for k in done.missing_keys if "lora" in k]
    return wrapped.merge_and_unload().eval()  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_peft_s(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "model", kind)
    lm = adapted(model)
    live = {name: p.detach().clone() for name, p in lm.named_parameters()}
    ours, theirs = dict(gathered(lm)), dict(by_peft(model, lm).named_parameters())
    assert list(ours) == list(theirs) == [name for name, _ in gathered(load_causal_lm(model))]
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name].detach(), atol=1e-6, rtol=0)
    assert (ours["model.layers.0.mlp.up_proj.weight"] - reference(model).model.layers[0].mlp.up_proj.weight).abs().max() > 1e-2  # fmt: skip
    assert all(torch.equal(p, live[name]) for name, p in lm.named_parameters())


def test_only_adapters_are_trained(model: Path, ranks: Ranks) -> None:
    lm = adapted(model)
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    policy = shard(lm, ranks.mesh)
    optimizer = Optimizer(policy.parameters(), learning_rate=0.1)
    policy(pack([Item(IDS, np.arange(20) >= 5, 1.0)], [0]))[0].sum().backward()
    assert {name for name, p in lm.named_parameters() if p.grad is not None} == {
        name for name in before if ".lora_" in name
    }
    optimizer.step()
    changed = {n for n, p in lm.named_parameters() if not torch.equal(p.full_tensor(), before[n])}  # type: ignore[attr-defined]
    assert changed == {name for name in before if ".lora_" in name}
    held = sum(t.numel() for state in optimizer.adamw.state.values() for t in state.values() if t.dim())
    assert (
        held
        == 2 * sum(t.numel() for _, t in adapter_tensors(lm))
        < 2 * sum(map(torch.numel, before.values())) / 4
    )


def test_logprobs_are_those_of_the_merged_model(model: Path, ranks: Ranks) -> None:
    lm = adapted(model)
    want = reference_logprobs(by_peft(model, lm), IDS.tolist())
    with torch.no_grad():
        got = shard(lm, ranks.mesh)(pack([Item(IDS, np.arange(20) >= 5, 1.0)], [0]))[0]
    np.testing.assert_allclose(got.numpy(), want[5:], atol=1e-5)


def test_the_reference_is_the_model_without_its_adapter(model: Path, ranks: Ranks) -> None:
    config = RunConfig.parse(
        {"model": str(model), "algorithm": {"kl": "loss"}, "trainer": {"lora": {"rank": 4}}}
    )
    companions = load_companions(config, ranks, get_platform("cpu"))
    assert (companions.reference, companions.reference_within) == (None, True)
    lm = adapted(model)
    policy = shard(lm, ranks.mesh)
    optimizer = Optimizer(policy.parameters(), learning_rate=1.0)
    learner = Learner(policy, optimizer, ranks, config.trainer, Clock(), config.algorithm, companions)
    work = prepare(fixed_batch(), version=3, max_staleness=9, dynamic_sampling=False)
    proximal, _ = learner.logprobs(work.items)
    experience = learner.experience(work, proximal)
    base = reference(model)
    for item, mine in zip(experience.items, proximal, strict=True):
        want = reference_logprobs(base, item.token_ids.tolist(), item.temperature)[item.loss_mask]
        np.testing.assert_allclose(item.columns["reference"], want, atol=1e-5)
        assert np.abs(item.columns["reference"] - mine).max() > 1e-2
    np.testing.assert_array_equal(learner.logprobs(work.items)[0][0], proximal[0])  # it is on again


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (["no_such_layer"], "no_such_layer"),
        ([], "is empty"),
        (["q_proj", "lm_head"], "takes in lm_head"),
        (["embed_tokens"], "takes in model.embed_tokens, a Embedding"),
    ],
)
def test_layers_that_cannot_be_adapted(tmp_path: Path, targets: list[str], why: str) -> None:
    lm = load_causal_lm(make_model(tmp_path / "model", "qwen3 untied"))
    with pytest.raises(ConfigError, match=why):
        attach(lm, LoRAConfig(rank=2, target_modules=targets), seed=0)


def test_chosen_layers(model: Path) -> None:
    lm = attach(load_causal_lm(model), LoRAConfig(rank=2, target_modules=["q_proj", "v_proj"]), seed=0)
    adapter = describe(lm)
    assert adapter is not None
    assert adapter.target_modules == ("q_proj", "v_proj")
    assert len(adapter_tensors(lm)) == 2 * 2 * 2


def test_an_adapter_alone_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank = 0"):
        _ = RunConfig.parse({"weights": {"adapter": "adapter"}}).served_adapter
    assert RunConfig.parse({"trainer": {"lora": {"rank": 4}}}).served_adapter is None


def test_an_export_is_merged_and_has_the_adapter_beside_it(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    lm = adapted(model)
    want = reference_logprobs(by_peft(model, lm), IDS.tolist())
    policy = shard(lm, ranks.mesh)
    folder = export(policy.lm, tmp_path / "out", model, write=True)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert list(dict(plain.named_parameters())) == list(dict(load_causal_lm(model).named_parameters()))
    np.testing.assert_allclose(reference_logprobs(plain.eval(), IDS.tolist()), want, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    np.testing.assert_allclose(reference_logprobs(loaded, IDS.tolist()), want, atol=1e-5)  # type: ignore[arg-type]


def test_a_state_holds_adapters_only_and_goes_on_bit_for_bit(
    tmp_path: Path, model: Path, ranks: Ranks
) -> None:
    def build(lm: PreTrainedModel) -> tuple[Optimizer, TrainingState]:
        optimizer = Optimizer(shard(lm, ranks.mesh).parameters(), learning_rate=0.01)
        return optimizer, TrainingState(
            {"policy": (lm, optimizer)}, ranks, get_platform("cpu"), tmp_path / "s", 2
        )

    def step(optimizer: Optimizer) -> None:
        for p in optimizer.parameters:
            p.grad = p.detach() * 0.1 + 0.01
        optimizer.step()

    lm = adapted(model)
    optimizer, saved = build(lm)
    step(optimizer)
    saved.save(1)
    saved.wait()
    folder = newest_state(tmp_path / "s")
    assert folder is not None
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in there if not name.startswith("random/"))
    step(optimizer)

    other = attach(load_causal_lm(model), LORA, seed=5)
    its, loaded = build(other)
    assert loaded.load() is not None
    step(its)
    ours, theirs = dict(gathered(lm)), dict(gathered(other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    for different in (load_causal_lm(model), attach(load_causal_lm(model), LoRAConfig(rank=2), seed=0)):
        with pytest.raises(ConfigError, match=r"another choice of what is trained|cannot be loaded"):
            build(different)[1].load()


@pytest.mark.parametrize(
    ("ranks_", "weights"),
    [
        (2, {"adapter": "merged"}),
        (2, {"adapter": "adapter"}),
        (1, {"adapter": "adapter", "transport": "disk"}),
    ],
)
def test_a_run_stays_exact(tmp_path: Path, model: Path, ranks_: int, weights: dict[str, str]) -> None:
    """The gateway samples with what it was sent: a wrong adapter or a wrong merge is a logprob gap."""
    run = make_run(tmp_path, model, ranks=ranks_, lora={"rank": 4, "alpha": 16.0}, logprob_gap_bound=1e-4)
    config = run.read_config()
    config.weights = config.weights.model_copy(update=weights)
    (run.path / "config.json").write_text(config.model_dump_json())
    with MiniGateway(model, stale=True) as gateway:
        process = start(run, gateway.url, ranks=ranks_)
        output = finish(process)
    assert process.returncode == 0, output
    served, first = gateway.models[3], gateway.models[0]
    moved = [
        n
        for (n, a), b in zip(served.named_parameters(), first.parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    assert moved
    assert all(name.endswith("_proj.weight") for name in moved)
    sent = [m["manifest"] for path, m in gateway.calls if path == "weights/begin"]
    names = [t["name"] for bucket in sent[0]["buckets"] for t in bucket["tensors"]]
    assert any(".lora_A." in n for n in names) == (weights["adapter"] == "adapter")
    exported = AutoModelForCausalLM.from_pretrained(run.path / "checkpoints" / "latest", dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(export_run(run.path), dtype=torch.float32)
    for (name, a), b, c in zip(
        exported.named_parameters(), again.parameters(), served.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        torch.testing.assert_close(a, c, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path, model: Path) -> None:
    """As without LoRA: the parameters of a run that was never killed, bit for bit."""
    done = []
    for kill in (None, ("update", 6)):
        run = make_run(tmp_path / str(kill is None), model, **TRAINER, lora={"rank": 4})
        with MiniGateway(model, stale=True) as gateway:
            code, output = train_until(run, gateway, kill=kill)
            if kill is not None:
                assert code == -signal.SIGKILL, output
                assert 0 < gateway.version < STEPS
                code, output = train_until(run, gateway, "--resume")
        assert code == 0, output
        done.append(AutoModelForCausalLM.from_pretrained(run.path / "checkpoints" / "latest"))
    for (name, a), b in zip(done[0].named_parameters(), done[1].parameters(), strict=True):
        assert torch.equal(a, b), name
