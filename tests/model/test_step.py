"""Captured steps: a replay is the eager step on the same padded batch; what cannot be captured trains as before.

There is no GPU: ``Tape`` repeats the calls of a capture in the same memory.
"""

import itertools
import math
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy_with_rdrop import RdropLabelSmoothedCrossEntropyCriterion
from fairseq.data import LanguagePairDataset
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from helpers import trainers
from helpers.models import batch, build, dictionary, tiny_task
from torch.utils._python_dispatch import TorchDispatchMode

from ea_fairseq import graphs, optim, step
from ea_fairseq.trainer import FlatTrainer
from ea_tools.bench.tape import Tape
from evolving_attention.kernels import refusals

TABLE = [(5, 8, 6), (5, 6, 8), (4, 8, 8)]
RDROP = ["--criterion", "label_smoothed_cross_entropy_with_rdrop", "--rdrop-alpha", "5"]


def captured(*flags, table=TABLE, graph=Tape, **options):
    """A trainer whose steps are captured."""
    trainer = trainers.flat(*flags, **options)
    trainer.table, trainer.graph = table, graph
    return trainer


class Padded(FlatTrainer):
    """Trains by eager steps on the padded batches, as one that has captured them and does not replay."""

    def _build_optimizer(self):
        self.graph, self.table = Tape, TABLE
        super()._build_optimizer()
        self._step._captured_for = self.pad

    def pad(self, sample):
        size = (*sample["net_input"]["src_tokens"].shape, sample["target"].size(1))
        shape = next((x for x in TABLE if all(a <= b for a, b in zip(size, x, strict=True))), None)
        if shape is not None:
            static = step.Static(shape, self.task.source_dictionary, self.device)
            static.fill(sample)
            sample.update(static.sample(sample["ntokens"]))


@pytest.mark.parametrize(
    ("precision", "accumulated", "flags"),
    [
        ("fp32", 1, ["--clip-norm", "0.5"]),
        ("bf16", 2, []),
        ("fp16", 1, ["--fp16-init-scale", "16", "--clip-norm", "0.5"]),
        ("fp32", 3, RDROP),
        ("bf16", 1, RDROP),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_replay_is_the_eager_step_on_the_padded_batch(precision, accumulated, flags):
    """Bit for bit over 20 updates; several shapes, and batches that fit none."""
    one, other = captured(*flags, precision=precision), trainers.build(Padded, *flags, precision=precision)
    data = trainers.batches(one, 20 * accumulated, longest=8)
    with mock.patch.object(one.model, "train", wraps=one.model.train) as puts_in_training:
        reported = trainers.train(one, data, accumulated)
    assert reported == trainers.train(other, data, accumulated)
    assert torch.equal(trainers.weights(one), trainers.weights(other))
    assert None not in one._step.captured.values() and len(one._step.captured) == 3
    assert next(iter(one._step.captured)) == TABLE[-1], "the largest first"
    eager = puts_in_training.call_count - 20  # each eager step does so once more
    assert 0 < eager < 10 * accumulated


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    """From a checkpoint in the middle of an epoch."""
    whole, first, second = captured(), captured(), captured()
    data = trainers.batches(whole, 8, longest=8)
    trainers.train(whole, data)
    trainers.train(first, data[:4])
    trainers.save(first, tmp_path / "checkpoint.pt")
    second.load_checkpoint(str(tmp_path / "checkpoint.pt"))
    trainers.train(second, data[4:])
    assert second._step.captured and second.get_num_updates() == 8
    assert torch.equal(trainers.weights(second), trainers.weights(whole))


@pytest.mark.parametrize("flags", [["--sentence-avg"], RDROP, ["--update-freq", "2"]], ids=" ".join)
def test_it_trains_as_fairseq_without_padding(flags):
    """fairseq's own trainer and Adam, no dropout. The last update of an epoch reports its numbers immediately."""
    one, other = captured(*flags, dropout="0"), trainers.stock(*flags, dropout="0")
    data, accumulated = trainers.batches(one, 12, longest=8), 1 + ("--update-freq" in flags)
    updates = len(data) // accumulated
    one._batches = SimpleNamespace(end_of_epoch=lambda: one.get_num_updates() % 5 == 0 or one.get_num_updates() == 12)
    with mock.patch.object(trainers.torch.cuda, "current_device", lambda: None):
        rows = [trainers.train(trainer, data, accumulated) for trainer in (one, other)]
    assert len(rows[1]) == updates
    for ours, theirs in zip(*rows, strict=False):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert len(rows[0]) == (updates if updates == 12 else updates - 1), "the last update's are read later"
    assert len(one._step.captured) == 3


class Counter(TorchDispatchMode):
    """Counts what a GPU would be asked for: launches, and numbers that the host waits for."""

    VIEWS = frozenset(
        "view _unsafe_view reshape transpose t permute expand slice select unsqueeze squeeze detach alias as_strided "
        "split unbind split_with_sizes empty empty_like new_empty lift_fresh resize_".split()
    )

    def __init__(self):
        super().__init__()
        self.launches, self.reads = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kind = self.reads if name in graphs.READS else self.launches
        if name not in self.VIEWS:
            kind.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "reads"), [("fp32", 5), ("bf16", 5), ("fp16", 8)])
