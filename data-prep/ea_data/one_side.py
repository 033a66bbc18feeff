"""One language of a prepared folder of parallel text, as data for fairseq's language_modeling, masked_lm and denoising.

For example: data-prep/one-side.sh data/multi30k-de-en en data/multi30k-en
The binary data are the same files under the names that those tasks look for; FOLDER stays as it is.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ea_artifacts.command import Parser, UserError, reporting
from ea_artifacts.files import write_json
from ea_artifacts.preparation import FILE, Preparation, one_side


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: copy the files of one language, and describe them."""
    parser = Parser(prog="one-side.sh", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what another command of data-prep/ made")
    parser.add_argument("language", metavar="LANGUAGE", help="one of its two")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not be there yet")
    args = parser.parse_args(arguments)
    with reporting("one-side.sh"):
        languages, out = Preparation.at(args.folder).languages, args.out
        if out.exists():
            raise UserError(f"{out}: is there already; delete it, or name another")
        if args.language not in languages:
            raise UserError(f"{args.folder}: has no {args.language}; its languages are {' and '.join(languages)}")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as work:
            new = Path(work) / "data"
            new.mkdir()
            for path in args.folder.glob(f"*.{args.language}.[bi][id][nx]"):  # .bin and .idx
                shutil.copyfile(path, new / f"{path.name.partition('.')[0]}{path.suffix}")
            names = ("code", "sentencepiece.bpe.model", f"vocabulary.{args.language}")
            for path in (args.folder / name for name in names):
                if path.exists():
                    shutil.copyfile(path, new / path.name)
            shutil.copyfile(args.folder / f"dict.{args.language}.txt", new / "dict.txt")
            write_json(new / FILE, one_side(args.folder, args.language))
            new.rename(out)
        print(f"{out}: ready")


if __name__ == "__main__":
    main()
