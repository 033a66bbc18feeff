"""EA-DC-Transformer: against loops in float64, DC-Transformer as its limit, padding, causality, aeon's checks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.mistakes import refusal

pytest.importorskip("aeon")
from aeon.testing.estimator_checking import parametrize_with_checks

from examples.common import class_distance
from examples.time_series import compare, model
from examples.time_series.estimators import EvolvingDCTransformerClassifier, EvolvingDCTransformerRegressor
from examples.time_series.model import Layer, Network


@parametrize_with_checks([EvolvingDCTransformerClassifier, EvolvingDCTransformerRegressor])
def test_aeons_checks(check):
    check()


def layer_by_loop(layer, x, padded, previous):
    """One series through a layer in evaluation whose norms are as at the start, T x d, and its maps."""
    attended, maps = reference.attention(layer.attention, x, x, "encoder", padded, padded, previous)
    weight, bias, dilation = layer.convolution.weight, layer.convolution.bias, layer.convolution.dilation[0]
    rows = []
    for time in range(len(x)):
        taps = [(tap, time - (2 - tap) * dilation) for tap in range(3)]
        convolved = bias + sum(weight[:, :, tap] @ x[past] for tap, past in taps if past >= 0)
        rows.append(torch.cat([attended[time], convolved.relu()]))
    scale = (1 + layer.norms[0].eps) ** -0.5
    x = (x + torch.stack(rows)) * scale * ~padded[:, None]
    return (x + layer.feed_forward(x)) * scale * ~padded[:, None], maps


@pytest.mark.parametrize("shares", [{"alpha": 0.4, "beta": 0.6}, {"alpha": 0.0, "beta": 0.0}])
def test_two_layers_equal_loops(shares, monkeypatch):
    monkeypatch.setattr(model, "HEADS", 2)
    torch.manual_seed(1)
    layers = [Layer(8, 0.25, 2**i, 0.1, **shares, first=i == 0).double().eval() for i in range(2)]
    x, padded = torch.randn(1, 5, 8, dtype=torch.float64), torch.tensor([[False] * 4 + [True]])
    x = x.masked_fill(padded[..., None], 0)
    a_logit, maps = None, None
    for layer in layers:
        expected, maps = layer_by_loop(layer, x[0], padded[0], maps)
        x, a_logit = layer(x, padded, a_logit)
        torch.testing.assert_close(x[0], expected)
        torch.testing.assert_close(a_logit[0, :, :4, :4], torch.tensor(maps, dtype=torch.float64)[:, :4, :4])


def test_the_network_hands_maps_on():
    """With alpha = 1 and beta = 0 all layers have the first one's map."""
    network = Network(3, 9, 2, "attention", layers=3, d=16, p=0.5, dropout=0.0, alpha=1.0, beta=0.0)
    network(torch.randn(2, 9, 3), torch.zeros(2, 9, dtype=torch.bool)).sum().backward()
    slopes = [layer.attention.q_proj.weight.grad.abs().max() for layer in network.layers]
    assert slopes[0] > 0 and slopes[1] == slopes[2] == 0


@pytest.mark.parametrize(
    "kind", [{"p": 1.0}, {"p": 0.25}, {"p": 0.0}, {"kind": "GRU"}, {"kind": "LSTM"}, {"kind": "ResNet"}], ids=str
)
def test_padding_changes_nothing(kind):
    torch.manual_seed(1)
    network = Network(3, 9, 2, d=16, dropout=0.0, **{"kind": "attention", "layers": 2, **kind}).double().eval()
    x, padded = torch.randn(2, 9, 3, dtype=torch.float64), torch.zeros(2, 9, dtype=torch.bool)
    padded[0, 6:] = True
    changed = x.masked_fill(padded[..., None], 7.0)
    torch.testing.assert_close(network(changed, padded), network(x, padded))
    torch.testing.assert_close(network(x[:1], padded[:1]), network(x, padded)[:1])