def test_an_update_outside_the_graph_is_short(precision, reads):
    """At most 80 launches, with the five copies of a batch to the GPU, which a CPU does not make."""
    trainer = captured("--clip-norm", "1", precision=precision)
    data = [trainers.batches(trainer, 1, longest=6)[0]] * 4
    trainers.train(trainer, data[:3])
    with Counter() as counter, mock.patch.object(trainer.model, "train", wraps=trainer.model.train) as trains:
        trainer.train_step(data[3:])
    assert trains.call_count == 1
    assert len(counter.launches) + 5 <= 80, counter.launches
    assert len(counter.reads) <= reads, counter.reads


ARCHITECTURES = [
    "ea_transformer_base",
    "ea_transformer_lite --ea-learn-mix",
    "ea_transformer_base --ea-alpha 0 --ea-beta 0",
    "ea_transformer_base --ea-score additive --ea-relative-positions 4 --ea-kernel-size 5",
    "pa_transformer_lite --ea-conv-layers 2",
    "pa_conv_transformer_lite",
    "res_transformer_lite",
    "ea_transformer_base --ea-plain",
    "ea_transformer_base --ea-decoder-alpha 0.1 --ea-cross-alpha 0.1 --ea-conv gated",
    "ea_bart_base",
    "ea_transformer_lm",
    "ea_roberta_base",
]


@pytest.mark.parametrize("words", ARCHITECTURES)
def test_the_host_reads_nothing(words):
    """Forward, criterion and backward, R-Drop's too. A RoBERTa's own criterion chooses tokens by a mask."""
    arch, *flags = words.split()
    model = build(arch, *flags, train=True)
    padded, task = batch([5, 2, 1]), tiny_task("translation")
    task.source_dictionary = task.target_dictionary
    inputs = {"src_tokens": padded, "src_lengths": padded.ne(1).sum(1)}
    if hasattr(model, "decoder") and hasattr(model, "encoder"):
        inputs["prev_output_tokens"] = padded
    criteria = [LabelSmoothedCrossEntropyCriterion(task, False, 0.1)]
    if "prev_output_tokens" in inputs:
        criteria.append(RdropLabelSmoothedCrossEntropyCriterion(task, False, 0.1, rdrop_alpha=5.0))
    for criterion in criteria:
        sample = {"net_input": dict(inputs), "target": padded, "ntokens": 8, "id": None}
        with step._recording(), graphs.NoReads():
            criterion(model, sample)[0].backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    assert type(utils.item(torch.ones(1))) is float, "as before"


def test_the_detector_sees_reads():
    x = torch.ones(3)
    for reads in (lambda: bool(x.any()), lambda: x[x > 0], lambda: x.nonzero(), x.sum().item, lambda: x.equal(x)):
        with pytest.raises(graphs.HostRead), graphs.NoReads():
            reads()


def test_each_replay_drops_other_numbers():
    """With a seed of the host, replays would repeat themselves."""
    trainer = captured("--lr", "0", "--attention-dropout", "0")
    losses = [row[0] for row in trainers.train(trainer, trainers.batches(trainer, 1, longest=6) * 4)]
    assert len(set(losses)) == len(losses) == 3


