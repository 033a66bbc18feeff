"""Promise 6: a saved model, loaded by a fresh process, gives what the training process gave; and loading is safe."""

import pickle
import re

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers.models import TINY, TRAINING, batch, build, dictionary
from helpers.toy import Payload, fairseq

from ea_fairseq import EATransformerModel

ARCH = ["--arch", "ea_transformer_base", *TINY, "--ea-beta", "0.4"]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A short training that scored its validation set with beam 5 itself. Gives its folder and its log."""
    folder = tmp_path_factory.mktemp("run")
    log = fairseq(
        "train", corpus, *ARCH, *TRAINING, "--save-dir", folder, "--lr", 0.005, "--max-epoch", 12,
        "--no-epoch-checkpoints", "--validate-interval", 12, "--eval-bleu", "--eval-tokenized-bleu",
        "--eval-bleu-args", '{"beam": 5, "max_len_b": 15}',
    ).stdout  # fmt: skip
    return folder, log


@pytest.mark.slow
def test_a_fresh_process_gives_the_training_processs_scores(corpus, run):
    folder, log = run
    loss, bleu = re.findall(r'"valid_loss": "([\d.]+)".*"valid_bleu": "([\d.]+)"', log)[-1]
    assert float(bleu) > 0.1, "a score of nothing would prove nothing"
    path = ["--path", folder / "checkpoint_last.pt", "--cpu", "--max-tokens", 200, "--required-batch-size-multiple", 1]
    path += ["--num-workers", 0]
    validated = fairseq("validate", corpus, *path, "--task", "translation", "--valid-subset", "valid").stdout
    assert re.search(r"\| loss ([\d.]+)", validated)[1] == loss, validated[-2000:]
    scoring = ["--beam", 5, "--max-len-b", 15, "--scoring", "sacrebleu", "--sacrebleu-tokenizer", "none"]
    generated = fairseq("generate", corpus, *path, "--gen-subset", "valid", *scoring, cold=True).stdout
    assert re.search(r"= ([\d.]+)", generated.splitlines()[-1])[1] == bleu, generated[-500:]


def decode(model, source):
    generator = SequenceGenerator([model], dictionary(), beam_size=5, max_len_a=0, max_len_b=10)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    return [[(h["tokens"].tolist(), h["score"].item()) for h in hypotheses] for hypotheses in generator(sample)]


@torch.no_grad()
def test_a_reloaded_model_decodes_as_the_one_in_memory(tmp_path):
    model = build("ea_transformer_base", "--ea-beta", 0.4)
    source = batch([6, 3, 1])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh = build("ea_transformer_base", "--ea-beta", 0.4)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    fresh.prepare_for_inference_(_InferenceConfig())
    assert decode(fresh, source) == decode(model, source)


class _InferenceConfig:
    """The two settings that prepare_for_inference_ reads."""

    class generation:
        retain_dropout = False
        retain_dropout_modules = None
        no_beamable_mm = False
        print_alignment = None
        beam = 5


@pytest.mark.slow
def test_hub_interface_and_interactive(corpus, run):
    folder, _ = run
    hub = EATransformerModel.from_pretrained(
        str(folder), checkpoint_file="checkpoint_last.pt", data_name_or_path=str(corpus)
    )
    assert type(hub.models[0]) is EATransformerModel
    translations = hub.translate(["w1 w2 w3", "w4"], beam=5)
    assert len(translations) == 2
    again = EATransformerModel.from_pretrained(
        str(folder), checkpoint_file="checkpoint_last.pt:checkpoint_last.pt", data_name_or_path=str(corpus)
    )
    assert again.translate(["w1 w2 w3", "w4"], beam=5) == translations


@pytest.mark.slow
def test_checkpoints_load_with_weights_only(run):
    folder, _ = run
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    assert state["cfg"]["model"].ea_beta == 0.4


def test_a_malicious_checkpoint_is_refused_and_runs_nothing(corpus, tmp_path):
    trace, file = tmp_path / "trace", tmp_path / "evil.pt"
    torch.save({"args": None, "model": {}, "payload": Payload(trace)}, file)
    result = fairseq("generate", corpus, "--path", file, "--cpu", check=False)
    assert result.returncode != 0 and "weights_only" in result.stdout.lower()
    with pytest.raises(pickle.UnpicklingError):
        EATransformerModel.from_pretrained(str(tmp_path), checkpoint_file="evil.pt", data_name_or_path=str(corpus))
    assert not trace.exists()
    pickle.loads(pickle.dumps(Payload(trace)))  # the payload does work where nothing protects
    assert trace.exists()
