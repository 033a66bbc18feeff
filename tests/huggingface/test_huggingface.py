"""Models of Hugging Face: their own numbers where nothing evolves, else those of the paper's loops."""

import contextlib
import copy
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import reference
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

pytest.importorskip("transformers")
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertForMaskedLM,
    BertModel,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    VisionEncoderDecoderModel,
)

from evolving_attention import RULES, Geometry, huggingface, kernels
from evolving_attention.huggingface import MODEL_TYPES, evolve, from_pretrained

#: every name that a configuration of MODEL_TYPES has for a size, or for dropout
TINY = {"vocab_size": 30, "image_size": 8, "patch_size": 4, "max_position_embeddings": 40, "pad_token_id": 1}
TINY |= {"d_kv": 4, "decoder_start_token_id": 0}
TINY |= dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embedding_size", "word_embed_proj_dim"), 8)
TINY |= dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers"), 3)
TINY |= dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), 2)
TINY |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
TINY |= dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 12)
TINY |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop"), 0.0)
TINY |= dict.fromkeys(("resid_pdrop", "dropout_rate"), 0.0)
MODELS = {
    "bert": AutoModelForMaskedLM,
    "roberta": AutoModelForMaskedLM,
    "vit": AutoModelForImageClassification,
    "gpt2": AutoModelForCausalLM,
    "t5": AutoModelForSeq2SeqLM,
}
DECODES = {"is_decoder": True, "add_cross_attention": True}


def tiny(name, **settings):
    """The configuration of a tiny model of this type."""
    return AutoConfig.for_model(name, **{**TINY, **settings})


#: padding on the left, none, and on the right
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def build(name, **settings):
    """A model in float64 with random weights, whose attention is far from uniform."""
    torch.manual_seed(1)
    model = MODELS[name].from_config(tiny(name)).double()
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name for part in ("query", "key", "q_proj", "k_proj", "c_attn", ".q.", ".k.")):
            parameter.data *= 20
    return evolve(model, **settings) if settings else model


def inputs(name):
    """A batch of three, with padding where the model has any."""
    torch.manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64)}
    words = torch.randint(3, 30, (3, 6))
    decoder = {"decoder_input_ids": words[:, :5], "decoder_attention_mask": MASK[:, :5]} if name == "t5" else {}
    return {"input_ids": words, "attention_mask": MASK, **decoder}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_without_evolution_the_numbers_are_those_of_transformers(name, training):
    model = build(name).train(training)
    model.set_attn_implementation("eager")
    expected = model(**inputs(name)).logits
    assert torch.equal(evolve(model, alpha=0, beta=0)(**inputs(name)).logits, expected)


def test_weights_are_dropped_in_training_alone():
    model = evolve(AutoModel.from_config(tiny("bert", attention_probs_dropout_prob=0.5)), alpha=0.5, beta=0.5)
    outputs = [model.train(training)(torch.arange(3, 9)[None])[0] for training in (True, True, False, False)]
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_every_model_type_has_the_kinds_of_attention_that_its_layers_are(name):
    torch.manual_seed(1)
    model = AutoModel.from_config(tiny(name)).double().eval()
    pictures = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    batch = pictures if name in ("vit", "deit", "dinov2") else {"input_ids": torch.randint(3, 30, (2, 6))}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(3, 30, (2, 5))
    expected = model(**batch)[0]
    evolved = evolve(model, 0, 0, learn_mix=True)
    actual = evolved(**batch)[0]
    assert_close(actual, expected)
    actual.square().sum().backward()
    shares = {name: share.grad for name, share in evolved.named_parameters() if name.endswith((".alpha", ".beta"))}
    assert shares and all(grad is not None and grad.abs() > 0 for grad in shares.values()), "a share of 0 can be learnt"
    assert any(name.endswith("evolution.beta") for name, _ in model.named_parameters())
    kinds = Counter(module.evolution.geometry for module in model.modules() if hasattr(module, "evolution"))
    if model.config.is_encoder_decoder:
        assert kinds == dict.fromkeys(Geometry, 3)
    else:
        assert kinds == {Geometry.DECODER_SELF if name in ("gpt2", "opt") else Geometry.ENCODER_SELF: 3}


