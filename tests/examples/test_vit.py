"""The digits' ViT: what evolves in it, and the command."""

import pytest
import torch

pytest.importorskip("transformers")
from examples.images import vit


def test_the_class_token_is_part_of_the_picture():
    """Row 0 of a map reaches row 1 of the next layer's through the convolution only."""
    torch.manual_seed(1)
    model = vit.build(vit.SYSTEMS["EA-ViT"]).eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    plain = sum(parameter.numel() for parameter in vit.build(None).parameters())
    assert count - plain == 4 * (4 * 4 * 9 + 4)
    evolution = model.vit.layers[0].attention.evolution if hasattr(model.vit, "layers") else None
    evolution = evolution or next(m.evolution for m in model.modules() if hasattr(m, "evolution"))
    picture = torch.zeros(1, 4, 17, 17)
    changed = picture.clone()
    changed[:, :, 0, 0] = 1
    difference = (evolution.conv(changed) - evolution.conv(picture)).abs().sum(1)[0]
    assert difference[1, 1] > 0 and difference[2:].abs().max() == 0


@pytest.mark.slow
def test_the_command_prints_both_systems(capsys, monkeypatch):
    x, classes = vit.pictures()
    monkeypatch.setattr(vit, "pictures", lambda: (x[:100], classes[:100]))
    vit.main(["--folds", "1", "--epochs", "1"])
    plain, evolving = capsys.readouterr().out.splitlines()[2:]
    assert plain.startswith("| ViT |") and evolving.startswith("| EA-ViT |")