@pytest.mark.parametrize(("kind", "a_block"), [("GRU", 1632), ("LSTM", 2176), ("ResNet", 1632)])
def test_a_baseline_has_a_layer_for_each_block_of_two(kind, a_block):
    """16 wide: a gate has weights and two biases, a block of ResNet two windows of 3 with biases and norms."""
    sizes = [sum(x.numel() for x in Network(3, 9, 2, kind, n, 16, 0.0).parameters()) for n in (4, 6)]
    assert sizes[1] - sizes[0] == a_block


def noise(classes, lengths):
    """Series of two channels whose mean tells their class."""
    random = np.random.default_rng(0)
    return [random.normal(3 * label, 1, (2, length)) for label, length in zip(classes, lengths, strict=True)]


SMALL = {"layers": 2, "d": 16, "epochs": 30, "rate": 0.01, "random_state": 0}


def test_classes_are_learnt_from_unequal_lengths_and_a_channel_that_is_constant_in_training():
    classes = np.array(["a", "b"] * 12)
    x = [np.pad(one, ((0, 1), (0, 0)), constant_values=0.1) for one in noise(classes == "b", [7, 9, 4] * 8)]
    fitted = EvolvingDCTransformerClassifier(**SMALL).fit(x, classes)
    assert fitted.score(x, classes) == 1
    assert fitted.score([one + np.array([[0], [0], [0.1]]) for one in x], classes) == 1


def test_numbers_are_learnt_in_their_own_scale():
    targets = np.arange(24) / 24
    x, scaled = noise(targets, [9] * 24), 1000 * targets + 5000
    predicted = EvolvingDCTransformerRegressor(**SMALL).fit(x, scaled).predict(x)
    assert np.abs(predicted - scaled).mean() < 100


def test_pre_training_comes_before_the_task_and_changes_it():
    classes = np.arange(24) % 2
    x = noise(classes, [9] * 24)
    restored = [
        EvolvingDCTransformerClassifier(**{**SMALL, "epochs": 0}, pretrain_epochs=epochs).fit(x, classes)
        for epochs in (0, 40)
    ]
    losses = []
    with torch.no_grad(), torch.random.fork_rng():
        for fitted in restored:
            torch.manual_seed(0)
            losses.append(fitted.network_.restoration_loss(*fitted._tensors(x)))
    assert losses[1] < 0.8 * losses[0]
    assert EvolvingDCTransformerClassifier(**SMALL, pretrain_epochs=40).fit(x, classes).score(x, classes) == 1


def test_only_masked_values_count_in_pre_training(monkeypatch):
    network, x = Network(2, 4, 2, "attention", layers=1, d=8, p=0.5, dropout=0.0), torch.randn(3, 4, 2)
    padded = torch.zeros(3, 4, dtype=torch.bool)
    torch.nn.init.zeros_(network.restore.weight)
    torch.nn.init.zeros_(network.restore.bias)
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.arange(24.0).view(3, 4, 2) / 24)
    expected = x.flatten()[:4].square().mean()  # 0.15 * 24 = 3.6: the first four
    torch.testing.assert_close(network.restoration_loss(x, padded), expected)


def test_equation_12_and_ranks_are_means_over_data_sets():
    scores = {"one": {"A": 0.8, "B": 0.6, "C": 0.4}, "two": {"A": 0.5, "B": 0.5, "C": 0.2}}
    results = {
        data: {system: {"scores": {"1": value, "2": value}} for system, value in values.items()}
        for data, values in scores.items()
    }
    rows = compare.table(results, ["one", "two"], ["A", "B", "C"]).splitlines()[2:]
    assert [row.split(" | ")[3:] for row in rows] == [["1.2", "+29.2% |"], ["1.8", "+12.5% |"], ["3.0", "-41.7% |"]]


@pytest.fixture
def loaded(monkeypatch):
    """The splits that were loaded, of easy data: series whose mean tells their class, or their number."""
    splits, classes = [], np.arange(24) % 2

    def load(name, split):
        splits.append(split)
        return noise(classes, [9] * 24), classes + 0.5 if name in compare.REGRESSION else classes

    monkeypatch.setattr(compare, "load", load)
    return splits


