"""Tiny vocabularies, batches and models, built through fairseq's own parser."""

import threading
from types import SimpleNamespace

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY

import ea_fairseq  # noqa: F401  (registers the architectures)
from evolving_attention import evolution, kernels

TINY = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-attention-heads 4 --encoder-layers 3 "
    "--decoder-attention-heads 4 --decoder-layers 2 --dropout 0"
).split()


def small_call():
    """A call that the CPU's kernel knows: one sentence of one token, one head."""
    one, coefficients = torch.ones(1, 1, 1, 1), evolution.LOGITS_ONLY
    return kernels.Call(one, one, one, 1.0, evolution.Geometry.ENCODER_SELF, 3, coefficients)


def dictionary(size=20):
    words = Dictionary()
    for i in range(size):
        words.add_symbol(f"w{i}")
    return words


def model_args(arch, *flags):
    """Parse flags as fairseq-train does."""
    parser = options.get_training_parser()
    return options.parse_args_and_arch(parser, ["data", "--arch", arch, "--task", "translation", *map(str, flags)])


def build(arch="ea_transformer_base", *flags, size=TINY, train=False, dtype=torch.float32):
    """A model with random weights, convolutions included, on a task that is only a pair of dictionaries."""
    args = model_args(arch, *size, *flags)
    words = dictionary()
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task).to(dtype)
    model.train(train)
    return model


def amplify_(model, factor=4.0):
    """Make maps matter: with fresh weights attention is nearly uniform, and its errors nearly invisible."""
    for name, parameter in model.named_parameters():
        share = parameter.dim() == 0  # learnt alpha and beta: beyond 1 they amplify rounding, not maps
        if not share and ("q_proj.weight" in name or "k_proj.weight" in name or "evolution" in name):
            parameter.data *= factor
    return model


def batch(lengths, *, left_pad=False, eos_first=False, words=20, seed=1):
    """B x longest token ids, each sentence ending in (or with eos_first starting with) the end-of-sentence symbol."""
    symbols = dictionary(words)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((len(lengths), max(lengths)), symbols.pad())
    for row, length in zip(tokens, lengths, strict=True):
        sentence = torch.randint(symbols.nspecial, len(symbols), (length,), generator=generator)
        sentence[0 if eos_first else -1] = symbols.eos()
        row[slice(-length, None) if left_pad else slice(length)] = sentence
    return tokens


#: what every short training here has in common: fairseq's usual recipe, on the CPU
TRAINING = (
    "--task translation --optimizer adam --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 10 "
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 --seed 3 --cpu --no-progress-bar "
    "--log-format json --log-interval 1 --num-workers 0 --dropout 0.1 --share-all-embeddings "
    "--required-batch-size-multiple 1"
).split()


class EncoderOutput(torch.nn.Module):
    """An encoder whose result is one tensor, S x B x C."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens):
        return self.encoder(tokens)["encoder_out"][0]


def in_threads(work, count=8):
    """Run work(number) in several threads; the first error of any of them is raised here."""
    faults = []

    def run(number):
        try:
            work(number)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
