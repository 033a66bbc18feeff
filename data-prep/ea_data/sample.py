"""A small German-English corpus made from a grammar: no download, and the same text for the same seed.

The English sentence is a function of the German one. To learn: gender, number and case of articles and adjectives; the
verb's second place, its place at the end of a subordinate clause, and separable prefixes; perfect, future and modal
verbs; "nicht" and "kein"; place and direction after "in"; relative clauses; the order of time and objects.

Held-out sentences never occur in training, and are made only of words that do.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ea_artifacts.command import UserError
from ea_artifacts.files import replacing

# --- words ----------------------------------------------------------------------------------------------------------


class Noun(NamedTuple):
    """A noun. Its kind (person, animal, thing, food, place) says which verbs it goes with."""

    kind: str
    gender: str  # m, f, n
    singular: str
    plural: str
    english: str
    english_plural: str


class Verb(NamedTuple):
    """A verb without its prefix. "-" stands for none."""

    objects: str  # frame, or kinds of noun that its accusative object may be
    infinitive: str
    first: str
    third: str
    participle: str
    english: str
    english_third: str
    english_past: str
    prefix: str = ""
    auxiliary: str = "haben"


NOUNS = [
    Noun(*entry.split())
    for entry in """
    person m Mann Männer man men        | person f Frau Frauen woman women     | person n Kind Kinder child children
    person m Lehrer Lehrer teacher teachers
    person f Ärztin Ärztinnen doctor doctors
    person n Mädchen Mädchen girl girls
    person m Freund Freunde friend friends  | person f Tochter Töchter daughter daughters | person m Sohn Söhne son sons
    animal m Hund Hunde dog dogs        | animal f Katze Katzen cat cats       | animal n Pferd Pferde horse horses
    animal m Vogel Vögel bird birds     | animal f Maus Mäuse mouse mice       | animal n Huhn Hühner chicken chickens
    thing m Tisch Tische table tables   | thing f Lampe Lampen lamp lamps      | thing n Buch Bücher book books
    thing m Ball Bälle ball balls       | thing f Tasche Taschen bag bags      | thing n Bild Bilder picture pictures
    thing m Brief Briefe letter letters | thing f Blume Blumen flower flowers  | thing n Fenster Fenster window windows
    food m Apfel Äpfel apple apples     | food f Suppe Suppen soup soups       | food n Brot Brote bread breads
    food m Kuchen Kuchen cake cakes     | food f Birne Birnen pear pears       | food n Ei Eier egg eggs
    place m Garten Gärten garden gardens | place f Schule Schulen school schools | place n Haus Häuser house houses
    place m Park Parks park parks       | place f Stadt Städte city cities     | place n Dorf Dörfer village villages
    """.strip().replace("\n", "|").split("|")
]  # fmt: skip
VERBS = [
    Verb(*(word.replace(":", " ") for word in line.split()))
    for line in """
    thing,animal,person sehen sehe sieht gesehen see sees saw
    thing,food,animal kaufen kaufe kauft gekauft buy buys bought
    person,place besuchen besuche besucht besucht visit visits visited
    thing,animal,person suchen suche sucht gesucht look:for looks:for looked:for
    thing,food finden finde findet gefunden find finds found
    thing,food tragen trage trägt getragen carry carries carried
    food essen esse isst gegessen eat eats ate
    person,animal hören höre hört gehört hear hears heard
    person rufen rufe ruft angerufen call calls called an
    person,animal holen hole holt abgeholt pick:up picks:up picked:up ab
    person laden lade lädt eingeladen invite invites invited ein
    thing,food werfen werfe wirft weggeworfen throw:away throws:away threw:away weg
    dative helfen helfe hilft geholfen help helps helped
    dative danken danke dankt gedankt thank thanks thanked
    gift geben gebe gibt gegeben give gives gave
    gift zeigen zeige zeigt gezeigt show shows showed
    gift leihen leihe leiht geliehen lend lends lent
    none schlafen schlafe schläft geschlafen sleep sleeps slept
    none lachen lache lacht gelacht laugh laughs laughed
    none arbeiten arbeite arbeitet gearbeitet work works worked
    none spielen spiele spielt gespielt play plays played
    none kommen komme kommt angekommen arrive arrives arrived an sein
    motion gehen gehe geht gegangen go goes went - sein
    motion laufen laufe läuft gelaufen run runs ran - sein
    """.strip().split("\n")
]
ADJECTIVES = list(zip("klein groß alt schön neu gut".split(), "small big old beautiful new good".split(), strict=True))
NAMES = ["Anna", "Peter", "Maria", "Lukas"]
# German, English, person and number of the verb, which tells whether "sie" is "she" or "they".
PRONOUNS = [("ich", "I", "1s"), ("er", "he", "3s"), ("sie", "she", "3s"), ("wir", "we", "p"), ("sie", "they", "p")]
TIMES = {
    "present": [("heute", "today"), ("oft", "often"), ("jetzt", "now")],
    "perfect": [("gestern", "yesterday"), ("am Montag", "on Monday")],
    "future": [("morgen", "tomorrow"), ("bald", "soon")],
    "modal": [("heute", "today"), ("morgen", "tomorrow")],
}
# First person, third person, plural.
FINITE = {
    "haben": "habe hat haben",
    "sein": "bin ist sind",
    "werden": "werde wird werden",
    "can": "kann kann können",
    "must": "muss muss müssen",
    "want to": "will will wollen",
}
SAY = [("weiß", "knows"), ("glaubt", "believes"), ("sagt", "says")]

# --- noun phrases ---------------------------------------------------------------------------------------------------

# English determiner -> its German forms and the adjective's endings, by case. Columns: masculine, feminine, neuter,
# plural; "-" is nothing.
CASES = ("nom", "acc", "dat")
WEAK = ("e e e en", "en e e en", "en en en en")
MIXED = ("er e es en", "en e es en", "en en en en")
STRONG = ("- - - e", "- - - e", "- - - en")
DETERMINERS = {
    "the": (("der die das die", "den die das die", "dem der dem den"), WEAK),
    "this": (("dieser diese dieses diese", "diesen diese dieses diese", "diesem dieser diesem diesen"), WEAK),
    "a": (("ein eine ein -", "einen eine ein -", "einem einer einem -"), MIXED),
    "no": (("kein keine kein keine", "keinen keine kein keine", "keinem keiner keinem keinen"), MIXED),
    "two": (("- - - zwei",) * 3, STRONG),
    "three": (("- - - drei",) * 3, STRONG),
}


@dataclass(frozen=True)
class Phrase:
    """A noun phrase, name or pronoun: its German by case, its English, and how verbs agree with it."""

    german: dict[str, str]
    english: str
    agreement: str = "3s"  # 1s, 3s, p
    relative: str = ""  # its relative pronoun


def noun_phrase(rng: random.Random, kinds: str, kein: bool = False) -> Phrase:
    """A random phrase of a noun of `kinds` ("person,animal"): determiner, often an adjective, noun."""
    noun = rng.choice([noun for noun in NOUNS if noun.kind in kinds.split(",")])
    plural = rng.random() < 0.3
    determiner = rng.choice(["the"] * 4 + ["this", *(["two", "three"] if plural else ["a", "a"]), *["no"] * kein])
    adjective = rng.choice(ADJECTIVES) if rng.random() < 0.35 else None
    column = "mfnp".index("p" if plural else noun.gender)
    german = {}
    for case, articles, endings in zip(CASES, *DETERMINERS[determiner], strict=True):
        form = noun.plural if plural else noun.singular
        if plural and case == "dat" and form[-1] not in "ns":
            form += "n"
        ending = endings.split()[column].strip("-")
        german[case] = joined([articles.split()[column], adjective[0] + ending if adjective else "", form])
    words = joined([adjective[1] if adjective else "", noun.english_plural if plural else noun.english])
    article = "an" if determiner == "a" and words[0] in "aeio" else determiner
    if determiner == "this" and plural:
        article = "these"
    agreement = "p" if plural else "3s"
    return Phrase(german, f"{article} {words}", agreement, DETERMINERS["the"][0][0].split()[column])


def subject(rng: random.Random) -> Phrase:
    """Whoever a clause is about: a person, by name or pronoun or neither."""
    choice = rng.random()
    if choice < 0.25:
        german, english, agreement = rng.choice(PRONOUNS)
        return Phrase({"nom": german}, english, agreement)
    if choice < 0.4:
        name = rng.choice(NAMES)
        return Phrase({"nom": name}, name)
    return noun_phrase(rng, "person")


def joined(words: Iterable[str]) -> str:
    """Words with spaces between them."""
    return " ".join(word for word in words if word.strip("-"))


# --- clauses --------------------------------------------------------------------------------------------------------


def clause(rng: random.Random, who: Phrase, order: str) -> tuple[str, str]:
    """A random German clause about `who` and its English, in the order "main", "fronted", "asked" or "subordinate"."""
    verb, tense = rng.choice(VERBS), rng.choice(["present", "present", "perfect", "perfect", "future", "modal"])
    modal = rng.choice(["can", "must", "want to"]) if tense == "modal" else ""
    middle, rest, negatable = complements(rng, verb, kein=tense != "modal")
    negated = negatable and modal != "must" and rng.random() < 0.2  # "muss nicht" is "need not"
    late, early = rng.choice(TIMES[tense]) if order == "fronted" or rng.random() < 0.3 else ("", "")
    helper = {"perfect": verb.auxiliary, "future": "werden", "modal": modal}.get(tense)
    forms = FINITE[helper].split() if helper else [verb.first, verb.third, verb.infinitive]
    finite = forms[["1s", "3s", "p"].index(who.agreement)]
    prefix = verb.prefix.strip("-")
    final = {"present": "", "perfect": verb.participle}.get(tense, prefix + verb.infinitive)
    prefix = prefix if tense == "present" else ""
    name, middle = who.german["nom"], joined([middle, "nicht" if negated else ""])
    german = {
        "main": [name, finite, late, middle, final, prefix],
        "fronted": [late, finite, name, middle, final, prefix],
        "asked": [finite, name, late, middle, final, prefix],
        "subordinate": [name, late, middle, final, prefix + finite],
    }[order]
    do, main, stated = english_verb(verb, tense, modal, who.agreement)
    if negated:
        main, stated = f"not {main}", f"{do} not {main}"
    english = {
        "fronted": [early, who.english, stated, rest],
        "asked": [do, who.english, main, rest, early],
    }.get(order, [who.english, stated, rest, early])
    return joined(german), joined(english)


def complements(rng: random.Random, verb: Verb, kein: bool) -> tuple[str, str, bool]:
    """A verb's complements in German and in English, and whether "nicht" may follow them."""
    if verb.objects == "dative":
        whom = noun_phrase(rng, "person")
        return whom.german["dat"], whom.english, True
    if verb.objects == "gift":
        whom, thing = noun_phrase(rng, "person"), noun_phrase(rng, "thing,food,animal", kein)
        return f"{whom.german['dat']} {thing.german['acc']}", f"{thing.english} to {whom.english}", False
    if verb.objects == "motion":
        where = noun_phrase(rng, "place")
        return f"in {where.german['acc']}", f"into {where.english}", False
    if verb.objects == "none":
        if rng.random() < 0.5:
            return "", "", True
        where = noun_phrase(rng, "place")
        return f"in {where.german['dat']}", f"in {where.english}", False
    thing = noun_phrase(rng, verb.objects, kein)
    return thing.german["acc"], thing.english, thing.english.startswith("th")  # the, this, these


