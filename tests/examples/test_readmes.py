"""The pages of the examples: one screen each, two commands from a fresh machine, flags and links that are there."""

import argparse
import re
import shlex

import pytest
from helpers import REPO
from helpers.pages import blocks, lines

PAGES = sorted((REPO / "examples").glob("*/README.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)


@each_page
def test_a_page_is_one_screen(page):
    assert len(page.read_text().splitlines()) <= 60


class Parsed(Exception):
    """A command's words were parsed."""


@each_page
def test_after_set_up_each_command_is_there_and_takes_its_words(monkeypatch, page):
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser, words):
        raise Parsed(parse(parser, words))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    first, *commands = [line for block in blocks(page.read_text(), "bash") for line in lines(block)]
    assert first == "bash scripts/setup.sh --examples" and commands
    for command in commands:
        module, *words = shlex.split(
            re.fullmatch(r"\.venv/bin/(?:python|torchrun --nproc-per-node \d) -m (.*)", command)[1]
        )
        with pytest.raises(Parsed):
            pytest.importorskip(module).main(words)


def test_each_example_has_a_page():
    folders = {path.parent.name for path in (REPO / "examples").glob("*/*.py")}
    assert folders == {page.parent.name for page in PAGES}
