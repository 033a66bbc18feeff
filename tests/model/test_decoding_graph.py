"""A search whose steps are replayed gives the hypotheses and scores of one whose steps are not."""

import gc
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from helpers import promises
from helpers.models import amplify_, batch, build
from helpers.promises import check_steps, sharp
from torch.testing import assert_close

from ea_fairseq import decoding, graphs
from ea_fairseq.layers import EADecoderLayer
from ea_tools.bench.tape import Tape

SOURCE = batch([9, 2, 6, 1, 4])


@pytest.fixture
def tapes(monkeypatch):
    """Recordings on a CPU; the list of all. A search needs no gradients."""
    made = []
    monkeypatch.setattr(graphs, "for_device", lambda device: lambda: made.append(Tape()) or made[-1])
    decoding._IDLE.clear()
    with torch.no_grad():
        yield made


def search(model, beam, graphs=True):
    model.decoder.graphs = graphs
    return promises.search(model, SOURCE, beam, longest=24)


def assert_same(ours, theirs, **limits):
    for one, other in zip(ours, theirs, strict=True):
        for hypothesis, expected in zip(one, other, strict=True):
            assert torch.equal(hypothesis["tokens"], expected["tokens"])
            for name in ("positional_scores", "attention"):
                assert_close(hypothesis[name], expected[name], **limits)


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize(
    "flags",
    [
        "--ea-kernel-size 1",
        "--ea-decoder-alpha 0.4 --ea-cross-alpha 0.3 --decoder-normalize-before --decoder-learned-pos",
        "--ea-kernel-size 5 --ea-relative-positions 2 --no-token-positional-embeddings",
    ],
    ids=["k1", "skips", "k5"],
)
def test_hypotheses_and_scores_are_those_of_the_decoder(tapes, flags, beam, monkeypatch):
    """Sentences end at different times, and the longest outgrows its first width."""
    monkeypatch.setattr(decoding, "LEAST_WIDTH", 1)
    model = sharp(*flags.split())
    expected = search(model, beam, graphs=False)
    assert not tapes
    lengths = {len(hypothesis["tokens"]) for hypotheses in expected for hypothesis in hypotheses}
    assert len(lengths) > 1 and max(lengths) > 3
    ours = search(model, beam)
    assert sum(bool(tape.calls) for tape in tapes) >= 2
    assert_same(ours, expected, rtol=1e-5, atol=1e-5)
    count = len([tape for tape in tapes if tape.calls])
    for step in decoding._IDLE[model.decoder]:  # as a search leaves it that went wrong
        for cache in (*step.own, *step.source):
            for x in (cache.keys, cache.values, cache.rows):
                if x is not None:
                    x.fill_(torch.nan)
    assert_same(search(model, beam), expected, rtol=1e-5, atol=1e-5)  # by the same recordings
    assert len([tape for tape in tapes if tape.calls]) == count


def test_steps_equal_teacher_forcing_while_beams_move_and_sentences_end(tapes):
    model = amplify_(build("ea_transformer_base", "--ea-beta", 0.5))
    check_steps(model, batch([6, 3, 1]), beams=3, dropped=(2, 5))
    assert any(tape.calls for tape in tapes)


def test_padding_among_words_is_hidden(tapes):
    model, words, outputs = sharp(), torch.tensor([[2, 5, 6, 7, 8], [2, 7, 1, 1, 9], [2, 8, 5, 1, 4]]), []
    source = model.encoder(SOURCE[:3])
    for model.decoder.graphs in (True, False):
        state, steps = {}, range(1, words.size(1) + 1)
        scores = [model.decoder(words[:, :n], encoder_out=source, incremental_state=state)[0] for n in steps]
        outputs.append(torch.cat(scores, 1)[words.ne(1)])
    assert any(tape.calls for tape in tapes)
    assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_two_searches_at_once_do_not_share_memory(tapes):
    model = sharp()
    states, outputs = [{}, {}], [[], []]
    sources = [model.encoder(row[row.ne(1)][None]) for row in SOURCE[:2]]
    words = torch.tensor([[2, 5, 6, 7, 8]])
    for step in range(1, 6):
        for state, output, source in zip(states, outputs, sources, strict=True):
            output.append(model.decoder(words[:, :step], encoder_out=source, incremental_state=state)[0])
    for output, source in zip(outputs, sources, strict=True):
        assert_close(torch.cat(output, 1), model.decoder(words, encoder_out=source)[0], rtol=1e-5, atol=1e-5)


def test_a_state_that_is_continued_twice_is_refused(tapes):
    model = sharp()
    source, words, state = model.encoder(SOURCE[:1]), torch.tensor([[2, 5, 6, 7]]), {}
    for step in (1, 2, 3):
        model.decoder(words[:, :step], encoder_out=source, incremental_state=state)
    with pytest.raises(ValueError, match=r"decoder\.graphs = False"):
        model.decoder(words[:, :3], encoder_out=source, incremental_state=dict(state))


