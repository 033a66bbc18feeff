"""A recipe over the toy corpus, and the files of runs that were never trained."""

import json

COMMIT = "c" * 40
SETTINGS = "beam5.average2"


def write_recipe(path, data):
    """A recipe of the toy corpus."""
    path.write_text(
        f'inherit = "base"\ndata = "{data}"\nsource-lang = "de"\ntarget-lang = "en"\n'
        '[batch]\ntokens = 256\n[flags]\nmax-epoch = 2\n'
    )  # fmt: skip
    return path


def evaluation(score=10.0, **changed):
    """The result of evaluate.sh with this score."""
    return {
        "scores": {kind: {"score": score, "signature": "s"} for kind in ("sacrebleu", "tokenised_bleu")},
        **{"data": "toy", "subset": "test", "direction": "de-en", "arch": "a", "training_seed": 1, "updates": 1500},
        **{"averaged": [], "settings_name": SETTINGS, "tokenizer": "13a", "references": "r", "command": "x"},
        **{"device": "d", "commit": COMMIT, "date": "now"},
    } | changed


def write_evaluation(run, result, translations):
    """RUN/eval: the result by its settings."""
    (run / "eval").mkdir(parents=True, exist_ok=True)
    path = run / "eval" / f"{result['subset']}.{result['settings_name']}.json"
    path.write_text(json.dumps(result))
    path.with_suffix(".hyp.txt").write_text("".join(f"{line}\n" for line in translations))
    return path
