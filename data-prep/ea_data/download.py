"""Downloads that go on where they stopped, and published checksums."""

from __future__ import annotations

import errno
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

from ea_artifacts.command import UserError, say
from ea_artifacts.files import sha256

from .corpora import Part
from .parallel import tqdm_options
from .text import AGAIN

BLOCK = 1 << 20
ATTEMPTS = 5
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR}
PAUSE = 2.0  # seconds before the second attempt, doubled for each one after it


def fetch(url: str, path: Path) -> None:
    """Downloads `url` to `path` by way of path.part, which a later attempt, or a later run, takes up."""
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _continue(url, part)
            break
        except (OSError, HTTPException) as error:  # no network, or cut off: try again from where it stopped
            if isinstance(error, OSError) and error.errno in OF_THE_DISK:
                raise
            if attempt == ATTEMPTS or (isinstance(error, urllib.error.HTTPError) and error.code < 500):
                raise UserError(
                    f"{path.name} is missing, and could not be fetched from {url}\n  ({error})\n"
                    f"Get it from there or from elsewhere, put it into a folder, and say --raw FOLDER."
                ) from error
            pause = PAUSE * 2 ** (attempt - 1)
            say(f"{url}: {error}; attempt {attempt + 1} of {ATTEMPTS} in {pause:.0f} s")
            time.sleep(pause)
    part.rename(path)


def _continue(url: str, part: Path) -> None:
    """Downloads what `part` does not have yet. Raises HTTPException if the connection ends too early."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # nothing after what we have: it was complete
            return
        raise
    with response:
        if response.status != 206:  # the server starts over, so do we
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        bar = tqdm(total=total, initial=have, desc=f"  {part.stem}", unit="B", unit_scale=True, **tqdm_options())
        with bar, part.open("ab" if have else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                bar.update(len(block))
    if total is not None and part.stat().st_size < total:
        raise HTTPException(f"connection lost after {part.stat().st_size:,} of {total:,} bytes")


def verify(path: Path, part: Part) -> None:
    """Checks a file against its published checksum, if there is one."""
    if part.sha256 and (actual := sha256(path)) != part.sha256:
        raise UserError(f"{path}: its SHA-256 is {actual}, but should be {part.sha256}; {AGAIN}")
