"""The candidates of benchmark_decoding.sh beside fairseq: exported models, and CTranslate2 where it is installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import torch
from fairseq.models import BaseFairseqModel as FairseqModel
from fairseq.tasks import FairseqTask

from ea_artifacts.command import UserError
from ea_fairseq.export import export
from ea_runtime import Translator
from ea_runtime.search import Settings
from ea_tools.bench.common import Batch, Candidate
from ea_tools.translating.export import describe_folder, quantise

#: candidate -> description
NAMES = {
    "exported": "ours, exported",
    "exported int8": "ours, exported, int8",
    "ctranslate2": "CTranslate2, plain Transformer",
    "ctranslate2 int8": "CTranslate2, plain, int8",
}


def write(models: Mapping[str, FairseqModel], task: FairseqTask, folder: Path) -> dict[str, Path]:
    """Export {"ours": ..., "stock": ...}: a folder for each of NAMES that can be timed here."""
    folders = {name: folder / name.replace(" ", "-") for name in NAMES}
    folders["exported"].mkdir()
    export(models["ours"], folders["exported"])
    shutil.copytree(folders["exported"], folders["exported int8"])
    quantise(folders["exported int8"])
    for name in ("exported", "exported int8"):
        _write_text(task, folders[name])
    if importlib.util.find_spec("ctranslate2") is None:
        return {name: path for name, path in folders.items() if name.startswith("exported")}
    _convert(models["stock"], task, folders)
    return folders


def _write_text(task: FairseqTask, folder: Path) -> None:
    """The files beside the graphs, for text whose words are the dictionary's."""
    prep = {"source_lang": "xx", "target_lang": "yy", "tokenizer": "none", "bpe": "subword_nmt", "lowercase": False}
    (folder / "PREP.json").write_text(json.dumps(prep), encoding="utf-8")
    (folder / "code").write_text("#version: 0.2\n", encoding="utf-8")
    dictionaries = {"source": "dict.xx.txt", "target": "dict.yy.txt"}
    task.source_dictionary.save(str(folder / dictionaries["source"]))
    task.target_dictionary.save(str(folder / dictionaries["target"]))
    describe_folder(folder, {"dictionaries": dictionaries, "max_positions": list(task.max_positions())})


def _convert(model: FairseqModel, task: FairseqTask, folders: Mapping[str, Path]) -> None:
    """A plain Transformer for CTranslate2, by the functions of its converter."""
    from ctranslate2.converters import fairseq as converter
    from ctranslate2.specs import TransformerSpec

    cfg = model.cfg
    layers, heads = (cfg.encoder.layers, cfg.decoder.layers), cfg.encoder.attention_heads
    for name, quantisation in (("ctranslate2", None), ("ctranslate2 int8", "int8")):
        spec = TransformerSpec.from_config(layers, heads, pre_norm=cfg.encoder.normalize_before)
        with torch.no_grad():
            converter.set_transformer_encoder(spec.encoder, model.encoder)
            converter.set_transformer_decoder(spec.decoder, model.decoder)
        spec.register_source_vocabulary(converter._get_vocab(task.source_dictionary))
        spec.register_target_vocabulary(converter._get_vocab(task.target_dictionary))
        spec.config.decoder_start_token, spec.config.add_source_eos = spec.config.eos_token, True
        spec.validate()
        spec.optimize(quantization=quantisation)
        folders[name].mkdir()
        spec.save(str(folders[name]))


def candidates(folders: Mapping[str, Path], threads: int, beam: int, task: FairseqTask) -> dict[str, Candidate]:
    """Functions of a batch of fairseq's that decode it and give the number of tokens, by name."""
    words, pad = task.source_dictionary, task.source_dictionary.pad()

    def sources(batch: Batch) -> list[list[int]]:
        return [row[row != pad].tolist() for row in batch["net_input"]["src_tokens"]]

    def limits(batch: Batch) -> tuple[int, int]:
        steps = round(batch["ntokens"] / batch["nsentences"]) - 1  # end of sentence follows
        return max(steps, 1), steps

    def by_runtime(folder: Path) -> Candidate:
        translator = Translator(folder, threads)

        def decode(batch: Batch) -> int:
            shortest, longest = limits(batch)
            settings = Settings(beam=beam, min_len=shortest, max_len_b=longest)
            return sum(len(best.tokens) + 1 for best, *_ in translator.search_ids(sources(batch), settings, None))

        return decode

    def by_ctranslate2(folder: Path) -> Candidate:
        import ctranslate2

        translator = ctranslate2.Translator(str(folder), "cpu", inter_threads=1, intra_threads=threads)

        def decode(batch: Batch) -> int:
            shortest, longest = limits(batch)
            tokens = [[words[number] for number in row[:-1]] for row in sources(batch)]
            lengths = {"min_decoding_length": shortest, "max_decoding_length": longest}
            translations = translator.translate_batch(tokens, beam_size=beam, max_batch_size=0, **lengths)
            return sum(len(one.hypotheses[0]) + 1 for one in translations)

        return decode

    makers = {name: by_runtime if name.startswith("exported") else by_ctranslate2 for name in folders}
    return {name: makers[name](folder) for name, folder in folders.items()}


def require(args: Namespace, device: str) -> None:
    """Refuse what cannot be timed: exported models run on the CPU, in their own precision."""
    if device != "cpu" or args.precision != ["fp32"]:
        raise UserError("--exported: exported models run on the CPU; add --device cpu, and leave --precision at fp32")
