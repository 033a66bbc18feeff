"""Export a trained translation model to ONNX: a folder for ea_runtime, checked against PyTorch before it is left.

Axes: N sentences.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ea_tools.checkpoints import choose, load, section
from ea_tools.common import UserError, positive, quiet, reporting, say
from ea_tools.preparation import of_model
from ea_tools.training import provenance
from ea_tools.translating.evaluate import choose_checkpoint, describe
from ea_tools.translating.exported import is_export

if TYPE_CHECKING:
    from ea_fairseq import Translator

#: scores of the exported model may differ by this much from PyTorch's
CLOSE = {"float32": 1e-3, "int8": 1.0}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: load the run, write the folder beside its place, compare, and put it there."""
    with reporting("export"):
        quiet()
        args = parse(arguments)
        if args.out.exists():
            raise UserError(f"--out {args.out}: is there already; remove it, or name another folder")
        if not args.run.is_dir():
            raise UserError(f"--run {args.run}: no such folder")
        if is_export(args.run):
            raise UserError(f"--run {args.run}: is exported already; name the run that it came from")
        checkpoint = args.checkpoint or (_average(args) if args.average else choose(args.run))
        loaded, state = load_translator(checkpoint, args.run)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".export-") as work:
            folder = Path(work) / "model"
            folder.mkdir()
            write(loaded, args.int8, state, folder)
            largest = compare(loaded, folder, CLOSE["int8" if args.int8 else "float32"])
            folder.rename(args.out)
        size = sum(path.stat().st_size for path in args.out.iterdir()) / 1e6
        say(f"{args.out}: {size:.1f} MB; scores differ from PyTorch's by at most {largest:.1e}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="export.sh", description=__doc__)
    add = parser.add_argument
    add("--run", type=Path, required=True, metavar="RUN", help="a trained run")
    add("--out", type=Path, required=True, metavar="DIR", help="the folder to write, which must not be there yet")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, metavar="FILE", help="this checkpoint (default: the run's model)")
    which.add_argument("--average", type=positive, metavar="N", help="the average of the run's last N checkpoints")
    add("--int8", action="store_true", help="matrix products in 8 bits: a quarter of the size, faster, less exact")
    return parser.parse_args(arguments)


def _average(args: argparse.Namespace) -> Path:
    """The average of the run's last checkpoints, as evaluate.sh takes it."""
    return Path(choose_checkpoint(args.run, None, best=False, count=args.average)[0])


def load_translator(checkpoint: Path, run: Path) -> tuple[Translator, dict[str, Any]]:
    """A checkpoint's model with its text, and the checkpoint's content.

    Raises:
        UserError: there is no such checkpoint, or its model cannot be exported; the message names the obstacle.
    """
    state = load(checkpoint)
    task = section(state, "task").get("_name", "translation")
    if task != "translation":
        raise UserError(f"{checkpoint}: was trained for {task}; only models for translation can be exported")
    preparation = of_model(checkpoint, state, run)
    from ea_fairseq import hub
    from ea_fairseq.export import reason_against

    loaded = hub.translator([checkpoint], preparation.folder)
    if reason := reason_against(loaded.hub.models[0]):
        raise UserError(f"{checkpoint}: {reason}; such a model cannot be exported")
    return loaded, state


def write(loaded: Translator, int8: bool, state: dict[str, Any], folder: Path) -> None:
    """The two graphs, the text's files, and model.json with the digests of all of them."""
    from ea_fairseq.export import export

    model, task = loaded.hub.models[0], loaded.hub.task
    say("exporting encoder and decoder; it takes about half a minute")
    export(model, folder)
    if int8:
        quantise(folder)
    strip(folder)
    for path in loaded.text.files:
        shutil.copyfile(path, folder / path.name)
    languages = {"source": task.cfg.source_lang, "target": task.cfg.target_lang}
    dictionaries = {side: f"dict.{language}.txt" for side, language in languages.items()}
    for name in set(dictionaries.values()):
        shutil.copyfile(Path(task.cfg.data) / name, folder / name)
    description: dict[str, Any] = {
        **describe(state),
        "averaged": state.get("extra_state", {}).get("averaged", []),
        "int8": int8,
        "max_positions": [int(x) for x in loaded.hub.max_positions],
        "dictionaries": dictionaries,
        "checkpoint": loaded.checkpoints[0].name,
        "commit": provenance.git_commit(),
    }
    describe_folder(folder, description)


def describe_folder(folder: Path, description: dict[str, Any]) -> None:
    """Write model.json, with the digests of all files that are in the folder."""
    from ea_runtime.translator import FORMAT, digest

    digests = {path.name: digest(path) for path in sorted(folder.iterdir())}
    whole = {"format": FORMAT, **description, "search": {"beam": 5, "lenpen": 1.0}, "digests": digests}
    (folder / "model.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def quantise(folder: Path) -> None:
    """Weights of matrix products in 8 bits, a scale for each output; convolutions and normalisations stay float32."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name in ("encoder.onnx", "decoder.onnx"):
        given = folder / f"float32-{name}"
        (folder / name).rename(given)
        options = {
            "per_channel": True,
            "weight_type": QuantType.QInt8,
            "op_types_to_quantize": ["MatMul", "Gemm", "Gather"],
        }
        quantize_dynamic(given, folder / name, **options)
        given.unlink()


def strip(folder: Path) -> None:
    """Take out what only a debugger reads: where each node comes from, and the shapes in between."""
    import onnx

    for name in ("encoder.onnx", "decoder.onnx"):
        model = onnx.load(folder / name)
        del model.graph.value_info[:]
        for node in model.graph.node:
            del node.metadata_props[:]
        onnx.save(model, folder / name)


def compare(loaded: Translator, folder: Path, close: float) -> float:
    """The largest difference of scores between the exported model and PyTorch, on made-up sentences.

    Both force PyTorch's translation, so that a tie does not matter.

    Raises:
        UserError: they differ by more than `close`.
    """
    import torch

    from ea_runtime import Translator as Runtime
    from ea_runtime.translator import EOS

    runtime, dictionary = Runtime(folder, threads=1), loaded.hub.task.source_dictionary
    chance = torch.Generator().manual_seed(1)
    lengths = (1, 2, 5, 9, 17)
    largest = 0.0
    for length in lengths:
        source = torch.randint(dictionary.nspecial, len(dictionary), (length,), generator=chance)
        source = torch.cat([source, torch.tensor([EOS])])
        (expected,) = loaded.hub.generate([source], beam=1)
        tokens = expected[0]["tokens"].tolist()[:-1]
        settings = runtime.settings({"beam": 1, "max_len_b": len(tokens)})
        (found,) = runtime.search_ids([source.tolist()], settings, [tokens])
        largest = max(largest, abs(found[0].score - float(expected[0]["score"])))
    if largest > close:
        raise UserError(
            f"the exported model's scores differ from PyTorch's by {largest:.2g}, more than {close}: nothing kept"
        )
    return largest


if __name__ == "__main__":
    main()
