"""An exported model translates as fairseq does, without PyTorch and fairseq; faults of its folder are named."""

import itertools

import numpy as np
import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers import PRETRAINED
from helpers.models import in_threads
from helpers.promises import sample_of
from helpers.toy import TINY, untrained_run

import ea_fairseq
from ea_runtime import Translator, text
from ea_runtime.search import Hypothesis, Settings, search
from ea_runtime.translator import EOS, PAD, UNK
from ea_tools.translating import export

pytestmark = pytest.mark.slow

LINES = ["Hund, Katze, Haus.", "", "Haus.", "Garten, Vogel, Hund, Haus.", "Katze."]
#: architecture and flags; test_exported.py has the default model; other rules differ in coefficients only
SYSTEMS = [
    "pa_transformer_lite --ea-conv-layers 2 --ea-kernel-size 5 --ea-score multiplicative",
    "ea_transformer_lite --ea-learn-mix --ea-relative-positions 4 --ea-score concatenative --ea-conv-branch "
    "--decoder-layers 2",
    "transformer_wmt_en_de_big --encoder-learned-pos --decoder-learned-pos --encoder-normalize-before "
    "--decoder-normalize-before",
]


@pytest.fixture(scope="module", params=SYSTEMS)
def exported(request, data, tmp_path_factory):
    """A run with random weights, loaded by fairseq, and its export. fairseq's has separate embeddings."""
    folder = tmp_path_factory.mktemp("exported")
    arch, *flags = request.param.split()
    size = [flag for flag in TINY if "ea_" in arch or "pa_" in arch or flag != "--share-all-embeddings"]
    run = untrained_run(data, folder / "run", arch, *flags, size=size)
    export.main(["--run", str(run), "--out", str(folder / "out")])
    return ea_fairseq.load(run), folder / "out"


@pytest.mark.parametrize(
    "settings",
    [
        {"beam": 5, "max_len_b": 9},
        {"beam": 1, "max_len_b": 9},
        {"beam": 4, "lenpen": 0.5, "max_len_b": 8, "min_len": 4, "unkpen": 1.5},
        {"beam": 3, "max_len_a": 0.5, "max_len_b": 2, "unnormalized": True},
        {"beam": 60, "max_len_b": 4},
    ],
    ids=["beam 5", "greedy", "penalties", "max-len-a", "twice the beam is more than all words"],
)
@pytest.mark.parametrize("prefixes", [None, [[7, 8], [], [9]]], ids=["free", "prefixes"])
def test_searches_as_fairseq(exported, settings, prefixes):
    """The same scores for each rank, and the same tokens but where two hypotheses tie."""
    loaded, folder = exported
    runtime, (model,), dictionary = Translator(folder, threads=1), loaded.hub.models, loaded.hub.task.target_dictionary
    sources = [[5, 6, 7, 8, 2], [9, 2], [10, 11, 12, 2]]
    tokens = torch.full((3, 5), dictionary.pad())
    for row, source in zip(tokens, sources, strict=True):
        row[5 - len(source) :] = torch.tensor(source)
    forced = None
    if prefixes:
        forced = torch.full((3, 2), dictionary.pad())
        for row, prefix in zip(forced, prefixes, strict=True):
            row[: len(prefix)] = torch.tensor(prefix)
    chosen = Settings(**settings)
    generator = SequenceGenerator(
        [model], dictionary, beam_size=chosen.beam, max_len_a=chosen.max_len_a, max_len_b=chosen.max_len_b,
        min_len=chosen.min_len, normalize_scores=not chosen.unnormalized, len_penalty=chosen.lenpen,
        unk_penalty=chosen.unkpen,
    )  # fmt: skip
    expected = generator.generate([model], sample_of(tokens), prefix_tokens=forced)
    for of_fairseq, ours in zip(expected, runtime.search_ids(sources, chosen, prefixes), strict=True):
        scores = [float(one["score"]) for one in of_fairseq]
        assert [one.score for one in ours] == pytest.approx(scores, abs=1e-4)
        ties = any(abs(one - other) < 1e-4 for one, other in itertools.pairwise(scores))
        assert ties or [list(one.tokens) for one in ours] == [one["tokens"].tolist()[:-1] for one in of_fairseq]


def test_translates_text_as_the_python_interface(exported):
    loaded, folder = exported
    runtime = Translator(folder, threads=1)
    expected = loaded.translate(LINES, beam=2, max_len_b=8)
    assert runtime.translate(LINES, beam=2, max_len_b=8) == expected
    assert runtime.translate(iter(LINES), beam=2, max_len_b=8, batch=2) == expected
    assert runtime.translate(LINES[0], beam=2, max_len_b=8) == expected[0]
    begun = runtime.translate(LINES[2:3], beam=2, max_len_b=8, prefixes=iter(["The dog"]))
    assert begun[0].startswith("the dog")
    best = runtime.translate(LINES, beam=2, max_len_b=8, n_best=2)
    assert [one[0][0] for one in best] == expected


#: other graphs; export.sh compares each with PyTorch. The first is shorter than the sentences that it is tried with.
OTHERS = [
    "ea_transformer_lite --ea-rule realformer --max-source-positions 14 --max-target-positions 13 --quant-noise-pq 0.1",
    "ea_bart --task translation",
]


@pytest.mark.parametrize("command", OTHERS)
def test_other_models_are_exported_and_translate(command, data, tmp_path):
    arch, *flags = command.split()
    run = untrained_run(data, tmp_path / "run", arch, *flags)
    export.main(["--run", str(run), "--out", str(tmp_path / "out")])
    loaded, exported = ea_fairseq.load(run), Translator(tmp_path / "out", threads=1)
    assert exported.translate(LINES, beam=2, max_len_b=8) == loaded.translate(LINES, beam=2, max_len_b=8)
    assert tuple(exported.description["max_positions"]) == loaded.hub.max_positions