@pytest.mark.parametrize("name", MODELS)
def test_attention_weights_are_returned_where_asked_for(name):
    model = build(name).eval()
    model.set_attn_implementation("eager")
    words = {**inputs(name), "output_attentions": True}
    expected = {key: value for key, value in model(**words).items() if key.endswith("attentions")}
    actual = evolve(model, alpha=0, beta=0, learn_mix=True)(**words)
    real = (slice(None), slice(None), slice(2, 4))
    for key, layers in expected.items():
        assert len(actual[key]) == len(layers)
        for weights, others in zip(actual[key], layers, strict=True):
            assert_close(weights[real], others[real])
    if name == "bert":
        assert {x.dtype for x in model.bfloat16()(**words).attentions} == {torch.bfloat16}


@pytest.fixture
def calls(monkeypatch):
    """Every call of the attention function: its arguments and its result."""
    seen = []

    def watched(module, query, key, value, mask, **options):
        output, weights = attention(module, query, key, value, mask, **options)
        seen.append((module, query, key, value, mask, options, output))
        return output, weights

    attention = huggingface._attention
    transformers.AttentionInterface.register(huggingface.NAME, watched)
    yield seen
    transformers.AttentionInterface.register(huggingface.NAME, attention)


KINDS = {Geometry.ENCODER_SELF: "encoder", Geometry.DECODER_SELF: "decoder", Geometry.ENCODER_DECODER: "cross"}


def by_loop(module, query, key, value, mask, options, previous, words=MASK):
    """One call, sentence by sentence: B x T x K x D, and the maps, nested lists B x K x T x S. words: 0 = padded."""
    kind, outputs, maps = KINDS[module.evolution.geometry], [], []
    for number, (q, k, v) in enumerate(zip(query, key, value, strict=True)):
        masked = torch.zeros(q.size(1), k.size(1), dtype=torch.bool)
        if mask is not None:
            masked = (mask < -1e9)[number if len(mask) > 1 else 0, 0].expand(q.size(1), -1)
        hidden = masked
        if kind != "decoder" and mask is not None:
            hidden = masked | ~words[number, : q.size(1)].bool()[:, None]
        logits = q @ k.transpose(1, 2) * options["scaling"]  # K x T x S
        if options.get("position_bias") is not None:
            logits = logits + options["position_bias"][0]
        logits, before = [[[*row] for row in head] for head in logits], None if previous is None else previous[number]
        unseen, zero = (lambda i, j, x=x: bool(x[i, j]) for x in (masked, hidden))
        context, evolved = reference.attend(module.evolution, logits, v, kind, unseen, zero, before)
        outputs.append(context)
        maps.append(evolved)
    return torch.stack(outputs), maps


@pytest.mark.parametrize(
    "name, rule",
    # T5 has all three kinds of attention, and position biases.
    [("t5", rule) for rule in RULES] + [(name, "evolving") for name in MODELS if name != "t5"],
)
def test_values_and_gradients_equal_the_papers_loops(name, rule, calls):
    """Every attention of a model, its maps handed on from layer to layer."""
    model = build(name, alpha=0.4, beta=0.3, rule=rule)
    model(**inputs(name), **{"use_cache": False} if name in ("gpt2", "t5") else {})
    previous = {}
    for module, query, key, value, mask, options, _ in list(calls):
        stack = id(options["evolving_maps"])
        in_encoder = module.evolution.geometry == Geometry.ENCODER_SELF
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        expected, maps = by_loop(module, *leaves, mask, options, previous.get(stack) if in_encoder else None)
        if in_encoder:
            previous[stack] = maps
        # The same call again, from leaves; the layer before has left its map in `evolving_maps`.
        again = [x.detach().requires_grad_() for x in (query, key, value)]
        actual, _ = huggingface._attention(module, *again, mask, **options)
        real = slice(None)
        if mask is not None:
            # In encoders the rows of words, in decoders the rows that see anything.
            real = ~(mask < -1e9).all(-2 if in_encoder else -1).any(1).expand(len(query), -1)
        assert_close(actual[real], expected[real])
        by = torch.randn_like(expected)[real]
        parameters = list(module.evolution.parameters())
        wanted = torch.autograd.grad((expected[real] * by).sum(), [*leaves, *parameters], retain_graph=True)
        given = torch.autograd.grad((actual[real] * by).sum(), [*again, *parameters], retain_graph=True)
        assert_close(given, wanted)


