"""--optimizer flat_adam: fairseq's rule, its state dicts and its classes, by one call for all parameters."""

import pytest
import torch
from fairseq.optim import adam
from helpers import trainers
from omegaconf import OmegaConf
from torch import nn

from ea_fairseq import optim
from ea_fairseq.trainer import FlatTrainer


@pytest.mark.parametrize("decay", [0, 1e-4])
def test_the_rule_is_fairseqs(decay):
    """50 updates by gradients of many sizes; the third parameter gets none."""
    options = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": decay}
    starts = [torch.randn(shape) * 0.05 for shape in ((70, 30), (65,), (4,), ())]
    theirs, ours = ([nn.Parameter(x.clone()) for x in starts] for _ in range(2))
    cfg = adam.FairseqAdamConfig(adam_betas="(0.9, 0.98)", weight_decay=decay, lr=[1e-2])
    ours_by, theirs_by = optim.FairseqAdam(cfg, ours), adam.Adam(theirs, **options)
    above = []
    for _ in range(50):
        ours_by.zero_grad()
        for one, other in zip(ours, theirs, strict=True):
            if one.numel() != 4:
                one.grad = torch.randn_like(one) * 10 ** torch.randn(())
                other.grad = 0.5 * one.grad
        ours_by.multiply_grads(0.5)
        norms = [float(by) for by in (ours_by.clip_grad_norm(20.0), nn.utils.clip_grad_norm_(theirs, 20.0))]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        above.append(norms[0] > 20)
        ours_by.step()
        theirs_by.step()
    assert set(above) == {False, True}
    for one, other, start in zip(ours, theirs, starts, strict=True):
        assert (one - other).norm() <= 1e-5 * (other - start).norm()


def shapes(state):
    """A state dict with shapes in the place of tensors."""
    if isinstance(state, dict):
        return {name: shapes(value) for name, value in state.items()}
    return (state.shape, state.dtype) if torch.is_tensor(state) else state


@pytest.mark.parametrize(("precision", "off"), [("fp32", 1e-4), ("bf16", 5e-2), ("fp16", 2e-2)])
def test_it_trains_and_resumes_as_fairseqs_optimizer(precision, off, tmp_path):
    """Checkpoints of either kind resume under the other."""
    flags = ["--weight-decay", "1e-4", "--clip-norm", "0.5", "--update-freq", "2"]
    kinds, states, rows, ways = {"flat": trainers.flat, "stock": trainers.stock}, {}, {}, {}
    for first, build in kinds.items():
        trainer = build(*flags, precision=precision)
        data, start = trainers.batches(trainer, 24), trainers.weights(trainer)
        rows[first] = trainers.train(trainer, data[:12], 2)
        ways[first, ""] = trainers.weights(trainer) - start
        assert (type(trainer.optimizer).__module__ == optim.__name__) == (first == "flat")
        path = trainers.save(trainer, tmp_path / f"{first}.pt")
        states[first] = torch.load(path, weights_only=True)
        for then, build_again in kinds.items():
            goes_on = build_again(*flags, precision=precision)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "current_device", lambda: None)
                goes_on.load_checkpoint(str(path))
            assert goes_on.get_num_updates() == 6
            start = trainers.weights(goes_on)
            trainers.train(goes_on, data[12:], 2)
            ways[first, then] = trainers.weights(goes_on) - start
    assert rows["flat"] == [pytest.approx(row, rel=1e-4 if precision == "fp32" else 2e-2) for row in rows["stock"]]
    assert shapes(states["flat"]["last_optimizer_state"]) == shapes(states["stock"]["last_optimizer_state"])
    names = [state["optimizer_history"][-1]["optimizer_name"] for state in states.values()]
    assert names[0] == names[1]
    for one, other in ((("flat", ""), ("stock", "")), *(((first, "flat"), (first, "stock")) for first in kinds)):
        assert (ways[one] - ways[other]).norm() < off * ways[other].norm()


