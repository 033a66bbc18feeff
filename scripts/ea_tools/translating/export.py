"""Export a translation or language model to ONNX, a folder for ea_runtime, and compare its scores with PyTorch's."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ea_artifacts.checkpoints import load, of_model, task_of
from ea_artifacts.command import Parser, UserError, positive, quiet, reporting, say
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import Run
from ea_tools.training import provenance
from ea_tools.translating.evaluate import describe

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from onnx import GraphProto
    from torch import Tensor

    from ea_fairseq import Translator

#: scores of the exported model may differ by this much from PyTorch's
CLOSE = {"float32": 1e-3, "int8": 0.3}
#: fairseq's tasks whose models can be exported
TASKS = ("translation", "language_modeling")
#: words of the sentences on which they are compared
LENGTHS = (1, 2, 5, 9, 17)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: load the run, write the folder beside its place, compare, and put it there."""
    with reporting("export"):
        quiet()
        args = parse(arguments)
        if args.out.exists():
            raise UserError(f"--out {args.out}: is there already; remove it, or name another folder")
        if not args.run.is_dir():
            raise UserError(f"--run {args.run}: no such folder")
        if Run(args.run).is_export:
            raise UserError(f"--run {args.run}: is exported already; name the run that it came from")
        checkpoint = args.checkpoint or (
            Run(args.run).averaged(args.average)[0] if args.average else Run(args.run).choose(say)
        )
        loaded, state = load_model(checkpoint, args.run, args.data)
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
    parser = Parser(prog="export.sh", description=__doc__)
    add = parser.add_argument
    add("--run", type=Path, required=True, metavar="RUN", help="a trained run")
    add("--out", type=Path, required=True, metavar="DIR", help="the folder to write, which must not be there yet")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, metavar="FILE", help="this checkpoint (default: the run's model)")
    which.add_argument("--average", type=positive, metavar="N", help="the average of the run's last N checkpoints")
    add("--data", type=Path, metavar="DIR", help="prepared data (default: the run's copy, or those of its training)")
    add("--int8", action="store_true", help="matrix products in 8 bits: a quarter of the size, faster, less exact")
    return parser.parse_args(arguments)


def load_model(checkpoint: Path, run: Path, data: Path | None = None) -> tuple[Translator, dict[str, Any]]:
    """A checkpoint's model with its text, and the checkpoint's content.

    Raises:
        UserError: there is no such checkpoint, or its model cannot be exported; the message names the obstacle.
    """
    state = load(checkpoint)
    task = task_of(state)["_name"]
    if task not in TASKS:
        raise UserError(f"{checkpoint}: was trained for {task}; models for {' and '.join(TASKS)} can be exported")
    if task_of(state).get("add_bos_token"):
        raise UserError(f"{checkpoint}: was trained with --add-bos-token; exports start sentences with </s> alone")
    if broken := next((name for name, weight in state["model"].items() if not weight.isfinite().all()), None):
        raise UserError(f"{checkpoint}: {broken} has values that are not finite; choose another checkpoint")
    from ea_fairseq.export import reason_against
    from ea_fairseq.translator import of_checkpoints

    preparation = of_model(checkpoint, state, run, Preparation.at(data) if data else None)
    loaded = of_checkpoints([checkpoint], preparation.folder)
    if reason := reason_against(loaded.hub.models[0]):
        raise UserError(f"{checkpoint}: {reason}; such a model cannot be exported")
    return loaded, state


def write(loaded: Translator, int8: bool, state: dict[str, Any], folder: Path) -> None:
    """The two graphs, the text's files, and model.json with the digests of all of them."""
    from ea_fairseq.export import export

    model, task = loaded.hub.models[0], loaded.hub.task
    say("exporting; it takes about a minute")
    export(model, folder)
    if int8:
        quantise(folder)
    strip(folder)
    for path in loaded.text.files:
        shutil.copyfile(path, folder / path.name)
    kind = task_of(state)["_name"]
    sides = {"source": "dict.txt", "target": "dict.txt"}
    if kind == "translation":
        sides = {"source": f"dict.{task.cfg.source_lang}.txt", "target": f"dict.{task.cfg.target_lang}.txt"}
    for name in set(sides.values()):
        shutil.copyfile(loaded.text.files[0].with_name(name), folder / name)
    limits = loaded.hub.max_positions
    description: dict[str, Any] = {
        "task": kind,
        **describe(state),
        "averaged": state.get("extra_state", {}).get("averaged", []),
        "int8": int8,
        "max_positions": [int(limits)] * 2 if isinstance(limits, int) else [int(limit) for limit in limits],
        "dictionaries": sides,
        "checkpoint": loaded.checkpoints[0].name,
        "commit": provenance.git_commit(),
    }
    describe_folder(folder, description)


