"""The promises that every model keeps: the models, and checks of one model."""

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from torch.testing import assert_close

from helpers.models import amplify_, batch, build

BASE = "ea_transformer_base --ea-alpha 0.5 --ea-beta 0.5"
PREDICTIVE = "ea_transformer_base --ea-rule predictive --ea-alpha 0.5"
#: name of a test case -> architecture and flags
MODELS = {
    "kernel 1": f"{BASE} --ea-kernel-size 1",
    "kernel 3, pre-norm": f"{BASE} --encoder-normalize-before --decoder-normalize-before",
    "kernel 5": f"{BASE} --ea-kernel-size 5",
    "depthwise": f"{BASE} --ea-conv depthwise --ea-kernel-size 5",
    "gated": f"{BASE} --ea-conv gated",
    "no decoder convolution": f"{BASE} --ea-decoder-beta 0",
    "no cross convolution": f"{BASE} --ea-cross-beta 0",
    "learnt": f"{BASE} --ea-learn-mix",
    "skips in decoders": f"{BASE} --ea-decoder-alpha 0.4 --ea-cross-alpha 0.3 --decoder-layers 3",
    "a skip in decoder self-attention, learnt": f"{BASE} --ea-decoder-alpha 0.4 --ea-learn-mix",
    "from the second, no skip": "ea_transformer_base --ea-rule evolving-from-second --ea-alpha 0 --ea-beta 0.5",
    "predictive": PREDICTIVE,
    "predictive everywhere, 3 convolutions": f"{PREDICTIVE} --ea-conv-layers 3 --ea-decoder-alpha 0.4 "
    "--ea-cross-alpha 0.3 --decoder-layers 3",
    "residual": "ea_transformer_base --ea-rule residual --ea-alpha 0.5",
    "realformer": "ea_transformer_base --ea-rule realformer",
    "multiplicative": f"{BASE} --ea-score multiplicative",
    "concatenative": "ea_transformer_base --ea-score concatenative --ea-beta 0",
    "relative": f"{BASE} --ea-relative-positions 2",
    "relative, not absolute": "ea_transformer_base --ea-beta 0 --ea-relative-positions 3 "
    "--no-token-positional-embeddings",
    "relative, additive": f"{PREDICTIVE} --ea-score additive --ea-relative-positions 2",
    "two branches": "ea_transformer_base --ea-conv-branch --ea-alpha 0 --ea-beta 0",
    "two branches, predictive": f"{PREDICTIVE} --ea-conv-branch",
    "two branches, evolving, relative": f"{BASE} --ea-conv-branch --ea-relative-positions 2",
    "language model": "ea_transformer_lm --ea-beta 0.5 --ea-kernel-size 5 --ea-decoder-alpha 0.3",
    "RoBERTa": "ea_roberta --ea-alpha 0.4 --ea-beta 0.5",
    "BART": "ea_bart --ea-alpha 0.4 --ea-beta 0.5",
}
#: the models with a decoder
DECODERS = [name for name in MODELS if name != "RoBERTa"]


def each_model(names=MODELS):
    return pytest.mark.parametrize("name", names)


def lively(name, **options):
    """A model in which everything matters: fresh weights leave attention nearly uniform and relative positions zero."""
    model = amplify_(build(*MODELS[name].split(), **options), 20 if name in ("RoBERTa", "BART") else 4)
    for key, parameter in model.named_parameters():
        if ".score." in key or "relative_positions" in key:
            parameter.data.normal_(std=0.5)  # 1 / sqrt(D), as the scale of dot products; more makes rounding visible
    return model


def sharp(*flags, **options):
    """A model whose hypotheses differ, and end at different times."""
    model = amplify_(build("ea_transformer_base", "--ea-beta", 0.5, *flags, **options))
    weight = model.decoder.output_projection.weight.data
    weight *= 3
    weight[2] *= 4  # the end is likely at some steps, and out of the question at others
    return model


def sample_of(source):
    """A batch for fairseq's search: source is B x S."""
    return {"id": torch.arange(len(source)), "net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}


def search(model, source, beam=5, longest=14, prefix=None):
    """fairseq's hypotheses for source, B x S: a list for each sentence, best first."""
    generator = SequenceGenerator([model], model.decoder.dictionary, beam_size=beam, max_len_a=0, max_len_b=longest)
    return generator.generate([model], sample_of(source), prefix_tokens=prefix)


def has(model, side):
    """Whether a model has this side: RoBERTa has no decoder, a language model no encoder."""
    return hasattr(model, "decoder") if side == "decoder" else hasattr(model, "encoder")


def outputs(model, source, target):
    """B x T x V: the scores of a model for the sides that it has."""
    if not has(model, "decoder"):
        return model(source)[0]
    return model(source, None, target)[0] if has(model, "encoder") else model(target)[0]


@torch.no_grad()
def scored(model):
    """The scores of a batch, and beam search's hypotheses where there is a decoder; a language model goes on."""
    source, target = batch([6, 3]), batch([5, 4], eos_first=True)
    scores = outputs(model, source, target)[:, :3]
    if not has(model, "decoder"):
        return scores, []
    prefix = None if has(model, "encoder") else target[:, 1:3]
    hypotheses = search(model, source, beam=3, longest=5, prefix=prefix)
    return scores, [[beam["tokens"].tolist() for beam in beams] for beams in hypotheses]


def check_steps(model, source=None, beams=2, dropped=(), steps=8, seed=3):
    """Step by step equals teacher forcing while beams move; ``dropped``: after which steps a sentence is finished.

    source: B x S tokens, or None for a model that is a decoder alone.
    """
    generator = torch.Generator().manual_seed(seed)
    sentences, options = 1 if source is None else len(source), {}
    device = next(model.parameters()).device
    if source is not None:
        order = torch.arange(sentences, device=device).repeat_interleave(beams)
        options["encoder_out"] = model.encoder.reorder_encoder_out(model.encoder(source), order)
    tokens, state = torch.full((sentences * beams, 1), 2, device=device), {}
    for step in range(steps):
        ours = model.decoder(tokens, incremental_state=state, **options)[0][:, -1]
        assert_close(ours, model.decoder(tokens, **options)[0][:, -1], rtol=1e-5, atol=1e-5)
        kept = list(range(sentences))
        if step in dropped:
            kept.pop(step % sentences)
        sentences = len(kept)
        choice = torch.randint(beams, (sentences, beams), generator=generator)  # a beam may go on twice or never
        order = (torch.tensor(kept)[:, None] * beams + choice).view(-1).to(device)
        model.decoder.reorder_incremental_state_scripting(state, order)
        if source is not None:
            options["encoder_out"] = model.encoder.reorder_encoder_out(options["encoder_out"], order)
        new = torch.randint(4, 24, (sentences * beams, 1), generator=generator).to(device)
        tokens = torch.cat([tokens[order], new], dim=1)


def check_alone_or_in_a_batch(model, left_source, left_target, outputs=outputs):
    """A sentence has the same output alone, but for its padding, which may stand on either side."""
    source, target = batch([2, 9, 5], left_pad=left_source), batch([8, 1, 4], left_pad=left_target, eos_first=True)
    output_side = target if has(model, "decoder") else source
    for row, together in enumerate(outputs(model, source, target)):
        alone = outputs(model, *(side[row][side[row].ne(1)][None] for side in (source, target)))
        assert_close(together[output_side[row].ne(1)], alone[0], rtol=1e-5, atol=1e-5)