def test_the_next_replay_uses_the_new_scale():
    """An overflow halves it, updates nothing, and is no update."""
    trainer = captured("--fp16-init-scale", str(2**40), "--min-loss-scale", "1", precision="fp16", dropout="0")
    data, start = trainers.batches(trainer, 1, longest=6) * 60, trainers.weights(trainer)
    scales = []
    with mock.patch.object(torch.Tensor, "cuda", lambda x: x):  # fairseq asks for a GPU after an overflow
        while not trainer.get_num_updates():
            assert torch.equal(trainers.weights(trainer), start)
            scales.append(trainer.optimizer.scaler.loss_scale)
            trainer.train_step(data[:1])
    assert len(scales) > 3 and all(a == 2 * b for a, b in itertools.pairwise(scales))
    assert float(trainer._step.scale) == scales[-1]
    trainer.train_step(data[:1])  # the first update's learning rate is 0
    assert not torch.equal(trainers.weights(trainer), start)
    assert trainers.weights(trainer).isfinite().all()


@pytest.mark.parametrize(
    ("precision", "bad", "ends"), [("fp32", math.nan, False), ("bf16", math.inf, False), ("fp32", math.nan, True)]
)
def test_gradients_that_are_no_numbers_end_a_run_with_the_weights_from_before(precision, bad, ends):
    """The next update is it that raises; also where they were the last of an epoch."""
    trainer = captured(precision=precision, dropout="0")
    trainer._batches = SimpleNamespace(end_of_epoch=lambda: ends)
    trainer.save_checkpoint = lambda *_: None
    data = trainers.batches(trainer, 2, longest=6)
    trainers.train(trainer, data)
    before = trainers.weights(trainer)
    begin = optim.FairseqAdam.begin

    def begin_badly(adam):
        begin(adam)
        adam.flat.gradients[0] = bad

    with mock.patch.object(optim.FairseqAdam, "begin", begin_badly):
        trainer.train_step(data[:1])
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        trainer.train_step(data[1:])
    assert torch.equal(trainers.weights(trainer), before)
    assert trainer.get_num_updates() == 2
    assert trainer.optimizer.state_dict()["state"][0]["exp_avg"].isfinite().all()


class Other(LabelSmoothedCrossEntropyCriterion):
    """A criterion that is not known."""


class Untried(Tape):
    """A kernel meets a variant that had no trial."""

    def capture(self):
        refusals.untried.append("a variant")
        return super().capture()


def reads(one, other, patch):
    loss = LabelSmoothedCrossEntropyCriterion.compute_loss
    read = lambda *args, **kwargs: (x := loss(*args, **kwargs), float(x[0].detach()))[0]  # noqa: E731
    patch.setattr(LabelSmoothedCrossEntropyCriterion, "compute_loss", read)


def counts_of_the_padded_batch(one, other, patch):
    counts = step.GraphedStep.counts
    patch.setattr(step.GraphedStep, "counts", lambda self, target, _: counts(self, target, target.numel()))


FLAGS = (
    "--offload-activations",  # which sets --checkpoint-activations, too
    "--quant-noise-pq 0.1",
    "--report-accuracy",
    "--encoder-layerdrop 0.5",
    "--amp",
)


def task_with_a_step_of_its_own(one, other, patch):
    patch.setattr(
        TranslationTask, "train_step", lambda task, *args, **options: FairseqTask.train_step(task, *args, **options)
    )


def several_processes(one, other, patch):
    """As the optimizer sees them; the model is built before, since DDP would ask for the others."""
    assert one.model is not one.criterion
    with patch.context() as meanwhile:
        meanwhile.setattr(FlatTrainer, "data_parallel_world_size", 2)
        assert one.optimizer


CHANGES = {
    "processes": several_processes,
    # fairseq's own needs a configuration of product quantisation
    "quantizer": lambda *given: [setattr(trainer, "quantizer", mock.Mock()) for trainer in given[:2]],
    "observer": lambda *given: [
        setattr(trainer.model.encoder.layers[0].self_attn, "observer", lambda maps: None) for trainer in given[:2]
    ],
    "hook": lambda one, other, patch: one.model.encoder.register_forward_hook(lambda *_: None),
    # fairseq's own modules for --quant-noise-scalar need a GPU
    "scalar": lambda one, other, patch: setattr(one.model.args, "quant_noise_scalar", 0.5),
    "table": lambda one, other, patch: setattr(one, "table", None),
    "criterion": lambda *given: [setattr(trainer._criterion, "__class__", Other) for trainer in given[:2]],
    "read": reads,
    "counts": counts_of_the_padded_batch,
    "task": task_with_a_step_of_its_own,
    "untried": lambda one, other, patch: setattr(one, "graph", Untried),
}


