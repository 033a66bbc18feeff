"""A small German-English corpus made from a grammar: real grammar to learn, no download, the same for the same seed.

Every sentence is correct German with its English translation, and the translation is a function of the German sentence
alone. Its grammar: gender, number and case of articles; weak, mixed and strong adjective endings; the verb's
second place, its place at the end of a subordinate clause, and separable prefixes; perfect, future and modal brackets;
"nicht" and "kein"; place against direction (dative or accusative after "in"); relative clauses; word order of time,
dative and accusative objects.

Held-out sentences never occur in training, and are made only of words that do.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path

# --- words ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noun:
    kind: str  # person, animal, thing, food, place: which verbs it goes with
    gender: str  # m, f, n
    singular: str
    plural: str
    english: str
    english_plural: str = ""


def _nouns() -> list[Noun]:
    table = """
    person m Mann Männer man men           | person f Frau Frauen woman women     | person n Kind Kinder child children
    person m Lehrer Lehrer teacher         | person f Ärztin Ärztinnen doctor     | person n Mädchen Mädchen girl
    person m Freund Freunde friend         | person f Tochter Töchter daughter    | person m Sohn Söhne son
    animal m Hund Hunde dog                | animal f Katze Katzen cat            | animal n Pferd Pferde horse
    animal m Vogel Vögel bird              | animal f Maus Mäuse mouse mice       | animal n Huhn Hühner chicken
    thing m Tisch Tische table             | thing f Lampe Lampen lamp            | thing n Buch Bücher book
    thing m Ball Bälle ball                | thing f Tasche Taschen bag           | thing n Bild Bilder picture
    thing m Brief Briefe letter            | thing f Blume Blumen flower          | thing n Fenster Fenster window
    food m Apfel Äpfel apple               | food f Suppe Suppen soup             | food n Brot Brote bread breads
    food m Kuchen Kuchen cake              | food f Birne Birnen pear             | food n Ei Eier egg
    place m Garten Gärten garden           | place f Schule Schulen school        | place n Haus Häuser house
    place m Park Parks park                | place f Stadt Städte city cities     | place n Dorf Dörfer village
    """
    return [Noun(*entry.split()) for entry in table.replace("\n", "|").split("|") if entry.strip()]


# German stem (endings are added), English. None whose stem changes when it is declined.
ADJECTIVES = [
    ("klein", "small"), ("groß", "big"), ("alt", "old"), ("jung", "young"), ("schön", "beautiful"), ("neu", "new"),
    ("rot", "red"), ("grün", "green"), ("weiß", "white"), ("gut", "good"), ("schwer", "heavy"), ("lustig", "funny"),
]  # fmt: skip
ADJECTIVES_OF = {
    "person": "klein groß alt jung gut lustig",
    "animal": "klein groß alt jung schön weiß lustig",
    "thing": "klein groß alt schön neu rot grün weiß schwer",
    "food": "klein groß rot grün weiß gut",
    "place": "klein groß alt schön neu",
}
STATES = [("müde", "tired"), ("krank", "ill"), ("froh", "happy"), ("allein", "alone")]  # undeclined, after "sein"


@dataclass(frozen=True)
class Verb:
    frame: str  # transitive, dative, ditransitive, intransitive, motion
    objects: str  # kinds of noun its accusative object may be, "-" for none
    infinitive: str  # without its prefix
    first: str
    third: str
    participle: str
    english: str
    english_third: str
    english_past: str
    prefix: str = ""
    auxiliary: str = "haben"


def _verbs() -> list[Verb]:
    table = """
    transitive person,animal,thing sehen sehe sieht gesehen see sees saw
    transitive thing,food,animal kaufen kaufe kauft gekauft buy buys bought
    transitive person,place besuchen besuche besucht besucht visit visits visited
    transitive thing,animal,person suchen suche sucht gesucht look:for looks:for looked:for
    transitive thing,food finden finde findet gefunden find finds found
    transitive thing,food tragen trage trägt getragen carry carries carried
    transitive food essen esse isst gegessen eat eats ate
    transitive person,animal hören höre hört gehört hear hears heard
    transitive person rufen rufe ruft angerufen call calls called an
    transitive person,animal holen hole holt abgeholt pick:up picks:up picked:up ab
    transitive person laden lade lädt eingeladen invite invites invited ein
    transitive thing,food,animal bringen bringe bringt mitgebracht bring:along brings:along brought:along mit
    transitive thing,food werfen werfe wirft weggeworfen throw:away throws:away threw:away weg
    dative - helfen helfe hilft geholfen help helps helped
    dative - danken danke dankt gedankt thank thanks thanked
    ditransitive thing,food,animal geben gebe gibt gegeben give gives gave
    ditransitive thing,place,animal zeigen zeige zeigt gezeigt show shows showed
    ditransitive thing,food,animal leihen leihe leiht geliehen lend lends lent
    intransitive - schlafen schlafe schläft geschlafen sleep sleeps slept
    intransitive - lachen lache lacht gelacht laugh laughs laughed
    intransitive - arbeiten arbeite arbeitet gearbeitet work works worked
    intransitive - spielen spiele spielt gespielt play plays played
    intransitive - kommen komme kommt angekommen arrive arrives arrived an sein
    intransitive - stehen stehe steht aufgestanden get:up gets:up got:up auf sein
    motion - gehen gehe geht gegangen go goes went - sein
    motion - laufen laufe läuft gelaufen run runs ran - sein
    """
    verbs = []
    for line in table.strip().split("\n"):
        words = [word.replace(":", " ") for word in line.split()]
        words[9:10] = ["" if prefix == "-" else prefix for prefix in words[9:10]]
        verbs.append(Verb(*words))
    return verbs


NOUNS, VERBS = _nouns(), _verbs()
NAMES = ["Anna", "Peter", "Maria", "Lukas"]
# German, English, person and number of the verb. "sie" is "she" or "they"; the verb tells which.
PRONOUNS = [("ich", "I", "1s"), ("er", "he", "3s"), ("sie", "she", "3s"), ("wir", "we", "p"), ("sie", "they", "p")]

ADVERBS = {
    "present": [("heute", "today"), ("oft", "often"), ("jetzt", "now")],
    "perfect": [("gestern", "yesterday"), ("am Montag", "on Monday")],
    "future": [("morgen", "tomorrow"), ("bald", "soon")],
    "modal": [("heute", "today"), ("morgen", "tomorrow")],
}
AUXILIARIES = {
    "haben": {"1s": "habe", "3s": "hat", "p": "haben"},
    "sein": {"1s": "bin", "3s": "ist", "p": "sind"},
    "werden": {"1s": "werde", "3s": "wird", "p": "werden"},
}
MODALS = {
    "can": {"1s": "kann", "3s": "kann", "p": "können"},
    "must": {"1s": "muss", "3s": "muss", "p": "müssen"},
    "want to": {"1s": "will", "3s": "will", "p": "wollen"},
}
COMPANY = ("laugh", "work", "play", "arrive")  # verbs that take "mit jemandem"
KNOW = [("weiß", "knows"), ("glaubt", "believes"), ("sagt", "says")]

# --- noun phrases ---------------------------------------------------------------------------------------------------

# Columns: masculine, feminine, neuter, plural.
DEFINITE = {"nom": "der die das die", "acc": "den die das die", "dat": "dem der dem den"}
DEMONSTRATIVE = {
    "nom": "dieser diese dieses diese",
    "acc": "diesen diese dieses diese",
    "dat": "diesem dieser diesem diesen",
}
AFTER_EIN = {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en"}  # ein, kein, mein
WEAK = {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en"}
MIXED = {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en"}
STRONG_PLURAL = {"nom": "e", "acc": "e", "dat": "en"}
RELATIVE = {"m": "der", "f": "die", "n": "das", "p": "die"}


def _column(table: dict[str, str], case: str, column: str) -> str:
    return table[case].split()["mfnp".index(column)].replace("-", "")


@dataclass(frozen=True)
class Phrase:
    """A noun phrase or pronoun: its German in any case, its English, and how verbs agree with it."""

    german: dict[str, str]
    english: str
    agreement: str = "3s"  # 1s, 3s, p
    relative: str = ""  # gender or number of its relative pronoun; "" when it takes none here


def noun_phrase(rng: random.Random, kinds: str, kein: bool = False) -> Phrase:
    """A random noun phrase of a noun of `kinds` ("person,animal"): determiner, perhaps an adjective, noun."""
    noun = rng.choice([noun for noun in NOUNS if noun.kind in kinds.split(",")])
    plural = rng.random() < 0.3
    choices = ["the"] * 4 + ["this"] + (["two", "three", "bare"] if plural else ["a", "a"])
    if noun.english not in ("man", "woman"):  # "meine Frau" is "my wife"
        choices.append("my")
    determiner = rng.choice(choices + ["no"] * kein)
    stems = ADJECTIVES_OF[noun.kind].split()
    adjective = None
    if determiner == "bare" or rng.random() < 0.35:  # "zwei Hunde", but no bare "Hunde": too easily taken for singular
        adjective = rng.choice([pair for pair in ADJECTIVES if pair[0] in stems])

    column = "p" if plural else noun.gender
    german = {case: _decline(noun, determiner, adjective, case, column) for case in ("nom", "acc", "dat")}
    english_plural = noun.english_plural or noun.english + "s"
    words = [english_plural if plural else noun.english]
    if adjective:
        words.insert(0, adjective[1])
    if determiner == "a":
        determiner = "an" if words[0][0] in "aeio" else "a"
    if determiner == "this" and plural:
        determiner = "these"
    if determiner != "bare":
        words.insert(0, determiner)
    return Phrase(german, " ".join(words), "p" if plural else "3s", column if noun.kind == "person" else "")


def _decline(noun: Noun, determiner: str, adjective: tuple[str, str] | None, case: str, column: str) -> str:
    if determiner == "the":
        article, endings = _column(DEFINITE, case, column), WEAK
    elif determiner == "this":
        article, endings = _column(DEMONSTRATIVE, case, column), WEAK
    elif determiner in ("a", "no", "my"):
        article = {"a": "ein", "no": "kein", "my": "mein"}[determiner] + _column(AFTER_EIN, case, column)
        endings = MIXED
    else:
        article, endings = {"two": "zwei", "three": "drei", "bare": ""}[determiner], None
    words = [article] if article else []
    if adjective:
        words.append(adjective[0] + (_column(endings, case, column) if endings else STRONG_PLURAL[case]))
    form = noun.singular if column != "p" else noun.plural
    if column == "p" and case == "dat" and form[-1] not in "ns":
        form += "n"
    return " ".join([*words, form])


def subject(rng: random.Random, kinds: str = "person") -> Phrase:
    choice = rng.random()
    if choice < 0.25:
        german, english, agreement = rng.choice(PRONOUNS)
        return Phrase({"nom": german}, english, agreement)
    if choice < 0.4:
        name = rng.choice(NAMES)
        return Phrase({"nom": name}, name)
    return noun_phrase(rng, kinds)


# --- clauses --------------------------------------------------------------------------------------------------------


@dataclass
class Clause:
    """One clause before it is put in order: German fields, and the English to go with them."""

    subject: Phrase
    finite: str  # the verb that agrees
    middle: list[str]  # objects and places, in German order
    final: list[str]  # what closes the bracket: participle, infinitive
    prefix: str  # of a separable verb in the present tense
    adverb: tuple[str, str] | None
    english_verb: str  # "bought", "does not buy", "can buy"
    english_rest: list[str]
    question: tuple[str, str] = field(default=("", ""))  # "does", "buy": the English verb around its subject

    def main(self) -> tuple[str, str]:
        german = [self.subject.german["nom"], self.finite, *self._time(), *self.middle, *self.final, self.prefix]
        return _join(german), _join([self.subject.english, self.english_verb, *self.english_rest, *self._time(1)])

    def fronted(self) -> tuple[str, str]:
        german = [self.adverb[0], self.finite, self.subject.german["nom"], *self.middle, *self.final, self.prefix]
        return _join(german), _join([self.adverb[1], self.subject.english, self.english_verb, *self.english_rest])

    def asked(self) -> tuple[str, str]:
        german = [self.finite, self.subject.german["nom"], *self._time(), *self.middle, *self.final, self.prefix]
        before, after = self.question
        return _join(german), _join([before, self.subject.english, after, *self.english_rest, *self._time(1)])

    def subordinate(self, subject: tuple[str, str] | None = None) -> tuple[str, str]:
        """Verb last, its prefix joined to it; `subject` replaces the subject by a relative pronoun."""
        german_subject, english_subject = subject or (self.subject.german["nom"], self.subject.english)
        german = [german_subject, *self._time(), *self.middle, *self.final, self.prefix + self.finite]
        return _join(german), _join([english_subject, self.english_verb, *self.english_rest, *self._time(1)])

    def _time(self, language: int = 0) -> list[str]:
        return [self.adverb[language]] if self.adverb else []


def _join(words: list[str]) -> str:
    return " ".join(word for word in words if word)


def clause(rng: random.Random, who: Phrase | None = None, adverb: bool | None = None) -> Clause:
    """A random clause about `who` (default: anyone); `adverb` says whether it has an adverb of time."""
    who = who or subject(rng)
    if rng.random() < 0.08:
        return _copula(rng, who)
    verb = rng.choice(VERBS)
    tense = rng.choice(["present", "present", "perfect", "perfect", "future", "modal"])
    modal = rng.choice(list(MODALS)) if tense == "modal" else ""
    middle, rest, negatable = _complements(rng, verb, tense)
    negated = negatable and modal != "must" and rng.random() < 0.2
    time = rng.choice(ADVERBS[tense]) if (rng.random() < 0.35 if adverb is None else adverb) else None

    infinitive = verb.prefix + verb.infinitive
    agreement, prefix = who.agreement, ""
    if tense == "present":
        finite = {"1s": verb.first, "3s": verb.third, "p": verb.infinitive}[agreement]
        final, prefix = [], verb.prefix
    elif tense == "perfect":
        finite, final = AUXILIARIES[verb.auxiliary][agreement], [verb.participle]
    else:
        finite = (AUXILIARIES["werden"] if tense == "future" else MODALS[modal])[agreement]
        final = [infinitive]
    english, question = _english_verb(verb, tense, modal, agreement, negated)
    middle = [*middle, "nicht"] if negated else middle
    return Clause(who, finite, middle, final, prefix, time, english, rest, question)


def _complements(rng: random.Random, verb: Verb, tense: str) -> tuple[list[str], list[str], bool]:
    """German and English complements of `verb`, and whether "nicht" may follow them."""
    kein = tense != "modal"  # "muss kein Brot kaufen" is "need not", not "must buy no bread"
    if verb.frame == "transitive":
        what = noun_phrase(rng, verb.objects, kein)
        return [what.german["acc"]], [what.english], what.english.split()[0] in ("the", "my", "this", "these")
    if verb.frame == "dative":
        whom = noun_phrase(rng, "person")
        return [whom.german["dat"]], [whom.english], True
    if verb.frame == "ditransitive":
        whom, what = noun_phrase(rng, "person"), noun_phrase(rng, verb.objects, kein)
        return [whom.german["dat"], what.german["acc"]], [what.english, "to", whom.english], False
    if verb.frame == "motion":
        where = noun_phrase(rng, "place")
        return ["in", where.german["acc"]], ["into", where.english], False
    choice = rng.random()
    if choice < 0.4:
        where = noun_phrase(rng, "place")
        return ["in", where.german["dat"]], ["in", where.english], False
    if choice < 0.7 and verb.english in COMPANY:
        company = noun_phrase(rng, "person,animal")
        return ["mit", company.german["dat"]], ["with", company.english], False
    return [], [], True


def _english_verb(verb: Verb, tense: str, modal: str, agreement: str, negated: bool) -> tuple[str, tuple[str, str]]:
    """The English verb in a statement, and around the subject of a question."""
    do = {"present": "does" if agreement == "3s" else "do", "perfect": "did"}.get(tense, "")
    if tense == "modal":
        do, main = (modal, verb.english) if modal != "want to" else ("", f"want to {verb.english}")
        do = do or ("does" if agreement == "3s" else "do")
    else:
        do, main = do or "will", verb.english
    question = (do, f"not {main}" if negated else main)
    if negated:
        return f"{do} not {main}", question
    if tense == "perfect":
        return verb.english_past, question
    if do in ("do", "does"):
        third = verb.english_third if tense == "present" else f"wants to {verb.english}"
        return (third if agreement == "3s" else main), question
    return f"{do} {main}", question


def _copula(rng: random.Random, who: Phrase) -> Clause:
    german, english = rng.choice(STATES)
    be = {"1s": "am", "3s": "is", "p": "are"}[who.agreement]
    return Clause(who, AUXILIARIES["sein"][who.agreement], [german], [], "", None, be, [english], (be, ""))


# --- sentences ------------------------------------------------------------------------------------------------------


def sentence(rng: random.Random) -> tuple[str, str]:
    """One random German sentence and its English translation."""
    shape = rng.choices(["main", "fronted", "question", "dass", "weil", "relative"], [34, 20, 10, 14, 10, 12])[0]
    stop = "."
    if shape == "main":
        german, english = clause(rng).main()
    elif shape == "fronted":
        inner = clause(rng, adverb=True)
        german, english = inner.fronted() if inner.adverb else inner.main()
    elif shape == "question":
        (german, english), stop = clause(rng).asked(), "?"
    elif shape == "dass":
        who = rng.choice(NAMES)
        third, english_third = rng.choice(KNOW)
        inner = clause(rng, noun_phrase(rng, "person")).subordinate()
        german, english = f"{who} {third} , dass {inner[0]}", f"{who} {english_third} that {inner[1]}"
    elif shape == "weil":
        first, second = _copula(rng, subject(rng)).main(), clause(rng, adverb=False).subordinate()
        german, english = f"{first[0]} , weil {second[0]}", f"{first[1]} because {second[1]}"
    else:
        who = noun_phrase(rng, "person")
        relative = clause(rng, who, adverb=False).subordinate((RELATIVE[who.relative], "who"))
        verb = rng.choice([verb for verb in VERBS if verb.frame == "intransitive" and not verb.prefix])
        german = f"{who.german['nom']} , {relative[0]} , {verb.third if who.agreement == '3s' else verb.infinitive}"
        english = f"{who.english} {relative[1]} {verb.english_third if who.agreement == '3s' else verb.english}"
    return _polish(german, stop), _polish(english, stop)


def _polish(text: str, stop: str) -> str:
    for apart, together in ((" ,", ","), (" in dem ", " im "), (" in das ", " ins ")):
        text = text.replace(apart, together)
    return text[0].upper() + text[1:] + stop


def corpus(train: int, valid: int, test: int, seed: int) -> dict[str, list[tuple[str, str]]]:
    """Distinct (German, English) pairs for each split; held-out words all occur in training.

    Raises ValueError when the grammar cannot make that many distinct sentences in reasonable time.
    """
    rng = random.Random(seed)
    translation: dict[str, str] = {}
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
    words: set[str] = set()
    for name, size in (("train", train), ("valid", valid), ("test", test)):
        patience = 0
        while len(splits[name]) < size:
            german, english = sentence(rng)
            patience += 1
            if patience > 1000:
                raise ValueError(f"cannot make {size:,} {name} sentences out of {train:,} training sentences' words")
            if not 4 <= len(german.split()) <= 13:
                continue
            if german in translation:
                if translation[german] != english:
                    raise AssertionError(f"two translations of {german!r}: {translation[german]!r}, {english!r}")
                continue
            new = {*german.lower().split(), *english.lower().split()}
            if name == "train":
                words |= new
            elif not new <= words:
                continue
            translation[german] = english
            splits[name].append((german, english))
            patience = 0
    return splits


def write(splits: dict[str, list[tuple[str, str]]], folder: Path) -> None:
    """Writes SPLIT.de and SPLIT.en for each split; files that have that text already stay untouched."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in splits.items():
        for side, language in enumerate(("de", "en")):
            path = folder / f"{split}.{language}"
            text = "".join(pair[side] + "\n" for pair in pairs).encode()
            if not path.exists() or path.read_bytes() != text:
                temporary = path.with_name(path.name + ".tmp")
                temporary.write_bytes(text)
                temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets {train,valid,test}.{de,en}")
    parser.add_argument("--train", type=int, default=12000, metavar="N", help="training pairs (default: %(default)s)")
    parser.add_argument("--valid", type=int, default=500, metavar="N", help="default: %(default)s")
    parser.add_argument("--test", type=int, default=500, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    for flag in ("train", "valid", "test"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag} must be at least 1, not {getattr(args, flag)}")
    try:
        splits = corpus(args.train, args.valid, args.test, args.seed)
    except ValueError as error:
        parser.error(str(error))
    write(splits, args.out)


if __name__ == "__main__":
    main()