def describe_folder(folder: Path, description: dict[str, Any]) -> None:
    """Write model.json, with the digests of all files that are in the folder."""
    from ea_artifacts.files import sha256
    from ea_runtime.folder import FORMAT

    digests = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    whole = {"format": FORMAT, **description, "search": {"beam": 5, "lenpen": 1.0}, "digests": digests}
    (folder / "model.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def quantise(folder: Path) -> None:
    """Weights of matrix products in 8 bits, a scale for each output; maps' convolutions and norms stay float32."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name in sorted(path.name for path in folder.glob("*.onnx")):
        float32 = folder / f"float32-{name}"
        (folder / name).rename(float32)
        options = {
            "per_channel": True,
            "weight_type": QuantType.QInt8,
            "reduce_range": True,  # 7 bits: CPUs without VNNI add two products in 16 bits, and cut larger sums off
            "op_types_to_quantize": ["MatMul", "Gemm", "Gather"],
        }
        quantize_dynamic(float32, folder / name, **options)
        float32.unlink()
        shrink(folder / name)


def shrink(path: Path) -> None:
    """Store positions and convolutions over time in 8 bits, and an embedding that is shared only once."""
    import onnx

    model = onnx.load(path)
    _share_embedding(model.graph)
    _pack(model.graph)
    onnx.save(model, path)


def _share_embedding(graph: GraphProto) -> None:
    """An embedding that is shared with the output reads its columns there; the other copy is left out."""
    from onnx import TensorProto, helper

    stored = {value.name: value for value in graph.initializer}
    for number, node in enumerate(graph.node):
        table = node.input[0].removesuffix("_quantized") if node.op_type == "Gather" else ""
        shared, scales = f"{table}_Transposed_quantized", f"{table}_Transposed_scale"
        if shared not in stored:
            continue
        (after,) = [other for other in graph.node if node.output[0] in other.input]  # DequantizeLinear
        columns, of_words = [f"{table}_{name}" for name in ("columns", "column_scales")]
        nodes = [
            helper.make_node("Gather", [shared, node.input[1]], [columns], axis=1),  # C x R x 1
            helper.make_node("Gather", [scales, node.input[1]], [of_words], axis=0),  # R x 1
            helper.make_node("Cast", [columns], [f"{columns}_float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{columns}_float", of_words], [f"{columns}_scaled"]),
            helper.make_node("Transpose", [f"{columns}_scaled"], after.output, perm=[1, 2, 0]),
        ]
        for name in (node.input[0], *after.input[1:]):
            graph.initializer.remove(stored[name])
        graph.node.remove(after)
        graph.node.remove(node)
        for place, new in enumerate(nodes, number):
            graph.node.insert(place, new)
        return


def _pack(graph: GraphProto) -> None:
    """Large matrices in 8 bits, a scale for each row. ONNX Runtime unpacks them once, when it loads the model."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    large = [
        value
        for value in graph.initializer
        # the convolutions of maps have four axes
        if value.data_type == TensorProto.FLOAT and len(value.dims) in (2, 3) and math.prod(value.dims) >= 4096
    ]
    for value in large:
        weight = numpy_helper.to_array(value)
        scale = np.abs(weight).max(axis=tuple(range(1, weight.ndim)), keepdims=True).clip(1e-9) / 127
        packed, scales = f"{value.name}_packed", f"{value.name}_scales"
        graph.initializer.remove(value)
        graph.initializer.append(numpy_helper.from_array((weight / scale).round().astype(np.int8), packed))
        graph.initializer.append(numpy_helper.from_array(scale, scales))
        graph.node.insert(0, helper.make_node("Mul", [f"{packed}_float", scales], [value.name]))
        graph.node.insert(0, helper.make_node("Cast", [packed], [f"{packed}_float"], to=TensorProto.FLOAT))


def strip(folder: Path) -> None:
    """Take out what only a debugger reads: where each node comes from, and the shapes in between."""
    import onnx

    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        del model.graph.value_info[:]
        for node in model.graph.node:
            del node.metadata_props[:]
        onnx.save(model, path)


def compare(loaded: Translator, folder: Path, close: float) -> float:
    """The largest mean difference of a sentence's scores between the exported model and PyTorch, on made-up sentences.

    Both are given the target, so that a tie does not matter. Targets differ in length: they leave the batch in turn.

    Raises:
        UserError: they differ by more than `close`.
    """
    import torch

    from ea_runtime import LanguageModel
    from ea_runtime import Translator as Runtime

    model, task = loaded.hub.models[0], loaded.hub.task
    limits = loaded.hub.max_positions
    most = (limits if isinstance(limits, int) else min(limits)) - 1  # one position is for the end of the sentence
    lengths = [min(length, most) for length in LENGTHS]
    sources, targets = _sentences(task.source_dictionary, lengths), _sentences(task.target_dictionary, lengths[::-1])
    is_translation, lists = (folder / "encoder.onnx").is_file(), [target.tolist() for target in targets]
    if is_translation:
        runtime = Runtime(folder, threads=1)
        settings = runtime.settings({"beam": 1, "max_len_b": max(lengths), "unnormalized": True})
        results = runtime.search_ids([source.tolist() for source in sources], settings, lists)
        exported = [best.score for (best,) in results]
    else:
        exported = [best.score for best in LanguageModel(folder, threads=1).score_ids(lists, len(lists))]
    differences = []
    for source, target, score in zip(sources, targets, exported, strict=True):
        before = target.roll(1)[None]  # the end of a sentence comes before its first word
        arguments = (source[None], torch.tensor([len(source)]), before) if is_translation else (before,)
        of_words = model.get_normalized_probs(model(*arguments), log_probs=True)[0].detach()
        expected = float(of_words.gather(1, target[:, None]).sum())
        differences.append(abs(score - expected) / len(target))
    largest = next((x for x in differences if not x <= close), max(differences))  # NaN is the largest of all
    if not largest <= close:
        raise UserError(
            f"the exported model's scores differ from PyTorch's by {largest:.2g}, more than {close}: nothing kept"
        )
    return largest


def _sentences(dictionary: Dictionary, lengths: Sequence[int]) -> list[Tensor]:
    """Random words, and the end of each sentence."""
    import torch

    chance, end = torch.Generator().manual_seed(1), torch.tensor([dictionary.eos()])
    words = [torch.randint(dictionary.nspecial, len(dictionary), (length,), generator=chance) for length in lengths]
    return [torch.cat([of, end]) for of in words]
