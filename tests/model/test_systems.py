"""The promises, for every system beside the ICML paper's: rules, scores, relative positions, branches."""

import sys

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers import warm
from helpers.models import EncoderOutput, amplify_, batch, build, dictionary, in_threads
from helpers.promises import check_alone_or_in_a_batch, check_no_future, check_steps
from torch.testing import assert_close

PREDICTIVE = ["--ea-rule", "predictive", "--ea-alpha", 0.5]
SYSTEMS = {
    "predictive": PREDICTIVE,
    "predictive, 3 convolutions": [*PREDICTIVE, "--ea-conv-layers", 3],
    "residual": ["--ea-rule", "residual", "--ea-alpha", 0.5],
    "realformer": ["--ea-rule", "realformer"],
    "learnt": ["--ea-learn-mix", "--ea-beta", 0.5],
    "multiplicative": ["--ea-score", "multiplicative", "--ea-beta", 0.5],
    "additive": ["--ea-score", "additive", "--ea-beta", 0.5],
    "concatenative": ["--ea-score", "concatenative", "--ea-beta", 0],
    "relative": ["--ea-relative-positions", 2, "--ea-beta", 0.5],
    "relative, not absolute": ["--ea-relative-positions", 3, "--ea-beta", 0, "--no-token-positional-embeddings"],
    "relative, additive": ["--ea-relative-positions", 2, "--ea-score", "additive", *PREDICTIVE],
    "two branches": ["--ea-conv-branch", "--ea-alpha", 0, "--ea-beta", 0],
    "two branches, predictive": ["--ea-conv-branch", *PREDICTIVE],
    "two branches, evolving, relative": ["--ea-conv-branch", "--ea-relative-positions", 2],
}
#: those whose decoders differ from the ICML paper's and from fairseq's
IN_DECODERS = [name for name, flags in SYSTEMS.items() if {"--ea-score", "--ea-relative-positions"} & set(flags)]

each_system = pytest.mark.parametrize("system", SYSTEMS)


def lively(system, **options):
    """A model in which everything matters: fresh weights leave attention nearly uniform and relative positions zero."""
    model = amplify_(build("ea_transformer_base", *SYSTEMS[system], **options))
    for name, parameter in model.named_parameters():
        if ".score." in name or "relative_positions" in name:
            parameter.data.normal_(std=0.5)  # 1 / sqrt(D), as the scale of dot products; more makes rounding visible
    return model


@each_system
@torch.no_grad()
def test_alone_or_in_a_batch(system, each_way):
    model, left_source = lively(system), list(SYSTEMS).index(system) % 2 == 0
    source, target = batch([2, 9, 5], left_pad=left_source), batch([8, 1, 4], left_pad=not left_source, eos_first=True)
    check_alone_or_in_a_batch(lambda source, target: model(source, None, target)[0], source, target)


@pytest.mark.parametrize("system", IN_DECODERS)
@torch.no_grad()
def test_a_future_token_changes_nothing(system, each_way):
    model, source = lively(system), batch([6, 4])
    check_no_future(lambda tokens: model(source, None, tokens)[0], batch([7, 7], eos_first=True))


@pytest.mark.parametrize("system", [*IN_DECODERS, "two branches, predictive"])
@torch.no_grad()
def test_step_by_step_equals_teacher_forcing_while_beams_move(system, each_way):
    model = lively(system)
    model.decoder.set_beam_size(2)
    check_steps(model, batch([6, 4, 3], left_pad=True), dropped=(3,))


@pytest.mark.parametrize(
    ("system", "dtype"),
    [
        ("predictive, 3 convolutions", torch.float16),
        ("learnt", torch.bfloat16),
        ("multiplicative", torch.bfloat16),
        ("relative, additive", torch.float16),
        ("two branches, predictive", torch.float32),
        ("two branches, evolving, relative", torch.float16),
    ],
)
def test_short_sentences_in_every_precision(system, dtype):
    model = lively(system, dtype=dtype, train=True)
    logits = model(batch([1, 2, 7], left_pad=True), None, batch([2, 1, 3], eos_first=True))[0]
    assert logits.dtype == dtype and logits.isfinite().all()
    logits.float().pow(2).mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@each_system
def test_every_parameter_is_of_use(system):
    """All get a gradient, but for those of relative positions that no pair of tokens is as far apart as."""
    model = lively(system, train=True)
    logits = model(batch([6, 3]), None, batch([5, 4], eos_first=True))[0]
    logits.pow(2).mean().backward()
    useless = [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    assert [name for name in useless if not name.endswith("k_proj.bias")] == []


@pytest.mark.parametrize("system", ["learnt", "relative, additive", "two branches, evolving, relative"])
@torch.no_grad()
def test_threads_may_share_a_model(system):
    model = lively(system)
    batches = [(batch([n, 3], seed=n), batch([n + 1, 2], seed=n, eos_first=True)) for n in range(3, 11)]
    expected = [model(source, None, target)[0] for source, target in batches]

    @torch.no_grad()
    def work(number):
        for turn in range(8):
            place = (number + turn) % len(batches)
            source, target = batches[place]
            assert torch.equal(model(source, None, target)[0], expected[place])

    in_threads(work, 4)


@pytest.mark.parametrize("system", ["relative, additive", "two branches, predictive"])
@torch.no_grad()
def test_the_encoder_can_be_recorded(system):
    encoder, source = EncoderOutput(lively(system).encoder), batch([6, 3])
    traced = torch.jit.trace(encoder, (source,), check_trace=False)
    exported = torch.export.export(encoder, (source,), strict=False).module()
    for other in (source, batch([6, 5], seed=2)):
        assert_close(traced(other), encoder(other), rtol=1e-5, atol=1e-5)
        assert_close(exported(other), encoder(other), rtol=1e-5, atol=1e-5)


FRESH = """
import runpy, sys, torch
from helpers.models import build
here = runpy.run_path(sys.argv[3])
SYSTEMS, decoded = here["SYSTEMS"], here["decoded"]
saved = torch.load(sys.argv[1], weights_only=True)
found = {}
for name, weights in saved.items():
    model = build("ea_transformer_base", *SYSTEMS[name])
    model.load_state_dict(weights)
    found[name] = decoded(model)
torch.save(found, sys.argv[2])
"""


def decoded(model):
    """Beam search's hypotheses, and their scores."""
    generator = SequenceGenerator([model], dictionary(), beam_size=3, max_len_a=0, max_len_b=5)
    source = batch([6, 3])
    hypotheses = generator({"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}})
    tokens = [[beam["tokens"].tolist() for beam in beams] for beams in hypotheses]
    return tokens, [[beam["score"].item() for beam in beams] for beams in hypotheses]


def test_a_fresh_process_decodes_what_this_one_would_have(tmp_path):
    models = {system: lively(system) for system in SYSTEMS}
    saved, found = tmp_path / "saved.pt", tmp_path / "found.pt"
    torch.save({name: model.state_dict() for name, model in models.items()}, saved)
    command = [sys.executable, "-c", FRESH, str(saved), str(found), __file__]
    warm.run(command, check=True, timeout=600)
    there = torch.load(found, weights_only=True)
    for name, model in models.items():
        (tokens, scores), (expected, expected_scores) = there[name], decoded(model)
        assert tokens == expected, name
        for ours, theirs in zip(scores, expected_scores, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4), name