def test_hypotheses_move_and_equal_sentences_end_one_by_one_and_other_steps_are_refused(tapes):
    model, state = amplify_(build("ea_transformer_base", "--ea-beta", 0.5)), {}
    source = model.encoder(batch([9]))
    words = torch.tensor([[2, 5, 6, 7, 9, 4], [2, 6, 5, 4, 4, 5], [2, 4, 4, 9, 5, 6]])
    for step in range(1, 7):
        ours = model.decoder(words[:, :step], encoder_out=source, incremental_state=state)[0]
        assert_close(ours[:, -1], model.decoder(words[:, :step], encoder_out=source)[0][:, -1], rtol=1e-5, atol=1e-5)
        if order := {3: [1, 0, 2], 4: [2, 1], 5: [1, 0]}.get(step):
            model.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
            words = words[order]
    assert any(tape.calls for tape in tapes)
    with pytest.raises(ValueError, match=r"decoder\.graphs = False"):
        model.decoder(words, encoder_out=source, incremental_state=state, alignment_layer=0)
    for order in ([0, 0, 1, 1], [1, 0, 0, 1]):
        with pytest.raises(ValueError, match=r"new_order .*decoder\.graphs = False"):
            model.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))


class OtherLayer(EADecoderLayer):
    """A layer that does what we do not know."""


WHY = "plain hook observer training dropout gradients autocast layer rows predictive"


@pytest.mark.parametrize("why", WHY.split())
def test_what_a_graph_would_not_repeat_is_left_to_the_decoder(tapes, why, monkeypatch):
    model = sharp(*{"plain": ["--ea-plain"], "predictive": ["--ea-rule", "predictive", "--ea-beta", 0]}.get(why, []))
    attention = model.decoder.layers[0].self_attn
    if why == "hook":
        attention.register_forward_hook(lambda *_: None)
    elif why == "observer":
        attention.observer = lambda call: None
    elif why == "training":
        model.decoder.train()
    elif why == "dropout":
        attention.dropout_module.p, attention.dropout_module.apply_during_inference = 1e-9, True  # --retain-dropout
    elif why == "layer":
        model.decoder.layers[0].__class__ = OtherLayer
    elif why == "rows":
        monkeypatch.setattr(decoding, "MOST_ROWS", 2)
    source, state = model.encoder(SOURCE[:3]), {}
    with torch.set_grad_enabled(why == "gradients"), torch.autocast("cpu", torch.bfloat16, why == "autocast"):
        for step in (1, 2, 3):
            model.decoder(torch.full((3, step), 5), encoder_out=source, incremental_state=state)
    assert not any(tape.calls for tape in tapes)


def test_changed_weights_are_read_and_moved_ones_are_recorded_anew(tapes):
    model = sharp()
    search(model, 2)
    for parameter in model.parameters():
        parameter.mul_(0.9)
    assert_same(search(model, 2), search(model, 2, graphs=False), rtol=1e-5, atol=1e-5)
    recorded = sum(bool(tape.calls) for tape in tapes)
    model.double()
    assert_same(search(model, 2), search(model, 2, graphs=False), rtol=1e-5, atol=1e-5)
    assert sum(bool(tape.calls) for tape in tapes) > recorded


@pytest.mark.parametrize("fault", ["capture", "replay", "not a number"])
def test_a_graph_that_fails_or_gives_other_numbers_is_not_used(tapes, fault, monkeypatch, caplog):
    def fail(tape, *_):
        if fault == "capture":
            raise RuntimeError("no capture here")

    if fault == "not a number":
        monkeypatch.setattr(decoding.Search, "step", lambda search, tokens: (torch.tensor(torch.nan), {}))
    else:
        monkeypatch.setattr(Tape, fault, fail)
    model = sharp()
    ours = search(model, 2)
    assert not model.decoder.graphs and "without CUDA graphs" in caplog.text
    assert_same(ours, search(model, 2, graphs=False), rtol=0, atol=0)


def test_recordings_are_few_and_end_with_their_model(tapes, monkeypatch):
    monkeypatch.setattr(decoding, "MOST_IDLE", 2)
    model = sharp()
    for beam in (1, 2, 3):
        search(model, beam)
    assert len(decoding._IDLE[model.decoder]) == 2 and decoding._IDLE[model.decoder][-1].sizes.beams == 3
    assert len(decoding._IDLE) == 1
    del model
    gc.collect()
    assert len(decoding._IDLE) == 0


def test_one_graph_is_captured_at_a_time(monkeypatch):
    monkeypatch.setattr(graphs.torch, "cuda", mock.MagicMock())
    one, other = graphs.CudaGraph(), graphs.CudaGraph()

    def capture():
        with other.capture():
            pass

    with ThreadPoolExecutor() as threads, one.capture():
        waits = threads.submit(capture)
        with pytest.raises(TimeoutError):
            waits.result(timeout=0.2)
