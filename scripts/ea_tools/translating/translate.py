"""Translate raw text with a trained run; scripts/translate.sh is how it is called.

One line in, one line out: order and empty lines are kept. At a terminal each line is translated as it is typed.
With --output, translations are written as they come, to FILE.partial, which becomes FILE at the end; what was
interrupted goes on with --resume. With --nbest each line gives several, in the form of Moses, NUMBER ||| TRANSLATION
||| SCORE, where numbers count input lines from 0, and a score is the model's log-probability (base 2) over length.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
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

from ea_data.command_line import Parser
from ea_tools.checkpoints import choose, load, settings
from ea_tools.common import REPO, UserError, finite, positive, replaceable, replacing, reporting
from ea_tools.preparation import of_model
from ea_tools.text import Source, Words, decode
from ea_tools.translating.translators import add_precision, parse_both, program


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: raw text from --input or standard input, translations to --output or standard output."""
    args = parse(arguments)
    again = "run it again with --resume to go on" if args.output else "nothing is lost of what is above"
    with reporting("translate", again):
        checkpoint = args.checkpoint or choose(args.run)
        with _input(args.input) as file:
            _refuse_to_replace(file, args.output)
            with _output(args, checkpoint, file) as (lines, write, done):
                translate(args, checkpoint, lines, write, done)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; what stands after -- goes to fairseq-interactive as it is."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(
        prog="translate.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after -- go to fairseq-interactive, for example: -- --cpu",
    )
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="the run's folder, whose model.json names the checkpoint"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="this checkpoint instead")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data to compare with what the run keeps")
    parser.add_argument("--input", type=Path, metavar="FILE", help="raw text, UTF-8 (default: standard input)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: standard output)")
    parser.add_argument("--beam", type=positive, default=5, help="(default: 5)")
    parser.add_argument(
        "--lenpen", type=finite, default=1.0, help="length penalty; above 1 favours longer (default: 1)"
    )
    parser.add_argument("--nbest", type=positive, metavar="N", help="the N best translations of a line, with scores")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="sentences at once (default: 4096 tokens)")
    add_precision(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the --output of a run that was interrupted")
    parser.add_argument(
        "--buffer", type=positive, metavar="N", help="lines to sort and batch (default: 1000; 1 at a tty)"
    )
    args, flags = parse_both(parser, arguments)
    if not (args.run or args.checkpoint):
        parser.error("--run or --checkpoint is needed")
    if (args.nbest or 1) > args.beam:
        parser.error(f"--nbest {args.nbest}: is more than --beam {args.beam}")
    if args.resume and not args.output:
        parser.error("--resume goes on with an --output, and none is given")
    args.interactive_flags = flags
    return args


@contextlib.contextmanager
def _input(path: Path | None) -> Iterator[IO[bytes]]:
    """The lines of a file, or of standard input, as bytes."""
    if path is None:
        # Not sys.stdin: Python aborts where it ends while a thread waits in that object, as at Ctrl-C.
        with open(sys.stdin.fileno(), "rb", closefd=False) as file:
            yield file
    else:
        if path.is_dir() or not path.exists():
            raise UserError(f"--input {path}: {'is a folder' if path.is_dir() else 'no such file'}; a text is wanted")
        with path.open("rb") as file:
            yield file


def _refuse_to_replace(file: IO[bytes], output: Path | None) -> None:
    """Refuse an --output that is the input itself, by whatever name."""
    if output and output.exists() and os.path.samestat(os.fstat(file.fileno()), output.stat()):
        raise UserError(f"--output {output}: is the input, which would be lost; give it another name")


@contextlib.contextmanager
def _output(
    args: argparse.Namespace, checkpoint: Path, lines: Iterable[bytes]
) -> Iterator[tuple[Iterable[bytes], Callable[[str], None], int]]:
    """The input's lines, a function that writes one line, and how many input lines have been translated before.

    What goes to a file is first FILE.partial, and FILE when it is complete. FILE.partial.jsonl beside it says what it
    is made of: the settings in its first line, then a digest of each input line, as they are read.
    """
    if args.output is None:
        sys.stdout.reconfigure(encoding="utf-8")
        yield lines, lambda line: print(line, flush=True), 0
        return
    output = replaceable(args.output, "--output ")
    if not args.output.parent.is_dir():
        raise UserError(f"--output {args.output}: there is no folder {args.output.parent}; make it first")
    if output is None:  # a pipe or a device, which keeps nothing to go on with
        if args.resume:
            raise UserError(f"--resume: --output {args.output} is not a file")
        with args.output.open("w", encoding="utf-8") as stream:
            yield lines, lambda line: print(line, file=stream, flush=True), 0
        return
    partial, record = (output.with_name(output.name + end) for end in (".partial", ".partial.jsonl"))
    with checkpoint.open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()[:16]
    used = {
        "checkpoint": f"{checkpoint.resolve()} (sha256 {digest})",
        **{name: getattr(args, name) for name in ("beam", "lenpen", "nbest", "precision", "interactive_flags")},
    }
    with partial.open("a+b") as file:

        def write(line: str) -> None:
            file.write(f"{line}\n".encode())
            file.flush()

        _lock(file, partial)
        before = _translated_before(file, partial, record, used, args)
        with replacing(record) as temporary:
            temporary.write_text("".join(f"{json.dumps(entry)}\n" for entry in (used, *before)), encoding="utf-8")
        with record.open("a", encoding="utf-8") as notes:
            yield _noted(lines, before, notes, partial), write, len(before)
        partial.replace(output)
        record.unlink()


def _lock(file: IO[bytes], partial: Path) -> None:
    """Keep a second process out of FILE.partial for as long as this one has it open."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = partial.exists() and os.path.samestat(os.fstat(file.fileno()), partial.stat())  # not FILE by now
    except (BlockingIOError, PermissionError):
        free = False
    if not free:
        raise UserError(f"{partial}: another process writes this file; let it end, or choose another --output")


def _translated_before(
    file: IO[bytes], partial: Path, record: Path, used: dict[str, Any], args: argparse.Namespace
) -> list[str]:
    """Digests of the input lines that an interrupted run has translated; what it wrote of another is cut off."""
    file.seek(0)
    lines = file.read().split(b"\n")[:-1]
    each = args.nbest or 1
    done = len(lines) // each
    if done and not args.resume:
        raise UserError(f"{partial}: holds {done:,} lines of an interrupted run; go on with --resume, or remove it")
    noted = record.read_text(encoding="utf-8").split("\n")[:-1] if done and record.exists() else []
    before, *digests = map(json.loads, noted or ["{}"])
    for name, value in used.items():
        if done and before.get(name) != value:
            raise UserError(f"--resume: {partial} was made with {name} {before.get(name)}, and now it is {value}")
    digests = digests[:done]
    file.truncate(sum(len(line) + 1 for line in lines[: len(digests) * each]))
    return digests


def _noted(lines: Iterable[bytes], before: Sequence[str], notes: IO[str], partial: Path) -> Iterator[bytes]:
    """The input's lines, whose digests go to `notes`; the first ones must be those whose digests are `before`."""
    number = 0
    for number, line in enumerate(lines, 1):
        digest = hashlib.sha256(line.rstrip(b"\r\n")).hexdigest()[:16]
        if number > len(before):
            print(json.dumps(digest), file=notes, flush=True)
        elif digest != before[number - 1]:
            raise UserError(f"--resume: {partial} was made from another input: line {number:,} is not the same")
        yield line
    if number < len(before):
        raise UserError(f"--resume: {partial} holds {len(before):,} lines, and the input has only {number:,}")


def translate(
    args: argparse.Namespace, checkpoint: Path, lines: Iterable[bytes], write: Callable[[str], None], done: int = 0
) -> None:
    """Give the translations of `lines` (bytes) to `write`, in their order; the first `done` of them are left out."""
    state = load(checkpoint)
    preparation = of_model(checkpoint, state, args.run, args.data)
    data, prep = preparation.folder, preparation.prep
    words = Words(prep, prep["target_lang"])
    at_terminal = args.input is None and sys.stdin.isatty()
    buffer = args.buffer or (1 if at_terminal else max(1000, args.batch_size or 1))
    positions = tuple(longest(state, side) + 1 for side in ("source", "target"))
    command = interactive(args, prep, data, checkpoint, buffer, positions)
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
        name = args.input or "standard input"
        feeder = Feeder(lines, name, Source(data, prep), longest(state), process.stdin, done)
        answers = hypotheses(process.stdout, args.nbest or 1)
        progress = tqdm(
            feeder.sent(), unit=" lines", initial=done, disable=at_terminal or not args.output, mininterval=1
        )
        prompt = _prompt if at_terminal else lambda text="": None
        prompt(f"Type a sentence in {prep['source_lang']} and press Return; Ctrl-D ends.\n")
        try:
            for number, sent in enumerate(progress, done):
                for line in _written(number, next(answers) if sent else [], words.detokenize, args.nbest):
                    write(line)
                prompt()
        except StopIteration:
            process.wait()
            messages.seek(0)
            said = [line for line in messages if line.strip()] or ["it said nothing"]
            raise UserError(f"fairseq-interactive ended, status {process.returncode}: {said[-1].strip()}") from None
        except BaseException:
            process.kill()
            raise


def _prompt(text: str = "") -> None:
    print(text + "> ", end="", file=sys.stderr, flush=True)


def _written(
    number: int, answers: Sequence[tuple[str, str]], detokenize: Callable[[str], str], nbest: int | None
) -> list[str]:
    """The output lines of input line `number`, whose (score, tokens) are `answers`, none where it is empty."""
    if not nbest:
        return [detokenize(answers[0][1]) if answers else ""]
    rows = answers or [("0", "")] * nbest
    return [f"{number} ||| {detokenize(tokens)} ||| {score}" for score, tokens in rows]


class Feeder(threading.Thread):
    """Sends the lines that hold something to fairseq-interactive, while the main thread reads its answers."""

    def __init__(
        self,
        lines: Iterable[bytes],
        name: Path | str,
        source: Source,
        longest: int,
        stream: IO[bytes],
        done: int = 0,
    ) -> None:
        super().__init__(daemon=True)
        self._done = done  # so many lines have been translated before
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
                if number <= self._done:
                    continue
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


def longest(state: dict, side: str = "source") -> int:
    """How many subwords a model reads (or writes: side "target"): one position is for the end of the sentence."""
    return (settings(state).get(f"max_{side}_positions") or 1024) - 1


def interactive(
    args: argparse.Namespace,
    prep: dict[str, Any],
    data: Path,
    checkpoint: Path,
    buffer: int,
    positions: tuple[int, int],
) -> list[str]:
    """The command of fairseq-interactive, which reads subwords from its standard input.

    Args:
        buffer: how many lines it reads before it translates them; a batch cannot be larger.
        positions: how many the model has on the source's side and on the target's; fairseq assumes 1,024.
    """
    if args.batch_size:
        batch = ["--batch-size", str(min(args.batch_size, buffer))]
    else:
        batch = ["--max-tokens", str(max(4096, positions[0]))]
    return [
        *program("fairseq-interactive", args.precision, args.interactive_flags),
        *(str(data), "--user-dir", str(REPO / "ea_fairseq"), "--task", "translation"),
        *("--source-lang", prep["source_lang"], "--target-lang", prep["target_lang"], "--path", str(checkpoint)),
        *("--beam", str(args.beam), "--lenpen", str(args.lenpen), "--post-process", prep["bpe"]),
        *("--buffer-size", str(buffer), "--nbest", str(args.nbest or 1)),
        *("--max-source-positions", str(positions[0]), "--max-target-positions", str(positions[1])),
        *batch,
        *args.interactive_flags,
    ]


def hypotheses(output: Iterable[bytes], nbest: int = 1) -> Iterator[list[tuple[str, str]]]:
    """For each sentence, in the order of fairseq-interactive's input, its (score, tokens), the best one first."""
    expected, answers = 0, []
    for line in output:
        if match := re.match(rb"H-(\d+)\t([^\t]*)\t?(.*)", line):
            if int(match[1]) != expected:
                raise UserError(f"sentence {int(match[1])} was answered where {expected} was expected")
            answers.append((match[2].decode(), match[3].decode("utf-8")))
            if len(answers) == nbest:
                yield answers
                expected, answers = expected + 1, []


if __name__ == "__main__":
    main()