def test_a_mask_of_four_axes_says_nothing_of_padding(calls):
    """Nobody attends to the third token, which is a word all the same."""
    model, words = build("bert", alpha=0.4, beta=0.3), inputs("bert")["input_ids"]
    mask = torch.zeros(3, 1, 6, 6, dtype=torch.float64)
    mask[..., 3] = -torch.inf
    model(words, attention_mask=mask)
    maps = None
    for *call, output in calls:
        expected, maps = by_loop(*call, maps, words=torch.ones_like(MASK))
        assert_close(output, expected)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("beams", [1, 4])
def test_cached_generation_equals_uncached(name, beams):
    model = build(name, alpha=0.4, beta=0.5).eval()
    torch.manual_seed(3)
    prompts = torch.randint(3, 30, (200, 5))
    mask = (torch.arange(5) >= torch.randint(0, 4, (200, 1))).long()  # GPT-2 is padded on the left
    mask = mask.flip(1) if name == "t5" else mask
    options = {"attention_mask": mask, "num_beams": beams, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached, uncached = (model.generate(prompts, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, uncached)


@torch.no_grad()
def test_arguments_by_position_are_those_by_name():
    model, batch = build("t5", alpha=0.4, beta=0.5).eval(), inputs("t5")
    states = torch.randn(3, 6, 8, dtype=torch.float64)
    words, mask = batch["decoder_input_ids"], batch["decoder_attention_mask"]
    expected = model.get_decoder()(input_ids=words, attention_mask=mask, encoder_hidden_states=states)[0]
    assert_close(model.get_decoder()(words, mask, states)[0], expected)

    class AnyArguments(type(model)):
        def forward(self, *arguments, **keywords):
            return super().forward(*arguments, **keywords)

    model = evolve(AnyArguments(tiny("t5")))
    with pytest.raises(ValueError, match=r"AnyArguments: .* by keyword"):
        model(words)
    model(input_ids=words, decoder_input_ids=words)


@torch.no_grad()
def test_padding_on_the_left_of_decoder_inputs_changes_nothing():
    model, words = build("t5", alpha=0.4, beta=0.5).eval(), inputs("t5")["input_ids"]
    alone = model(words[:1], decoder_input_ids=words[:1, 2:]).logits
    mask = torch.ones_like(words)
    mask[0, :2] = 0
    padded = model(words, decoder_input_ids=words, decoder_attention_mask=mask)
    assert_close(padded.logits[:1, 2:], alone)
    cache = None
    for start, end in ((0, 4), (4, 5), (5, 6)):
        given = {"decoder_input_ids": words[:, start:end], "decoder_attention_mask": mask[:, :end]}
        stepped = model(words, **given, past_key_values=cache, use_cache=True)
        cache = stepped.past_key_values
    assert_close(stepped.logits[:1, -1], alone[:, -1])


def test_padding_on_the_left_changes_nothing_where_a_decoder_sees_the_future():
    model, words = build("gpt2", alpha=0.4, beta=0.5).eval(), inputs("gpt2")["input_ids"][:1]
    alone = model(words[:, 2:], attention_mask=MASK[:1, 2:], is_causal=False).logits
    at = torch.tensor([[0, 0, 0, 1, 2, 3]])
    padded = model(words, attention_mask=MASK[:1], position_ids=at, is_causal=False).logits
    assert_close(padded[:, 2:], alone)


def test_other_models_of_the_same_configuration_stay():
    config, batch = tiny("bert"), inputs("bert")
    stock = BertModel(config)
    evolve(BertModel(config))
    assert not hasattr(config, huggingface.SETTINGS)
    stock(**batch)
    model = evolve(BertModel(config))
    model(**batch)
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))