@pytest.mark.parametrize("build", [trainers.flat, trainers.stock], ids=["flat", "stock"])
@pytest.mark.parametrize("precision, flags", [("fp32", []), ("bf16", ["--memory-efficient-bf16"])])
def test_older_runs_whose_learnt_shares_have_no_axis_resume(build, precision, flags, tmp_path):
    trainer = build("--ea-learn-mix", *flags, precision=precision)
    data, ways = trainers.batches(trainer, 4), []
    trainers.train(trainer, data[:2])
    path = trainers.save(trainer, tmp_path / "checkpoint.pt")
    older = torch.load(path, weights_only=True)
    shares = [key for key in older["model"] if key.endswith(("evolution.alpha", "evolution.beta"))]
    older["model"].update({key: older["model"][key].squeeze(0) for key in shares})
    moments = [entry for entry in older["last_optimizer_state"]["state"].values() if entry["exp_avg"].shape == (1,)]
    for entry in moments:
        entry.update({key: entry[key].squeeze(0) for key in ("exp_avg", "exp_avg_sq")})
    assert len(shares) == len(moments) > 0
    torch.save(older, tmp_path / "older.pt")
    for checkpoint in (path, tmp_path / "older.pt"):
        goes_on = build("--ea-learn-mix", *flags, precision=precision)
        goes_on.load_checkpoint(str(checkpoint))
        torch.manual_seed(1)
        trainers.train(goes_on, data[2:])
        ways.append(trainers.weights(goes_on))
    assert torch.equal(*ways)


def test_with_a_state_of_each_parameter_in_half_precision_so_is_ours():
    states = []
    for build in (trainers.flat, trainers.stock):
        trainer = build("--fp16-init-scale", "4", "--fp16-no-flatten-grads", precision="fp16")
        trainers.train(trainer, trainers.batches(trainer, 1))
        states.append(shapes(trainer.optimizer.state_dict()))
    assert states[0] == states[1] and len(states[0]["state"]) > 1


def test_a_state_that_it_cannot_have_is_refused():
    """Of any other it takes over the settings, too, as fairseq's does."""
    trainer = trainers.flat()
    trainers.train(trainer, trainers.batches(trainer, 1))
    state = trainer.optimizer.state_dict()
    state["param_groups"][0]["weight_decay"] = 0.5
    trainer.optimizer.load_state_dict(state)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.5
    state["state"][0]["step"] = 7
    with pytest.raises(ValueError, match=r"--optimizer flat_adam.* 1 to 7 .*--optimizer adam"):
        trainer.optimizer.load_state_dict(state)
    state["param_groups"][0]["params"].pop()
    del state["state"][0]
    with pytest.raises(ValueError, match="parameters"):
        trainer.optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "option",
    [
        "common.amp True",
        "common.memory_efficient_bf16 True",
        "common.memory_efficient_fp16 True",
        "common.tpu True",
        "distributed_training.ddp_backend fully_sharded",
        "distributed_training.ddp_backend slowmo",
        "distributed_training.zero_sharding os",
        "optimization.use_bmuf True",
        "optimizer.fp16_adam_stats True",
        "optimizer.use_old_adam True",
    ],
)
def test_what_does_not_suit_is_named(option):
    trainer = trainers.flat()
    model, (name, value) = trainer.get_model(), option.split()
    assert optim.unsuited(trainer.cfg, list(model.parameters()), list(model.modules())) is None
    OmegaConf.update(trainer.cfg, name, value == "True" or value)
    reason = optim.unsuited(trainer.cfg, list(model.parameters()), list(model.modules()))
    assert name.partition(".")[2].partition("_efficient")[0].replace("_", "-") in reason.lower()


@pytest.mark.parametrize("flags", ["--encoder-layerdrop 0.5", "--memory-efficient-bf16"])
def test_fairseqs_own_trains_as_without_the_flag(flags, caplog):
    flags = flags.split()
    one, other = trainers.flat(*flags), trainers.stock(*flags)
    data = trainers.batches(one, 3)
    with caplog.at_level("INFO"):
        assert trainers.train(one, data) == trainers.train(other, data)
    assert torch.equal(trainers.weights(one), trainers.weights(other))
    assert len(trainers.lines(caplog)) == 1
    assert type(one.optimizer) is type(other.optimizer)


def test_parameters_with_options_of_their_own_do_not_suit():
    trainer = trainers.flat()
    parameters = list(trainer.model.parameters())
    assert optim.unsuited(trainer.cfg, parameters, []) is None
    for changed in (torch.nn.Parameter(parameters[0].detach().double()), torch.nn.Parameter(torch.eye(2).to_sparse())):
        assert optim.unsuited(trainer.cfg, [*parameters, changed], [])
    parameters[0].optim_overrides = {"optimizer": {"lr": 1.0}}
    assert optim.unsuited(trainer.cfg, parameters, [])


def test_the_flag_alone_changes_the_trainer():
    """--optimizer adam stays fairseq's under our trainer, too, but in scripts/train.sh."""
    trainer = trainers.build(FlatTrainer, optimizer="adam")
    assert type(trainer.optimizer) is adam.FairseqAdam
    assert type(trainers.build(trainers.Trainer).optimizer) is adam.FairseqAdam, "without our trainer"