def english_verb(verb: Verb, tense: str, modal: str, agreement: str) -> tuple[str, str, str]:
    """The English verb: its helper and main form, as in "does she buy", and the form of a statement, "buys"."""
    third = agreement == "3s"
    do = "does" if third else "do"
    if tense == "perfect":
        return "did", verb.english, verb.english_past
    if tense == "present":
        return do, verb.english, verb.english_third if third else verb.english
    if modal == "want to":
        return do, f"want to {verb.english}", f"want{'s' * third} to {verb.english}"
    helper = modal or "will"
    return helper, verb.english, f"{helper} {verb.english}"


# --- sentences ------------------------------------------------------------------------------------------------------


def sentence(rng: random.Random) -> tuple[str, str]:
    """One random German sentence and its English translation."""
    shape = rng.choices(["main", "fronted", "asked", "dass", "relative"], [34, 22, 10, 18, 16])[0]
    if shape == "dass":
        name, say, inner = rng.choice(NAMES), rng.choice(SAY), clause(rng, noun_phrase(rng, "person"), "subordinate")
        pair = f"{name} {say[0]}, dass {inner[0]}", f"{name} {say[1]} that {inner[1]}"
    elif shape == "relative":
        who = noun_phrase(rng, "person")
        inner = clause(rng, Phrase({"nom": who.relative}, "who", who.agreement), "subordinate")
        verb = rng.choice([verb for verb in VERBS if verb.objects == "none" and not verb.prefix])
        german, english = (verb.third, verb.english_third) if who.agreement == "3s" else (verb.infinitive, verb.english)
        pair = f"{who.german['nom']}, {inner[0]}, {german}", f"{who.english} {inner[1]} {english}"
    else:
        pair = clause(rng, subject(rng), shape)
    stop = "?" if shape == "asked" else "."
    german, english = (text[0].upper() + text[1:] + stop for text in pair)
    return german.replace(" in dem ", " im ").replace(" in das ", " ins "), english


