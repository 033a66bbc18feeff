"""Tiny vocabularies, batches and models of every kind, built through fairseq's own parser."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, build_model

import ea_fairseq  # noqa: F401  (registers the architectures)
from evolving_attention import evolution
from evolving_attention.call import Call

ENCODER = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-attention-heads 4 --encoder-layers 3 --dropout 0"
).split()
TINY = [*ENCODER, "--decoder-attention-heads", "4", "--decoder-layers", "2"]
LM = (
    "--decoder-embed-dim 16 --decoder-ffn-embed-dim 24 --decoder-attention-heads 4 --decoder-layers 2 --dropout 0 "
    "--attention-dropout 0 --decoder-input-dim 16 --decoder-output-dim 16"
).split()
ROBERTA = [*ENCODER, "--attention-dropout", "0", "--max-positions", "20"]
BART = [*TINY, "--max-source-positions", "40", "--max-target-positions", "40"]
#: part of an architecture's name -> the task and the size of a tiny model
KINDS = {
    "transformer_lm": ("language_modeling", LM),
    "roberta": ("masked_lm", ROBERTA),
    "bart": ("denoising", BART),
    "cmlm": ("translation_lev", [*TINY, "--share-all-embeddings"]),
    "": ("translation", TINY),
}


def small_call():
    """A call that the CPU's kernel knows: one sentence of one token, one head."""
    one, coefficients = torch.ones(1, 1, 1, 1), evolution.LOGITS_ONLY
    return Call(one, one, one, coefficients=coefficients)


def dictionary(size=20):
    words = Dictionary()
    for i in range(size):
        words.add_symbol(f"w{i}")
    return words


def kind_of(arch):
    """The task and the size of a tiny model of this architecture."""
    return next(kind for name, kind in KINDS.items() if name in arch)


def model_args(arch, *flags):
    """Parse flags as fairseq-train does."""
    parser, (task, _) = options.get_training_parser(), kind_of(arch)
    return options.parse_args_and_arch(parser, ["data", "--arch", arch, "--task", task, *map(str, flags)])


def tiny_task(name):
    """A task that is only a pair of dictionaries. The last symbol is <mask>, but for translation."""
    words = dictionary()
    if name != "translation":
        words.add_symbol("<mask>")
    return SimpleNamespace(source_dictionary=words, target_dictionary=words, max_positions=lambda: 20)


def build(arch="ea_transformer_base", *flags, size=None, train=False, dtype=torch.float32):
    """A model with random weights, convolutions included."""
    task, tiny = kind_of(arch)
    args = model_args(arch, *(tiny if size is None else size), *flags)
    if arch.startswith("transformer_lm"):  # fairseq's own reads its dataclass only
        model = build_model(convert_namespace_to_omegaconf(args).model, tiny_task(task))
    else:
        model = ARCH_MODEL_REGISTRY[arch].build_model(args, tiny_task(task))
    return model.to(dtype).train(train)


def amplify_(model, factor=4.0):
    """Make maps matter: with fresh weights attention is nearly uniform, and its errors nearly invisible."""
    for name, parameter in model.named_parameters():
        share = name.endswith((".alpha", ".beta"))  # learnt alpha and beta: beyond 1 they amplify rounding, not maps
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


#: the flags of every short training: fairseq's usual recipe, on the CPU
TRAINING = (
    "--task translation --optimizer adam --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 10 "
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 --seed 3 --cpu --no-progress-bar "
    "--log-format json --log-interval 1 --num-workers 0 --dropout 0.1 --share-all-embeddings "
    "--required-batch-size-multiple 1"
).split()


def in_threads(work, count=8):
    """Run work(number) in several threads; the first error of any of them is raised here."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