@pytest.mark.parametrize(
    ("lengths", "beam", "sizes"),
    [
        ([3, 1, 40, 2, 40], 5, [4]),
        ([600, 2, 600, 600, 600], 1, [2, 2, 1]),  # whose maps would have more than 2**20 entries
        ([3] * 33, 100, [20, 13]),  # 2,000 hypotheses
        ([3] * 33, 1, [32, 1]),
    ],
    ids=["an empty one", "long", "wide", "many"],
)
def test_sentences_are_searched_in_batches_and_come_back_in_order(lengths, beam, sizes, monkeypatch):
    """A search that gives each sentence back; the end of the sentence alone is not searched."""
    translator, searched = Translator(PRETRAINED, threads=1), []

    def search_ids(sources, settings, prefixes):
        searched.append(len(sources))
        return [[Hypothesis(tuple(source), 0.0)] for source in sources]

    monkeypatch.setattr(translator, "search_ids", search_ids)
    sources = [[number] * (length - 1) + [EOS] for number, length in enumerate(lengths)]
    found = translator.search_all(sources, Settings(beam=beam))
    assert [[list(one.tokens) for one in best] for best in found] == [[x] if len(x) > 1 else [] for x in sources]
    assert searched == sizes


def test_padding_is_never_written():
    """However likely a model finds it."""

    def step(tokens, position, order, kept, bias, top, forced):
        scores = bias + np.array([0, 1, 0, 0, 0, 0], np.float32) + np.zeros((tokens.size, 1), np.float32)
        best = np.argsort(-scores, axis=1)[:, :top]
        return np.take_along_axis(scores, best, axis=1), best

    (hypotheses,) = search(step, 1, 3, Settings(beam=2), words=6, eos=EOS, pad=PAD, unk=UNK)
    assert hypotheses and all(PAD not in one.tokens for one in hypotheses)


def test_a_translation_is_as_long_as_the_model_writes(monkeypatch):
    """The end of the sentence takes one of the target's positions."""
    translator = Translator(PRETRAINED, threads=1)
    monkeypatch.setattr(translator, "_longest", [40, 4])
    (hypotheses,) = translator.search_ids([[5, 6, 7, 8, 9, EOS]], Settings(beam=3, max_len_b=9, min_len=3), None)
    assert {len(one.tokens) for one in hypotheses} == {3}


def test_threads_share_a_translator():
    runtime = Translator(PRETRAINED, threads=1)
    expected = runtime.translate(LINES, beam=2, max_len_b=8)

    def work(_):
        assert runtime.translate(LINES, beam=2, max_len_b=8) == expected

    in_threads(work, 4)


@pytest.mark.parametrize(
    "lines, options, says",
    [
        (["a\nb"], {}, "line 1"),
        ([None], {}, "NoneType"),
        (["a"], {"bean": 5}, "bean"),
        (["a"], {"beam": 0}, "beam"),
        (["a"], {"lenpen": float("nan")}, "lenpen"),
        (["a"], {"lenpen": 99}, "lenpen"),
        (["a"], {"max_len_a": 1001}, "max_len_a"),
        (["a"], {"unkpen": -(10**7)}, "unkpen"),
        (["a"], {"max_len_b": 10**400}, "max_len_b"),
        (["a"], {"min_len": 10**7}, "min_len"),
        (["a"], {"unnormalized": 1}, "unnormalized"),
        (["a"], {"beam": 501}, "beam"),
        (["a"], {"n_best": 9}, "n_best"),
        (["a"], {"batch": 0}, "batch"),
        (["a"], {"prefixes": []}, "prefixes"),
        (["a"], {"prefixes": "b"}, "prefixes"),
        (["a", "b"], {"prefixes": ["a", None]}, "prefix of line 2"),
        (["a"], {"prefixes": ["a\nb"]}, "prefix of line 1"),
        (["a", "b"], {"prefixes": ["a", "Ж"]}, "prefix of line 2.*'ж'"),
        (["a"], {"prefixes": ["a " * 200]}, "prefix of line 1.*max_len_b"),
        (["a", "b"], {"prefixes": ["a", "a a"], "max_len_b": 2}, "prefix of line 2.*max_len_b"),
    ],
)
def test_bad_input_is_refused(lines, options, says):
    with pytest.raises(ValueError, match=says):
        Translator(PRETRAINED, threads=1).translate(lines, **options)


def test_short_words_are_remembered_and_not_all(monkeypatch):
    """Subwords of long words take time, and all words memory, which a server cannot afford."""
    whole, made, segmenter = text.Text(PRETRAINED), [], text.segmenter
    monkeypatch.setattr(text, "segmenter", lambda *given: made.append(segmenter(*given)) or made[-1])
    monkeypatch.setattr(text, "REMEMBERED", 5)
    small = text.Text(PRETRAINED)
    for number in range(40):
        word = str(number).rjust((3, text.SHORT, text.SHORT + 1, 200)[number % 4], "q")
        assert small.subwords(word) == whole.subwords(word)
        assert len(made[0].cache) <= 6 and max(map(len, made[0].cache), default=0) <= text.SHORT
    small.subwords("qq")
    assert "qq" in made[0].cache


def test_a_text_is_not_taken_for_lines_of_a_letter():
    with pytest.raises(ValueError, match="lines: expected several"):
        Translator(PRETRAINED, threads=1).scored("ab")