def corpus(train: int, valid: int, test: int, seed: int) -> dict[str, list[tuple[str, str]]]:
    """Distinct (German, English) pairs for each split; held-out words all occur in training.

    Raises:
        UserError: the grammar cannot make that many distinct sentences.
    """
    rng = random.Random(seed)
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
    words: set[str] = set()
    seen: set[str] = set()
    for name, size in (("train", train), ("valid", valid), ("test", test)):
        patience = 1000
        while len(splits[name]) < size:
            german, english = sentence(rng)
            new = {*german.lower().split(), *english.lower().split()}
            patience -= 1
            if not patience:
                raise UserError(
                    f"--train {train}: cannot make {size:,} {name} sentences of its words; give a larger number"
                )
            if german in seen or not 4 <= len(german.split()) <= 13 or (name != "train" and not new <= words):
                continue
            if name == "train":
                words |= new
            seen.add(german)
            splits[name].append((german, english))
            patience = 1000
    return splits


def write(splits: dict[str, list[tuple[str, str]]], folder: Path) -> None:
    """Write SPLIT.de and SPLIT.en for each split; files that have that text already stay untouched."""
    for split, pairs in splits.items():
        for side, language in enumerate(("de", "en")):
            path = folder / f"{split}.{language}"
            text = "".join(pair[side] + "\n" for pair in pairs).encode()
            if not path.exists() or path.read_bytes() != text:
                with replacing(path) as temporary:
                    temporary.write_bytes(text)
