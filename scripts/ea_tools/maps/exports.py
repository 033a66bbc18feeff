"""Files that hold all of a model's maps: numbers for NumPy, and a page to click through."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy

from ea_tools.figures import style
from ea_tools.maps import KINDS
from ea_tools.maps.look import AXES, PARTS, Look, Row, columns_of, of_words, parts_of


def numbers(look: Look) -> bytes:
    """Every layer's maps and parts as a .npz file: encoder.1.weights, K x T x S, and so on; tokens.source, ..."""
    arrays = {f"tokens.{name}": numpy.array(labels) for name, labels in look.tokens.items()}
    for name, words in look.words.items():
        arrays |= {f"words.{name}": numpy.array(words.labels), f"words.{name}.of_token": words.numbers}
    for prefix, places, through in (("", look.maps, "rollout"), ("baseline.", look.baseline, "baseline_rollout")):
        for (kind, layer), maps in places.items():
            place = f"{prefix}{kind}.{layer}"
            if (kind, layer) in look.rollouts[through]:
                arrays[f"{place}.rollout"] = look.rollouts[through][kind, layer]
            if look.in_words:
                seen = maps.weights.masked_fill(maps.masked, numpy.nan)[0].double().numpy()
                arrays[f"{place}.word_weights"] = of_words(look, kind, seen)
            for name in ("weights", "a_logit", "masked"):
                arrays[f"{place}.{name}"] = getattr(maps, name)[0].numpy()
            for name, part in maps.parts.items():
                arrays[f"{place}.{name}"] = part.map[0].numpy()
                arrays[f"{place}.{name}.share"] = numpy.array(part.share, numpy.float64)
    file = io.BytesIO()
    numpy.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def page(look: Look, start: Row) -> str:
    """One self-contained HTML page with the maps of all layers and heads."""
    import matplotlib

    colours = matplotlib.colormaps[style.MAP_COLOURS](range(256), bytes=True)[:, :3]
    data = {
        "title": look.title,
        "parts": {part: PARTS[part] for part in columns_of(look, [*look.parts, "rollout"])},
        "tokens": look.tokens,
        "words": {
            name: {"labels": words.labels, "of_token": words.numbers.tolist()} for name, words in look.words.items()
        },
        "heads": max(maps.weights.size(1) for maps in look.maps.values()),
        "start": {
            **{"kind": start.kind, "layer": start.layer, "head": 0 if start.head == "mean" else start.head},
            "words": look.in_words,
        },
        "colours": colours.tobytes().hex(),
        "kinds": {kind: _kind_for_page(look, kind) for kind in look.kinds},
    }
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no token may end the script element
    return Path(__file__).with_name("explorer.html").read_text(encoding="utf-8").replace("@DATA@", text)


def _kind_for_page(look: Look, kind: str) -> dict[str, Any]:
    rows, columns, row_title, column_title = AXES[kind]
    layers = [
        {part: _packed(values) for part, values in parts_of(look, kind, layer).items()} for layer in look.layers(kind)
    ]
    return {
        "name": KINDS[kind],
        "rows": rows,
        "columns": columns,
        "row_title": row_title,
        "column_title": column_title,
        "layers": layers,
    }


def _packed(values: numpy.ndarray) -> str:
    """Numbers from 0 to 1 as base64 of little-endian 16-bit integers: 65534 is 1, 65535 is NaN."""
    stored = numpy.where(numpy.isnan(values), 65535, numpy.rint(numpy.nan_to_num(values) * 65534))
    return base64.b64encode(stored.astype("<u2").tobytes()).decode()
