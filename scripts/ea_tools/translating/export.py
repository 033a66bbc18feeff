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

from ea_tools.common import UserError, reporting, say
from ea_tools.training import provenance

if TYPE_CHECKING:
    from ea_fairseq import Translator

#: scores of the exported model may differ by this much from PyTorch's
CLOSE = {"float32": 1e-3, "int8": 1.0}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: load the run, write the folder beside its place, compare, and put it there."""
    with reporting("export"):
        args = parse(arguments)
        if args.out.exists():
            raise UserError(f"--out {args.out}: is there already; remove it, or name another folder")
        import ea_fairseq

        try:
            loaded = ea_fairseq.load(args.run, args.checkpoint)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(str(error)) from None
        if len(loaded.hub.models) > 1:
            raise UserError("--checkpoint: an ensemble cannot be exported; name one checkpoint")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".export-") as work:
            folder = Path(work) / "model"
            folder.mkdir()
            write(loaded, args, folder)
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
    add("--checkpoint", metavar="FILE", help="a checkpoint in the run (default: the run's model)")
    add("--int8", action="store_true", help="matrix products in 8 bits: a quarter of the size, faster, less exact")
    return parser.parse_args(arguments)


def write(loaded: Translator, args: argparse.Namespace, folder: Path) -> None:
    """The two graphs, the text's files, and model.json with the digests of all of them."""
    from ea_fairseq.export import export
    from ea_runtime.translator import FORMAT, digest

    model, task = loaded.hub.models[0], loaded.hub.task
    say("exporting encoder and decoder; it takes about half a minute")
    export(model, folder)
    if args.int8:
        quantise(folder)
    for path in loaded.text.files:
        shutil.copyfile(path, folder / path.name)
    languages = {"source": task.cfg.source_lang, "target": task.cfg.target_lang}
    dictionaries = {side: f"dict.{language}.txt" for side, language in languages.items()}
    for side, dictionary in (("source", task.source_dictionary), ("target", task.target_dictionary)):
        dictionary.save(str(folder / dictionaries[side]))
    description: dict[str, Any] = {
        "format": FORMAT,
        "architecture": loaded.hub.cfg.model.arch,
        "int8": args.int8,
        "max_positions": [int(x) for x in loaded.hub.max_positions],
        "search": {"beam": 5, "lenpen": 1.0},
        "dictionaries": dictionaries,
        "checkpoint": loaded.checkpoints[0].name,
        "commit": provenance.git_commit(),
        "digests": {path.name: digest(path) for path in sorted(folder.iterdir())},
    }
    (folder / "model.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


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
