"""ea_roberta keeps the promises of an encoder that stands alone."""

import itertools

import torch
from fairseq.models.roberta import RobertaHubInterface
from helpers.models import amplify_, batch
from helpers.other_models import build
from torch.testing import assert_close


def test_maps_are_threaded_from_layer_to_layer():
    model = build("ea_roberta", "--ea-alpha", 0.5)
    seen = []
    for layer in model.encoder.sentence_encoder.layers:
        layer.self_attn.observer = seen.append
    model(batch([6, 4]))
    assert seen[0].previous is None
    for before, after in itertools.pairwise(seen):
        assert_close(after.previous, before.a_logit)


@torch.no_grad()
def test_reloaded_and_in_evaluation_it_gives_what_training_gave(tmp_path):
    """In evaluation fairseq's own encoder layer may leave for a fused kernel, which knows no maps."""
    model = amplify_(build("ea_roberta", "--ea-beta", 0.5, train=True), 20)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh = build("ea_roberta", "--ea-beta", 0.5)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    tokens = batch([6, 3, 1])
    assert_close(fresh(tokens)[0][tokens.ne(1)], model(tokens)[0][tokens.ne(1)], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_features_of_all_layers_and_of_a_classification_head():
    model = build("ea_roberta")
    model.register_classification_head("sentiment", num_classes=3)
    tokens = batch([6, 3])
    hidden = model(tokens, features_only=True, return_all_hiddens=True)[1]["inner_states"]
    assert [state.shape for state in hidden] == [(6, 2, 16)] * 4
    assert model(tokens, classification_head_name="sentiment")[0].shape == (2, 3)
    interface = RobertaHubInterface.__new__(RobertaHubInterface)
    torch.nn.Module.__init__(interface)
    interface.model = model
    interface.register_buffer("_float_tensor", torch.zeros(1))
    assert interface.predict("sentiment", tokens).exp().sum(1).sub(1).abs().max() < 1e-5


def test_learnt_mixes_are_logged_as_of_every_model():
    """What all models with evolving attention share is not passed over by building RoBERTa in a way of its own."""
    assert build("ea_roberta", "--ea-learn-mix").learns_mix
    assert not build("ea_roberta").learns_mix