@pytest.mark.parametrize("epochs", [[12, 30], [30, 12]], ids=str)
@pytest.mark.parametrize("name", ["ItalyPowerDemand", "CardanoSentiment"])
def test_the_better_settings_are_chosen_without_the_test_series(epochs, loaded, name):
    """Also where the accuracies are equal, as they are after 12 epochs, by log loss."""
    common = {name: value for name, value in SMALL.items() if name not in ("epochs", "random_state")}
    assert compare.choose(name, {"epochs": epochs}, common) == {"epochs": 30}
    assert loaded == ["train"]


@pytest.mark.parametrize(
    ("system", "sizes"),
    [("GRU", ["layers", "d"]), ("Transformer", ["layers", "d"]), ("EA-DC-Transformer", ["layers", "d", "p"])],
)
def test_sizes_are_searched_before_alpha_and_beta(system, sizes, monkeypatch):
    """Each by the settings that are chosen so far; the last of the values is the best here."""
    asked = []

    def choose(name, options, common):
        asked.append((list(options), dict(common)))
        return {option: values[-1] for option, values in options.items()}

    monkeypatch.setattr(compare, "choose", choose)
    settings = compare.search("GunPoint", compare.SYSTEMS[system], {"epochs": 1})
    best = {"layers": 10, "d": 128, "p": 0.875}
    last = {name: values[-1] for name, values in compare.SYSTEMS[system].items()}
    assert settings == {**{size: best[size] for size in sizes}, **last}
    assert [names for names, _ in asked] == [*([size] for size in sizes), list(compare.SYSTEMS[system])]
    assert asked[1][1][sizes[0]] == best[sizes[0]]


def test_equation_13_is_of_representations():
    values = np.array([[0.0, 0.0], [6.0, 8.0], [5.0, 5.0]])
    assert class_distance(values, np.array(["a", "a", "b"])) == pytest.approx(10 / 3)


def test_a_training_that_diverged_is_not_chosen(loaded):
    rates = {"rate": [1e-3, 1e30]}
    assert compare.choose("CardanoSentiment", rates, {"layers": 1, "d": 8, "epochs": 3}) == {"rate": 1e-3}


def test_accuracy_comes_before_log_loss(loaded, monkeypatch):
    results = {"mean_test_accuracy": [0.9, 0.8, 0.9], "mean_test_neg_log_loss": [-0.5, -0.1, -0.4], "params": "abc"}
    search = SimpleNamespace(fit=lambda x, y: SimpleNamespace(cv_results_=results))
    monkeypatch.setattr(compare, "GridSearchCV", lambda *_, **__: search)
    assert compare.choose("ItalyPowerDemand", {"d": [8, 16, 32]}, {}) == "c"


def test_regression_is_measured_by_the_root_of_the_mean_squared_error(loaded):
    common = {"layers": 1, "d": 8, "epochs": 2}
    (score,) = compare.measure("CardanoSentiment", {}, common, [3])["scores"].values()
    (x, y), model = compare.load("CardanoSentiment", "test"), compare.build("CardanoSentiment", common, 3)
    assert score == pytest.approx(np.sqrt(np.mean((model.fit(x, y).predict(x) - y) ** 2)))
    assert loaded[:2] == ["train", "test"]


@pytest.mark.slow
def test_the_command_keeps_scores_and_makes_none_again(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compare, "SYSTEMS", {"EA-DC-Transformer": {"layers": [1], "d": [8]}})
    words = ["ItalyPowerDemand", "--epochs", "1", "--seeds", "1", "2", "--out", str(tmp_path / "scores.json")]
    compare.main([*words, "--ablations"])
    kept = json.loads((tmp_path / "scores.json").read_text())["ItalyPowerDemand"]
    assert kept["EA-DC with 5 x 5 convolution"]["settings"] == {"layers": 1, "d": 8, "kernel_size": 5}
    first = capsys.readouterr().out.splitlines()
    compare.main([*words, "--ablations"])
    assert capsys.readouterr().out.splitlines() == first[len(kept) :]
    before = "{'epochs': 1, 'pretrain_epochs': 0, 'search': False, 'seeds': [1, 2]}"
    assert before in refusal(capsys, compare.main, *words, "--pretrain-epochs", 3, writes_to=tmp_path)
    with pytest.raises(SystemExit):
        compare.main(["ItalyPowerDemand", "Covid3Month"])
