"""The common part of all commands: parser, types of arguments, and the error that a user can put right."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import logging
import math
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

#: The folder that holds scripts/, recipes/, data/, runs/ and results/.
REPO = Path(__file__).resolve().parents[1]
ADVICE = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "give the name of a file",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file stands in the place of a folder; choose another path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or choose another path"),
    errno.EROFS: "choose another path",
    errno.EMFILE: "let the shell open more: ulimit -n 4096",
    errno.ENAMETOOLONG: "choose a shorter name",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room and run it again"),
}
#: flag -> its values, as words
Flags = dict[str, list[str]]


class UserError(Exception):
    """A mistake that the user can put right. The message names the file, line, flag or value."""


class MissingError(UserError):
    """A file or folder is not there."""


class Parser(argparse.ArgumentParser):
    """A parser that answers an error in two lines; argparse prints the whole usage first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists all options\n")


#: the greatest whole number that C's int holds, and so pools of processes, bars of progress and fairseq do
C_INT_MAX = 2**31 - 1


def at_least(least: int, kind: Callable[[str], float] = int) -> Callable[[str], Any]:
    """An argparse type: a number of this kind that is not below `least`, nor a whole one above ``C_INT_MAX``."""

    def number(text: str) -> float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        if kind is int and value > C_INT_MAX:
            raise argparse.ArgumentTypeError(f"must be at most {C_INT_MAX}, not {text}")
        return value

    return number


positive = at_least(1)


def finite(text: str) -> float:
    """An argparse type: a number that is neither infinite nor "nan"."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text}")
    return value


def say(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def reporting(command: str, again: str = "run it again to go on") -> Iterator[None]:
    """End the program with one line: status 1 after a UserError or a refusal of the system, 130 after Ctrl-C.

    SIGTERM, as schedulers send it, and a reader that closes the output early, as head does, end the program without a
    message. Temporary files are removed, but after a kill.

    Args:
        command: the name that the line begins with.
        again: the end of the line after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a letter shows another one
            stream.reconfigure(errors="replace")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except UserError as error:
        sys.exit(f"{command}: {error}")
    except BrokenPipeError:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (Python flushes it at its end)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        sys.exit(f"{command}: {explained(error)}")
    except UnicodeDecodeError as error:
        near = error.object[max(error.start - 20, 0) : error.end + 20]
        sys.exit(f"{command}: a file that was read is not UTF-8 text ({error.reason}), near {near!r}; convert it first")
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; {again}", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def explained(error: OSError) -> str:
    """A refusal of the system as a sentence: the file, the fault and the remedy."""
    if not error.strerror:  # a library raised it, in its own words
        return str(error)
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]  # not a file's number
    message = ": ".join(filter(None, (" -> ".join(map(os.fsdecode, names)), error.strerror)))
    return f"{message}; {ADVICE[error.errno]}" if error.errno in ADVICE else message


def ignore_warnings() -> None:
    """Hide warnings inside fairseq, hydra and PyTorch's exporter: users cannot change their causes."""
    warnings.filterwarnings("ignore", category=UserWarning, module="hydra|fairseq")
    warnings.filterwarnings("ignore", category=FutureWarning, module="fairseq")
    messages = r"\n'config' is validated|'pin_memory' argument|Support for mismatched key_padding_mask|.*LeafSpec"
    warnings.filterwarnings("ignore", message=messages)


def quiet() -> None:
    """Hide fairseq's and hydra's warnings, and their reports while they start."""
    ignore_warnings()
    logging.disable(logging.INFO)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's


def hint(word: str, known: Collection[str]) -> str:
    """A suggestion for an unknown word: the nearest of the known ones, or all of them."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"available: {', '.join(known)}"


def portable(command: Iterable[str]) -> str:
    """A command as it can be run from the repository's folder on any machine."""
    return shlex.join(command).replace(f"{REPO}/", "")


def listed(words: Iterable, between: str = ", ") -> str:
    """Words one after the other: "1, 2, 3"."""
    return between.join(map(str, words))


def parse_flags(words: Iterable[str]) -> Flags:
    """["--lr", "0.1", "--fp16"] -> {"lr": ["0.1"], "fp16": []}: fairseq flags from a command line.

    The last of several counts, but each --without of train.sh names one flag more.
    """
    flags: Flags = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = [*(flags.get(name, []) if name == "without" else []), *([value] if equals else [])]
        elif len(word) == 2 and word[0] == "-" and word[1].isalpha():
            raise UserError(f"{word}: expected a flag of fairseq-train in full, as in --source-lang")
        elif name is None:
            raise UserError(f"{word!r}: expected a flag of fairseq-train here")
        else:
            flags[name].append(word)
    return flags