@pytest.mark.parametrize("decoder", ["bert", "gpt2"])
@torch.no_grad()
def test_an_encoder_and_a_decoder_of_two_models_step_with_a_cache(decoder, tmp_path):
    sides = tiny("bert"), tiny(decoder, **DECODES)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*sides)
    torch.manual_seed(1)
    model = evolve(EncoderDecoderModel(config), alpha=0.4, beta=0.5).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    batch, cache = inputs("bert"), EncoderDecoderCache(DynamicCache(), DynamicCache())
    whole = model(**batch, decoder_input_ids=batch["input_ids"], use_cache=False).logits
    steps = batch["input_ids"].split(1, dim=1)
    parts = [model(**batch, decoder_input_ids=word, past_key_values=cache).logits for word in steps]
    assert_close(torch.cat(parts, dim=1), whole)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(EncoderDecoderModel, tmp_path, dtype=torch.float64)
    again = loaded(**batch, decoder_input_ids=batch["input_ids"], output_attentions=True)
    assert_close(again.logits, whole)
    assert [maps.shape for maps in again.cross_attentions] == [(3, 2, 6, 6)] * 3


@pytest.mark.parametrize("encoder", ["words", "pictures", "a folder"])
@torch.no_grad()
def test_a_model_of_two_models_evolves(encoder, tmp_path):
    """Their layers hold the configurations that the two had before."""
    torch.manual_seed(1)
    batch = inputs("vit" if encoder == "pictures" else "bert")
    decoder = AutoModelForCausalLM.from_config(tiny("bert", **DECODES))
    if encoder == "pictures":
        model = VisionEncoderDecoderModel(None, AutoModel.from_config(tiny("vit")), decoder)
    elif encoder == "words":
        model = EncoderDecoderModel(None, AutoModel.from_config(tiny("bert")), decoder)
    else:
        build("bert").float().save_pretrained(tmp_path)
        model = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path, tmp_path)
    model, batch["decoder_input_ids"] = model.double().eval(), inputs("bert")["input_ids"]
    model.set_attn_implementation("eager")
    expected = model(**batch).logits
    assert_close(evolve(model, 0, 0, learn_mix=True)(**batch).logits, expected)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="'sdpa' hides the attention map; expected 'evolving'"):
        model(**batch)


@torch.no_grad()
def test_patches_that_dinov2_masks_change_nothing():
    """Its encoder is a PreTrainedModel too, and gets a mask of four axes."""
    torch.manual_seed(1)
    model = evolve(AutoModel.from_config(tiny("dinov2")).double(), alpha=0.4, beta=0.5).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    pictures, mask = inputs("vit")["pixel_values"], torch.tensor([[1] * 4 + [0]] * 3)
    expected = model(pictures, attention_mask=mask)[0]
    pictures[..., 4:, 4:] += 1  # of the last patch
    assert_close(model(pictures, attention_mask=mask)[0][:, :4], expected[:, :4])
    assert not torch.allclose(model(pictures)[0][:, :4], expected[:, :4])


@torch.no_grad()
def test_rows_of_a_cache_are_repeated_selected_and_forgotten():
    model, words = build("gpt2", beta=0.5).eval(), inputs("gpt2")["input_ids"]
    cache = DynamicCache()
    model(words[:, :3], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0]))  # of the third and the first sentence
    rest = model(words[[2, 0], 3:], past_key_values=cache).logits
    assert_close(rest, model(words[[2, 0]]).logits[:, 3:])
    cache.reset()
    assert_close(model(words, past_key_values=cache).logits, model(words).logits)


@pytest.mark.parametrize("steps", [[3, 1, 2], [1, 1, 4]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "kernel"])
@pytest.mark.parametrize("training, recorded", [(False, False), (True, False), (False, True)])
def test_steps_with_a_cache_equal_one_pass(steps, dtype, training, recorded):
    model = build("gpt2", alpha=0.4, beta=0.5).to(dtype).train(training)
    words, cache = inputs("gpt2")["input_ids"], DynamicCache()
    with torch.set_grad_enabled(recorded):
        whole = model(words).logits
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in words.split(steps, dim=1)]
    assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.fixture
def attended(monkeypatch):
    """The core's calls."""
    calls, attend = [], huggingface.attend
    monkeypatch.setattr(huggingface, "attend", lambda call, *more: attend(calls.append(call) or call, *more))
    return calls