@pytest.mark.parametrize("why", ["transformer", *FLAGS, *CHANGES])
def test_what_cannot_be_captured_trains_as_before_and_says_why(why, caplog, monkeypatch):
    words, arch = why.split() if why in FLAGS else [], why if why == "transformer" else "ea_transformer_base"
    one, other = captured(*words, arch=arch), trainers.flat(*words, arch=arch)
    CHANGES.get(why, lambda *_: None)(one, other, monkeypatch)
    data = trainers.batches(one, 3, longest=6)
    with caplog.at_level("INFO"):
        rows = trainers.train(one, data)
        said = [line for name in ("trainer", "step") for line in trainers.lines(caplog, f"ea_fairseq.{name}")]
    assert rows == trainers.train(other, data)
    assert torch.equal(trainers.weights(one), trainers.weights(other))
    assert len([line for line in said if "not captured: " in line or "fairseq's own Adam: " in line]) == 1, said
    assert why != "table" or any("LanguagePairDataset" in line for line in said)


def test_a_refusal_in_the_middle_of_an_update_loses_no_gradient():
    """The sum has begun by then. Two shapes are captured, the third is not."""
    made = itertools.count()
    one = captured(graph=lambda: Tape() if next(made) < 2 else Untried(), dropout="0")
    other = trainers.flat(dropout="0")
    data = trainers.batches(one, 12, longest=8)
    ours, theirs = (trainers.train(trainer, data, 12) for trainer in (one, other))
    assert one._step.refused and len(one._step.captured) == 3
    assert ours == [pytest.approx(row, rel=1e-5) for row in theirs]


def test_a_batch_that_is_no_ordinary_one_is_not_replayed():
    """One that only fills up adds no gradient; one with other inputs would lose them."""
    trainer = captured()
    data = trainers.batches(trainer, 2, longest=6)
    trainers.train(trainer, data)
    parts, gradients = (trainer.model, trainer.criterion, trainer.optimizer), trainer._step.adam.flat.gradients
    trainer.zero_grad()
    for adds in (False, True):
        trainer._step(data[1], *parts, update_num=2, ignore_grad=not adds)
        assert bool(gradients.any()) == adds
    assert trainer._step._captured_for(data[1]) is not None
    data[1]["net_input"]["src_lang_id"] = torch.zeros(1)
    assert trainer._step._captured_for(data[1]) is None


def test_the_shapes_of_an_epoch_are_those_of_its_batches():
    words, lengths, rows = dictionary(), ([2, 9, 4, 3], [5, 1, 2, 7]), [[0, 3], [1], [2]]
    sides = [[batch([length])[0] for length in side] for side in lengths]
    data = LanguagePairDataset(sides[0], lengths[0], words, sides[1], lengths[1], words)
    samples = [data.collater([data[row] for row in of]) for of in rows]
    expected = [(*sample["net_input"]["src_tokens"].shape, sample["target"].size(1)) for sample in samples]
    trainer = trainers.flat()
    assert trainer._shapes() is None
    trainer._batches = SimpleNamespace(dataset=data, frozen_batches=rows)
    assert sorted(trainer._shapes()) == sorted(expected) == [(1, 4, 2), (1, 9, 1), (2, 3, 7)]
    assert step.sizes_of(LanguagePairDataset(sides[0], lengths[0], words), rows) is None, "without targets"


def test_shapes_hold_all_batches_and_more_of_them_cost_less():
    chance = numpy.random.default_rng(1)
    source = numpy.exp(chance.normal(3, 0.6, 900)).astype(int) + 1
    sizes = numpy.stack([4096 // source, source, (source * chance.uniform(0.7, 1.3, 900)).astype(int) + 1], axis=1)
    more = []
    for count in (1, 8, 64):
        table = step.table_of(sizes, count)
        assert len(table) <= count
        costs = step.cost(numpy.array(table))
        assert (numpy.diff(costs) >= 0).all()
        chosen = [next(c for c, x in zip(costs, table, strict=True) if (size <= x).all()) for size in sizes]
        more.append(sum(chosen) / step.cost(sizes).sum() - 1)
    assert more[0] > 1 and more[1] < 1 and more[2] < 0.2, more
    assert step.table_of(sizes[:1]) == [tuple(sizes[0])]
