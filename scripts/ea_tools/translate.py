"""Translate raw text with a trained run; scripts/translate.sh is how it is called.

One line in, one line out: order and empty lines are kept. At a terminal each line is translated as it is typed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from ea_tools.checkpoints import choose, load, section, settings
from ea_tools.common import REPO, UserError, positive, replacing, reporting
from ea_tools.text import Source, Words, decode, read_prep


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: raw text from --input or standard input, translations to --output or standard output."""
    args = parse(arguments)
    with reporting("translate"), _input(args.input) as lines, _output(args.output) as write:
        translate(args, lines, write)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; what stands after -- goes to fairseq-interactive as it is."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="translate.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after -- go to fairseq-interactive, for example: -- --cpu",
    )
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="the run's folder: its averaged checkpoint, or its best"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="this checkpoint instead")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data (default: what the run was trained on)")
    parser.add_argument("--input", type=Path, metavar="FILE", help="raw text, UTF-8 (default: standard input)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: standard output)")
    parser.add_argument("--beam", type=positive, default=5, help="(default: 5)")
    parser.add_argument("--lenpen", type=float, default=1.0, help="length penalty; above 1 favours longer (default: 1)")
    parser.add_argument(
        "--buffer", type=positive, metavar="N", help="lines to sort and batch (default: 1000; 1 at a tty)"
    )
    args = parser.parse_args(arguments[:end])
    if not (args.run or args.checkpoint):
        parser.error("--run or --checkpoint is needed")
    args.interactive_flags = arguments[end + 1 :]
    return args


@contextlib.contextmanager
def _input(path: Path | None) -> Iterator[IO[bytes]]:
    """The lines of a file, or of standard input, as bytes."""
    if path is None:
        yield sys.stdin.buffer
    else:
        with path.open("rb") as file:
            yield file


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes one line; a file appears under its name only when it is complete."""
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8")
        yield lambda line: print(line, flush=True)
        return
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield lambda line: print(line, file=file)


def translate(args: argparse.Namespace, lines: Iterable[bytes], write: Callable[[str], None]) -> None:
    """Give the translations of `lines` (bytes) to `write`, in their order."""
    checkpoint = args.checkpoint or choose(args.run)
    state = load(checkpoint)
    data = args.data or Path(section(state, "task").get("data") or "")
    prep = read_prep(data)
    words = Words(prep, prep["target_lang"])
    at_terminal = args.input is None and sys.stdin.isatty()
    command = interactive(args, prep, data, checkpoint, args.buffer or (1 if at_terminal else 1000))
    print("+", shlex.join(command), file=sys.stderr)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as messages,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
        ) as process,
    ):
        feeder = Feeder(lines, args.input or "standard input", Source(data, prep), longest(state), process.stdin)
        answers = hypotheses(process.stdout)
        progress = tqdm(feeder.sent(), unit=" lines", disable=at_terminal or args.output is None, mininterval=1)
        try:
            for sent in progress:
                write(words.detokenize(next(answers)) if sent else "")
        except StopIteration:
            process.wait()
            messages.seek(0)
            said = [line for line in messages if line.strip()] or ["it said nothing"]
            raise UserError(f"fairseq-interactive ended, status {process.returncode}: {said[-1].strip()}") from None
        except BaseException:
            process.kill()
            raise


class Feeder(threading.Thread):
    """Sends the lines that hold something to fairseq-interactive, while the main thread reads its answers."""

    def __init__(
        self, lines: Iterable[bytes], name: Path | str, source: Source, longest: int, stream: IO[bytes]
    ) -> None:
        super().__init__(daemon=True)
        self._lines, self._name, self._source, self._longest, self._stream = lines, name, source, longest, stream
        self._queue = queue.SimpleQueue()
        self.start()

    def sent(self) -> Iterator[bool]:
        """For each line whether it was sent (or is empty), as they come; raises what went wrong with a line."""
        for item in iter(self._queue.get, None):
            if isinstance(item, Exception):
                raise item
            yield item

    def run(self) -> None:
        """What the thread does: prepare and send line after line, and report each of them to `sent`."""
        try:
            for number, line in enumerate(self._lines, 1):
                subwords = self._subwords(line, number)
                self._queue.put(bool(subwords))
                if subwords:
                    self._stream.write((" ".join(subwords) + "\n").encode())
                    self._stream.flush()
        except BrokenPipeError:
            pass  # fairseq-interactive has ended; the main thread finds that out too
        except Exception as error:
            self._queue.put(error)
        with contextlib.suppress(BrokenPipeError):
            self._stream.close()
        self._queue.put(None)

    def _subwords(self, line: bytes, number: int) -> list[str]:
        subwords = self._source(decode(line, self._name, number)).split()
        if len(subwords) > self._longest:
            print(
                f"translate: warning: {self._name}:{number}: {len(subwords):,} subwords, the model takes "
                f"{self._longest:,}; the rest of the line is left out",
                file=sys.stderr,
            )
        return subwords[: self._longest]


def longest(state: dict) -> int:
    """How many subwords a model reads: one position is for the end of the sentence."""
    return (settings(state).get("max_source_positions") or 1024) - 1


def interactive(args: argparse.Namespace, prep: dict[str, Any], data: Path, checkpoint: Path, buffer: int) -> list[str]:
    """The command of fairseq-interactive, which reads subwords from its standard input."""
    return [
        str(Path(sys.executable).with_name("fairseq-interactive")),
        *(str(data), "--user-dir", str(REPO / "ea_fairseq"), "--task", "translation"),
        *("--source-lang", prep["source_lang"], "--target-lang", prep["target_lang"], "--path", str(checkpoint)),
        *("--beam", str(args.beam), "--lenpen", str(args.lenpen), "--post-process", prep["bpe"]),
        *("--buffer-size", str(buffer), "--max-tokens", "4096"),
        *args.interactive_flags,
    ]


def hypotheses(output: Iterable[bytes]) -> Iterator[str]:
    """The translations in fairseq-interactive's output, which come in the order of its input."""
    expected = 0
    for line in output:
        if match := re.match(rb"H-(\d+)\t[^\t]*\t?(.*)", line):
            if int(match[1]) != expected:
                raise UserError(f"sentence {int(match[1])} was answered where {expected} was expected")
            expected += 1
            yield match[2].decode("utf-8")


if __name__ == "__main__":
    main()