def test_a_decoder_trains_by_the_kernel_though_transformers_makes_a_cache(attended):
    output = build("gpt2", beta=0.5).float().train()(inputs("gpt2")["input_ids"])
    assert output.past_key_values is not None
    assert len(attended) == 3 and all(kernels.kernel_for(call) is kernels.cpu for call in attended)


def test_zeros_that_are_added_leave_logits_to_the_kernel(attended):
    """In masks, and the position biases of T5 between its sides."""
    build("bert", alpha=0.4, beta=0.3)(**inputs("bert"))
    assert attended and all(call.given is None for call in attended)
    attended.clear()
    build("t5", alpha=0.4, beta=0.3)(**inputs("t5"))
    by_kernel = {call.geometry for call in attended if call.given is None}
    assert by_kernel == {Geometry.ENCODER_DECODER} < {call.geometry for call in attended}


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("place", ["meta", FakeTensorMode(allow_non_fake_inputs=True)], ids=["meta", "fake"])
def test_a_model_without_numbers_is_called_as_a_plain_one_is(name, place):
    """Where FLOPs are counted and plans of memory made. On the meta device transformers itself reads masks."""
    models, batch = [build(name, **settings) for settings in ({}, {"alpha": 0.4})], inputs(name)
    for model in models:
        model.config.pad_token_id = None  # else transformers reads the words
    if place == "meta":
        models = [model.to(place) for model in models]
        batch = {key: x.to(place) for key, x in batch.items() if "mask" not in key}
    with contextlib.nullcontext() if place == "meta" else place:
        plain, evolving = (model(**batch).logits for model in models)
    assert evolving.shape == plain.shape


def test_what_cannot_work_is_refused_by_name(monkeypatch):
    model, words = build("gpt2", beta=0.5).eval(), inputs("gpt2")["input_ids"]
    with pytest.raises(NotImplementedError, match=r"StaticLayer: .* DynamicCache"):
        model.generate(words, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    with pytest.raises((NotImplementedError, ValueError), match=r"[Aa]ssisted decoding"):  # from transformers 5.24
        model.generate(words[:1], max_new_tokens=4, assistant_model=build("gpt2"), pad_token_id=0)
    cache = model(words[:, :-2], use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match="assisted decoding, which takes back tokens, does not work"):
        cache.crop(-1)
    rebuilt = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    build("gpt2")(words[:, -2:-1], past_key_values=cache)  # a plain model goes on
    for without_rows in (rebuilt, cache):
        with pytest.raises(ValueError, match="cache: holds keys and values without the rows"):
            model(words[:, -1:], past_key_values=without_rows)
    monkeypatch.setattr(huggingface, "Cache", EncoderDecoderCache)  # as if transformers handed down another kind
    with pytest.raises(ValueError, match="cache: holds keys and values without the rows"):
        model.generate(words, max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize(
    "settings, message",
    [({"rule": "evolve"}, "rule 'evolve'"), ({"alpha": 2}, "alpha 2"), ({"kernel_size": 4}, "kernel_size 4")],
)
def test_bad_settings_change_nothing(settings, message):
    model = build("bert")
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        evolve(model, **settings)
    assert list(model.state_dict()) == before
    with pytest.raises(ValueError, match="it evolves already"):
        evolve(evolve(model))
    with pytest.raises(ValueError, match=r"DataParallel: .*before you wrap it"):
        evolve(torch.nn.DataParallel(build("bert")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny("bert", output_attentions=True, attn_implementation="eager"), "output_attentions: "),
        (tiny("albert"), "model type albert: must be one of bert, "),
        # MPNet's attention is its own, without the function that we replace.
        (EncoderDecoderConfig.from_encoder_decoder_configs(tiny("mpnet"), tiny("bert")), "model type mpnet: "),
        (tiny("gpt2", reorder_and_upcast_attn=True), "reorder_and_upcast"),
    ],
    ids=["asks for maps", "albert", "mpnet", "upcasts"],
)
def test_other_models_are_refused(config, message):
    build = EncoderDecoderModel if config.is_encoder_decoder else AutoModel.from_config
    with pytest.raises(ValueError, match=message):
        evolve(build(config))


def test_eight_threads_share_a_model():
    model, batch, sizes = build("t5", alpha=0.4, beta=0.3).eval(), inputs("t5"), [6, 4, 5, 3] * 6

    def logits(size):
        return model(**{name: values[:, :size] for name, values in batch.items()}).logits

    expected = [logits(size) for size in sizes]
    with ThreadPoolExecutor(8) as pool:
        assert all(map(torch.equal, pool.map(logits, sizes), expected))


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model = build(name, alpha=0.4, beta=0.3).train()
    expected = _gradients(model, name)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(_gradients(model, name), expected)
    if name != "gpt2":  # whose layers hand on no maps
        model.gradient_checkpointing_enable({"use_reentrant": True})
        with pytest.raises(RuntimeError, match="use_reentrant=True cuts the gradients"):
            _gradients(model, name)


def test_T5_trains_under_autocast():
    """Its position bias, which is float32, is learnt through evolving maps."""
    model = build("t5", alpha=0.3, beta=0.3).float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=inputs("t5")["input_ids"], labels=torch.randint(3, 30, (3, 5))).loss
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().max() > 0


