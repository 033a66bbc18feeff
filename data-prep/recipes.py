"""The recipes: each states where its text comes from, its rules and its expected counts, and nothing else."""

from __future__ import annotations

from prep.recipe import Part, Recipe, Rules

MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"


def multi30k(source: str, target: str) -> Recipe:
    """Multi30k, task 1: image captions."""

    def part(split: str) -> tuple[Part, ...]:
        return (Part(split + ".{lang}", url=MULTI30K + split + ".{lang}.gz"),)

    return Recipe(
        name=f"multi30k-{source}-{target}",
        source_lang=source,
        target_lang=target,
        train=part("train"),
        valid=part("val"),
        tests={name: part(name) for name in ("test_2016_flickr", "test_2017_flickr")},
        rules=Rules(lowercase=True, merges=8_000),
        expected={"train": 29_000, "valid": 1_014, "test": 1_000, "test1": 1_000},
    )


def sample() -> Recipe:
    """The corpus that sample.py makes."""
    return Recipe(
        name="sample",
        source_lang="de",
        target_lang="en",
        train=(Part("train.{lang}"),),
        valid=(Part("valid.{lang}"),),
        tests={"test": (Part("test.{lang}"),)},
        rules=Rules(lowercase=True, merges=1_000),
    )