def test_layers_may_be_dropped_in_training():
    torch.manual_seed(1)
    model = evolve(AutoModel.from_config(tiny("bart", encoder_layerdrop=0.5)), alpha=0.3, beta=0.3).train()
    for _ in range(8):
        assert model(torch.randint(3, 30, (2, 6)))[0].isfinite().all()


@pytest.mark.parametrize("number", [-1e4, -1e9, -torch.inf])
def test_a_mask_of_any_low_number_hides(number):
    model, words = build("bert", alpha=0.3, beta=0.3).eval(), inputs("bert")["input_ids"]
    shown = MASK.bool()[:, None, None].expand(-1, -1, 6, -1)
    expected = model(words, attention_mask=shown).logits
    floats = torch.where(shown, 0.0, torch.tensor(number).double())
    assert_close(model(words, attention_mask=floats).logits, expected)


def test_a_trace_adds_what_another_mask_adds():
    read = torch.jit.trace(lambda mask: huggingface._read_mask(mask)[1], torch.zeros(2, 2))
    assert_close(read(torch.ones(2, 2)), torch.ones(2, 2))


@torch.no_grad()
def test_a_masked_call_is_exported_and_compiled_whole():
    model, given = build("bert", alpha=0.3, beta=0.3).eval(), {"attention_mask": MASK}
    words = inputs("bert")["input_ids"]
    expected = model(words, **given).logits
    exported = torch.export.export(model, (words,), given, strict=False).module()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for run in (exported, compiled):
        assert_close(run(words, **given).logits[MASK.bool()], expected[MASK.bool()])


def _gradients(model, name):
    model.zero_grad()
    model(**inputs(name)).logits.square().sum().backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, tmp_path):
    model = build(name, alpha=0.4, beta=0.3, rule="predictive", learn_mix=True).eval()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = from_pretrained(type(model), tmp_path, dtype=torch.float64).eval()
    assert type(loaded) is type(model)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert_close(loaded(**inputs(name)).logits, model(**inputs(name)).logits)


def test_older_folders_whose_learnt_shares_have_no_axis_load(tmp_path):
    model = build("bert", alpha=0.4, beta=0.3, learn_mix=True)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config[huggingface.SETTINGS]["version"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shares = {key: x.squeeze(0) for key, x in model.state_dict().items() if key.endswith((".alpha", ".beta"))}
    save_file({**load_file(tmp_path / "model.safetensors"), **shares}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = from_pretrained(type(model), tmp_path, dtype=torch.float64)
    assert shares
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_without_evolution_is_named(tmp_path):
    build("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no 'evolving_attention'"):
        from_pretrained(BertForMaskedLM, tmp_path)
    with pytest.raises(ValueError, match="AutoModel: must be a model's own class"):
        from_pretrained(AutoModel, tmp_path)


def test_convolutions_that_another_loader_left_out_are_missed(tmp_path):
    """It keeps the settings, so that evolving it again or loading it would draw convolutions anew."""
    model = build("bert", alpha=0.4)
    model.save_pretrained(tmp_path)
    plain = BertForMaskedLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())
    with pytest.raises(ValueError, match=r"has no convolutions; .* del model.config.evolving_attention"):
        evolve(plain)
    with pytest.raises(ValueError, match=r"has no convolutions; .*from_pretrained"):
        plain(**inputs("bert"))
    with pytest.raises(ValueError, match=r"has no convolutions; .*from_pretrained"):
        AutoModel.from_pretrained(tmp_path)(**inputs("bert"))
    BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager")(**inputs("bert"))  # who asks gets it
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no .*\.evolution\.conv\.bias; was it saved by"):
        from_pretrained(BertForMaskedLM, tmp_path)


@pytest.mark.parametrize(
    "heads, layers, expected", [(12, 12, 12 * (144 * 9 + 12)), (16, 24, 24 * (256 * 9 + 16))], ids=["base", "large"]
)
def test_number_of_new_parameters(heads, layers, expected):
    """The papers print +0.9 M and +1.7 M for BERT-Base and -Large, which equation 4 cannot give."""
    sizes = {"num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": 64 * heads}
    with torch.device("meta"):
        model = AutoModel.from_config(tiny("bert", **sizes))
        before = sum(parameter.numel() for parameter in copy.deepcopy(model).parameters())
        assert sum(parameter.numel() for parameter in evolve(model).parameters()) - before == expected


@torch.no_grad()
def test_without_gradients_a_map_is_gone_when_the_next_layer_has_read_it(monkeypatch):
    kept, keep = [], huggingface._Maps.keep

    def watch(maps, module, a_logit):
        keep(maps, module, a_logit)
        kept.append(sum(x is not None for x in maps._of.values()))

    monkeypatch.setattr(huggingface._Maps, "keep", watch)
    build("bert", alpha=0.4, beta=0.3)(**inputs("bert"))
    assert kept == [1, 1]


@torch.no_grad()
def test_maps_and_masks_follow_the_layers_to_their_device():
    model = build("bert", alpha=0.4, beta=0.3)
    for layer in model.bert.encoder.layer[1:]:
        layer.to("meta")
    model.cls.to("meta")

    model.bert.encoder.layer[1].register_forward_pre_hook(lambda _, given: (given[0].to("meta"), *given[1:]))
    assert model(**inputs("bert")).logits.device.type == "meta"


@torch.no_grad()
def test_layers_share_the_reading_of_a_mask(monkeypatch):
    """And the context is not copied."""
    read, hide = [], huggingface.hide_rows
    monkeypatch.setattr(huggingface, "hide_rows", lambda *given: read.append(given) or hide(*given))
    build("bert", alpha=0.4, beta=0.3)(**inputs("bert"))
    assert len(read) == 1


@torch.no_grad()
def test_the_context_is_not_copied(calls):
    build("bert", alpha=0.4, beta=0.3).float()(**inputs("bert"))
    assert calls and not any(output.is_contiguous() for *_, output in calls)


def test_a_part_of_a_model_and_unknown_attention_are_refused():
    model = build("bert", alpha=0.4, beta=0.3)
    with pytest.raises(ValueError, match="maps belong to a call of a whole model"):
        model.bert.encoder(torch.randn(1, 4, 8, dtype=torch.float64))
    model = build("vit")
    del model.vit.layers[0].attention.is_causal
    with pytest.raises(ValueError, match="expected is_causal or is_decoder"):
        evolve(model)


def test_a_class_of_ones_own_evolves_under_any_name():
    model = build("bert")
    model.set_attn_implementation("eager")
    expected = model(**inputs("bert")).logits
    for layer in model.bert.encoder.layer:
        layer.attention.self.__class__ = type("Looks", (type(layer.attention.self),), {})
    evolve(model, 0, 0)
    assert sum(hasattr(module, "evolution") for module in model.modules()) == 3
    assert torch.equal(model(**inputs("bert")).logits, expected)


def test_quantised_layers_evolve():
    model = torch.ao.quantization.quantize_dynamic(build("bert").float(), {torch.nn.Linear})
    assert evolve(model)(**inputs("bert")).logits.isfinite().all()
