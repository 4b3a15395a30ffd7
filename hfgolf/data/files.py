"""The files that a corpus consists of: paths, globs and URLs resolved, and what each is called on every machine.

Owns names and endings, which files of a folder count, and what first bytes tell of a file that is not text.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import itertools
import json
import logging
import os
import re
import shlex
import sysconfig
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NoReturn

from hfgolf.config.mixture import of_text
from hfgolf.config.sections import DataSection
from hfgolf.data.cache_folder import cache_folder
from hfgolf.data.downloads import download, list_urls
from hfgolf.data.tables import BINARY_TABLES, TABLES
from hfgolf.system.errors import UserError
from hfgolf.system.redact import redact
from hfgolf.system.wording import close_match, count_of, first_line, join_words

FIRST_TEXTS = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go", ".rs")
"""What counted as text in an archive before there was a key for it in the identity of a corpus."""
TEXTS = (
    *FIRST_TEXTS,
    *(".markdown", ".adoc", ".org", ".htm", ".css", ".scss", ".less", ".vue", ".svelte", ".pyi", ".pyx", ".ipynb"),
    *(".cc", ".hh", ".hpp", ".cxx", ".cu", ".cuh", ".m", ".mm", ".cs", ".fs", ".kt", ".kts", ".scala", ".groovy"),
    *(".clj", ".swift", ".dart", ".mjs", ".cjs", ".jsx", ".tsx", ".php", ".rb", ".pl", ".pm", ".lua", ".r", ".jl"),
    *(".sql", ".sh", ".bash", ".zsh", ".ps1", ".bat", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".lisp", ".el"),
    *(".scm", ".nim", ".zig", ".f90", ".pas", ".asm", ".v", ".sv", ".vhd", ".proto", ".cmake", ".yaml", ".yml"),
    *(".toml", ".ini", ".cfg"),
)
"""What counts as text in a folder or an archive. A file that is named itself may have any ending but NOT_TEXT's."""
ARCHIVES = (".zip", ".tar")
_VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "eval", "test")
_SPLIT_NAME = re.compile(
    "(?i)(?<![a-z])(?:(?P<train>train(?:ing)?)|(?P<validation>validation)|(?P<valid>valid)|(?P<val>val)|(?P<dev>dev)"
    "|(?P<eval>eval(?:uation)?)|(?P<test>test(?:ing)?))(?![a-z])"
)
KNOWN = (*TABLES, *TEXTS, *ARCHIVES)
SHARDS = (".bin", ".npy", ".ds")
NOT_TEXT = {
    **dict.fromkeys(SHARDS, "set data.source shards if it holds token ids"),
    **dict.fromkeys((".7z", ".rar"), "unpack it, and name the folder"),
}
_RUN_FILES = {"config.yaml", "metadata.json"}  # what tells a run's folder
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_TARS = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz", ".tzst": ".zst"}
_OFFICE = {".docx": "a Word document", ".odt": "an OpenDocument text", ".epub": "an EPUB book"}
_SHEETS = {".xlsx": "an Excel sheet", ".ods": "an OpenDocument sheet", ".numbers": "a Numbers sheet"}
_SAVED = {
    ".pptx": "a PowerPoint presentation",
    ".odp": "an OpenDocument presentation",
    ".key": "a Keynote presentation",
    ".pages": "a Pages document",
}
_OBJECTS = "holds a program's numbers or objects, not text; write its text to a file"
_PDF = "is a PDF, not text; convert it with `pdftotext`, and name the .txt file"
_SPELLED = (
    (rb"%PDF-", _PDF),
    (rb"{\\rtf", "is RTF, not plain text; convert it with `pandoc -t plain`, and name the .txt file"),
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "is a pointer of Git LFS, not the text; fetch that with `git lfs pull`",
    ),
    (
        rb"window\.YTD\.",
        "is data of an archive of X (Twitter) in JavaScript, not text; write what follows its first = to a .json file;"
        " of tweets, that has data.text_column tweet.full_text",
    ),
    (
        rb"(?s).*?\x1b\$[()]?[@-D]",
        "is in ISO-2022-JP or another encoding of 7 bits, not UTF-8; convert it with `iconv -f ISO-2022-JP -t UTF-8`",
    ),
    (
        rb"(?ms)(From |(Return-Path|Delivered-To|Received|MIME-Version|Message-ID|Date|Subject|From|To|X-[\w-]+): )"
        rb".*?^(?i:Content-Transfer-Encoding: *(base64|quoted-printable))",
        "is mail with encoded parts, not text; write its text to a file, as with Python's `mailbox` and `email`",
    ),
)
"""What is spelled in characters, and yet no text."""
_FORMATS: tuple[tuple[bytes, str], ...] = (
    (rb"%PDF-", _PDF),
    (rb"(?s)PK\x03\x04.{26}[\w./-]+(/data\.pkl|\.npy)", _OBJECTS),  # what torch.save and np.savez write
    (rb"PK\x03\x04|PK\x05\x06", "is a zip archive, not text; name it .zip, or unpack it"),
    (rb"\xd0\xcf\x11\xe0", "is an old Office document, not text; save it as plain text or CSV"),
    (rb"\x1f\x8b", "is compressed by gzip; give its name the ending .gz"),
    (rb"BZh[1-9]1AY&SY", "is compressed by bzip2; give its name the ending .bz2"),
    (rb"\xfd7zXZ\0", "is compressed by xz; give its name the ending .xz"),
    (rb"\x28\xb5\x2f\xfd", "is compressed by zstd; give its name the ending .zst"),
    (rb"\x1f[\x9d\xa0]|\x04\x22\x4d\x18|\]\0\0", "is compressed; unpack it, or compress it with gzip, xz or zstd"),
    (rb"7z\xbc\xaf|Rar!\x1a", "is an archive, not text; unpack it, and name the folder"),
    (rb"(?s).{257}ustar", "is a tar archive, not text; give its name the ending .tar, or unpack it"),
    (rb"PAR1", "is a Parquet file; give its name the ending .parquet"),
    (rb"ARROW1|\xff\xff\xff\xff", "is an Arrow file; give its name the ending .arrow"),
    (rb"SQLite format 3\0", "is an SQLite database, not text; write its table of text to a .csv file"),
    (rb"\x89HDF|\x93NUMPY|\x80[\x02-\x05]", _OBJECTS),
    (
        rb"\xff\xd8\xff|\x89PNG|GIF8[79]a|II\*\0|MM\0\*|(?s:RIFF.{4}WEBP)|(?s:.{4}ftyp(avif|hei[cx]|mif1))",
        "is a picture, not text; read its text with `tesseract PICTURE NAME`, and name NAME.txt",
    ),
    (
        rb"(?s)ID3|\xff[\xf2\xf3\xfb]|OggS|fLaC|RIFF|.{4}ftyp|\x1a\x45\xdf\xa3",
        "is sound or a video, not text; transcribe it",
    ),
    (rb"\x7fELF|MZ.\0|\xcf\xfa\xed\xfe", "is a program, not text"),
)
_EAST_ASIAN = {0x00, 0x30, *range(0x4E, 0xA0), *range(0xAC, 0xD8), 0xFF}
"""Upper bytes of UTF-16: space and digits, kana, Chinese, Korean, wide letters."""
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    *((mark, "utf-32") for mark in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),  # the first begins like UTF-16's
    *((mark, "utf-16") for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFile:
    """A file of text or rows: its name (the same on every machine), its path, and its split if that is fixed."""

    name: str
    path: Path
    split: str | None = None
    is_optional: bool = False
    """It was found rather than named, and is of a kind that is skipped if it has no column (optional_kinds)."""
    is_named: bool = False
    """It was named by itself, not by a folder, a glob or an archive, so it must hold a document."""

    @property
    def endings(self) -> tuple[str, str]:
        """Return (format, compression), such as (".jsonl", ".zst") or (".txt", "")."""
        stem, last = os.path.splitext(self.path.name.lower())  # not of the name: a URL may end in a query
        if last in _TARS:
            return ".tar", _TARS[last]
        return (os.path.splitext(stem)[1], last) if last in COMPRESSIONS else (last, "")


def stdlib_files() -> list[SourceFile]:
    """Return the sources of the standard library: over 10 MB of text, the same for any build of a Python version.

    Skips its tests, which some distributions omit; _sysconfigdata, which differs between builds; and pydoc_data, the
    language reference as one generated string, which is 6 % of the text and no code.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        paths += [Path(folder, name) for name in fnmatch.filter(names, "*.py") if not name.startswith("_sysconfigdata")]
    return [SourceFile(name, root / name) for name in sorted(path.relative_to(root).as_posix() for path in paths)]


def with_splits(data: DataSection) -> DataSection:
    """Return `data` with the splits of each folder in it that holds a saved DatasetDict, instead of the folder.

    Its `train` is for data.files. What it has for validation is for data.val_files, if nothing else is. Raises
    UserError if it has no `train`.
    """
    if data.source != "files":
        return data
    files, val_files = [], [_saved_splits(name, "data.val_files")[1] or name for name in data.val_files]
    for name in data.files:
        train, val = _saved_splits(name, "data.files")
        files.append(train or name)
        if val and not data.val_files:
            val_files.append(val)
            log_once(f"data.files: {name}: {Path(val).name} validates")
    return data.replace(files=files, val_files=val_files)


def _saved_splits(name: str, key: str) -> tuple[str | None, str | None]:
    """Return the folders of the splits that train and validate, if a folder holds a saved DatasetDict."""
    folder = os.path.expanduser(name)
    if not os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        return None, None
    splits = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    names = {os.path.basename(path): path for path in splits}
    train, val = train_and_validation(names, f"{key}: {folder}")
    return names[train], None if val is None else names[val]


def train_and_validation(splits: Collection[str], where: str) -> tuple[str, str | None]:
    """Return which split of a dataset trains, and which one validates if there is one.

    where: how an error begins, such as "data.files: folder". Raises UserError if no split is called train.
    """
    if "train" not in splits:
        raise UserError(f"{where} has no split called train; name one of its own: {join_words(splits, ' or ')}.")
    return "train", next((name for name in _VALIDATION_SPLITS if name in splits), None)


def named_files(data: DataSection) -> list[SourceFile]:
    """Return the files of data.files and data.val_files; without the latter, those that are called like a split of it.

    Raises UserError like `match_files`.
    """
    val_files = match_files(data, "val_files", "val")
    files = match_files(data, "files", None)
    if val_files:
        # A file in both is only for validation: `files: data/*.txt, val_files: data/val.txt` must not train on val.txt
        val_paths = set(_real_paths(file.path for file in val_files).values())
        real_paths = _real_paths(file.path for file in files)
        files = [file for file in files if real_paths[file.path] not in val_paths]
    if data.source == "files":
        files, found = without_other_splits(files, not val_files)
        val_files += found
    return files + val_files


def without_other_splits(files: list[SourceFile], needs_validation: bool) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return the files without those that are for validation or tests by their names, and those that validate.

    Files are `train` and `test` if their names, but for numbers, differ in that word alone, or the names of their
    folders do: train.csv and test.csv, train-00000-of-00002.parquet and validation-00000-of-00001.parquet, train/a.txt
    and test/b.txt. Files that are named one by one and sources, such as train.py, are what they are named for.
    """
    groups: dict[str, dict[str, list[SourceFile]]] = {}
    for file in files:
        for split, rest in () if file.is_named else _splits_in(file):
            groups.setdefault(rest, {}).setdefault(split, []).append(file)
    val, unread = set[str](), set[str]()
    for splits in groups.values():
        kinds = {file.endings[0] for group in splits.values() for file in group}
        if "train" in splits and len(splits) > 1 and kinds <= {*TABLES, ".txt"}:
            _, validating = train_and_validation(splits, "data.files")
            for split in {*splits} - {"train"}:
                names = {file.name for file in splits[split]}
                (val if needs_validation and split == validating else unread).update(names)
    others = {"for validation": val - unread, "not read": unread}
    said = [f"{what}: {join_words(sorted(names), maximum=3)}" for what, names in others.items() if names]
    if said:
        log_once(f"data.files: by their names, {'; '.join(said)}")
    train = [file for file in files if file.name not in val | unread]
    return train, [replace(file, split="val") for file in files if file.name in val - unread]


def _splits_in(file: SourceFile) -> Iterator[tuple[str, str]]:
    """Yield each split that a file's name or one of its folders is called by, and the rest of the name."""
    *folders, name = file.name.split("/")
    for place, folder in enumerate(folders):
        if found := _SPLIT_NAME.fullmatch(folder):
            yield str(found.lastgroup), "/".join([*folders[:place], "*", ""])
    stem = name.lower().removesuffix("".join(file.endings))
    if found := _SPLIT_NAME.search(stem):
        rest = re.sub("[0-9]+", "", f"{stem[: found.start()]}*{stem[found.end() :]}")
        yield str(found.lastgroup), "/".join([*folders, rest])


def match_files(data: DataSection, field: str, split: str | None) -> list[SourceFile]:
    """Resolve paths, folders, globs and URLs in order, each file once. Names are relative to their common folder.

    Raises UserError if an entry matches nothing, if a file is empty, or if it is of a kind that holds no text.
    """
    key, downloads = f"data.{field}", cache_folder(data) / "downloads"
    urls: dict[Path, str] = {}
    named: set[Path] = set()
    optional: set[Path] = set()
    alone: set[Path] = set()
    for pattern in getattr(data, field):
        if is_url(pattern):
            copies = {download(url, key, downloads): url for url in list_urls(pattern, key, downloads)}
            urls.update(copies)
            alone.update(path for path, url in copies.items() if url == pattern)
            continue
        matched = dict.fromkeys((Path(os.path.abspath(path)) for path in _match(pattern, key, data)), "")
        urls.update(matched)
        if not os.path.isdir(os.path.expanduser(pattern)):
            named.update(matched)
            alone.update(matched if os.path.isfile(os.path.expanduser(pattern)) or os.path.isfile(pattern) else ())
        else:
            kinds = optional_kinds((SourceFile("", path).endings[0], path.stat().st_size) for path in matched)
            optional.update(path for path in matched if SourceFile("", path).endings[0] in kinds)
    # a link keeps its own name, whose ending says what it is: the Hub's cache links to files named by their hashes
    resolved = _real_paths(urls)
    paths = {resolved[path]: path for path in reversed(urls)}
    unique = [path for path in urls if paths[resolved[path]] == path]
    local = [path.parent for path in unique if not urls[path]]
    root = os.path.commonpath(local) if local else ""
    names = {path: redact(urls[path]) if urls[path] else path.relative_to(root).as_posix() for path in unique}
    optional -= named
    files = [SourceFile(name, path, split, path in optional, path in alone) for path, name in names.items()]
    for file in files:
        if file.path.stat().st_size == 0:
            raise UserError(f"{key}: {file.path} is empty; remove it or add text to it.")
        if data.source == "files":
            require_text(file, key)
    return files


def optional_kinds(files: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Return the endings of files that are skipped without the column, of a folder or archive with these files.

    files: (ending, bytes). Tables, such as the package.json of a source tree, if text is most of it; and beside tables
    text, which has no columns, such as a README.
    """
    sizes = [*files]
    text, tables = (sum(size for ending, size in sizes if ending in kinds) for kinds in (TEXTS, TABLES))
    return (*(TABLES if text > tables else ()), *(TEXTS if tables else ()))


def _real_paths(paths: Iterable[Path]) -> dict[Path, str]:
    """Resolve the links in absolute paths. Like Path.resolve, but it looks at the way to each folder only once."""
    real_path = cache(os.path.realpath)
    return {
        path: real_path(path) if path.is_symlink() else os.path.join(real_path(path.parent), path.name)
        for path in paths
    }


def is_url(name: str) -> bool:
    """Return whether a name is a URL, and not a path that exists."""
    return "://" in name and not os.path.lexists(name)


def find_paths(name: str, key: str) -> tuple[list[str], bool]:
    """Return the paths that a name stands for, and whether it is a glob: a path that exists is taken as it is written.

    In a glob, folders that exist are literal, too: with a folder `data[1]`, `data[1]/*.txt` is about its files. Raises
    UserError if nothing matches, or if it is neither a file nor a folder.
    """
    for path in (name, os.path.expanduser(name)):
        if os.path.isfile(path) or os.path.isdir(path):
            return [path], False
        if os.path.islink(path) and not os.path.exists(path):
            raise UserError(f"{key}: {path!r} is a link to {os.readlink(path)!r}, which does not exist; mend it.")
        if os.path.lexists(path):
            raise UserError(f"{key}: {path!r} is a pipe, socket or device, and text is read twice; write it to a file.")
    folder, rest = os.path.split(path)
    while folder and not os.path.isdir(folder):
        folder, last = os.path.split(folder)
        rest = os.path.join(last, rest)
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), rest), recursive=True))
    if not paths:
        beside = [] if glob.has_magic(rest) else glob.glob("*", root_dir=folder or None)
        meant = close_match(rest, beside, likeness=0.6)  # of "german texts", `german` is near enough
        likely = f"; did you mean {shlex.quote(os.path.join(folder, meant))}?" if meant else "."
        advice = "give a file, a folder, a glob or a URL"
        if max(map(len, name.split(os.sep))) > 255 or "\n" in name:  # hardly a name
            raise UserError(f"{key}: {name[:40]!r}... is no file; hfgolf.fit takes texts as data=[...].")
        raise UserError(f"{key}: no file matches {name!r} (in {Path.cwd()}); {advice}{likely}")
    return paths, True


def require_paths(data: DataSection) -> None:
    """Raise UserError if a name in data.files or data.val_files is of no file, or of one without text.

    Reads the first bytes of files that are named one by one, and imports little.
    """
    for entry, text in data.sources().items() if data.mixture else ():
        with of_text(entry):
            require_paths(text)
    for field in ("files", "val_files"):
        for name in itertools.filterfalse(is_url, getattr(data, field)):
            paths, is_glob = find_paths(name, f"data.{field}")
            file = SourceFile(name, Path(paths[0]))
            ending, compression = file.endings
            is_packed = compression or ending in (*ARCHIVES, *BINARY_TABLES)
            if is_glob or file.path.is_dir() or data.source == "shards" or is_packed:
                continue
            require_text(file, f"data.{field}")
            with suppress(OSError), open(file.path, "rb") as content:  # match_files says why
                if problem := not_text(content.read(1 << 12), file.path, data.encoding):
                    raise UserError(f"data.{field}: {file.path} {problem}.")


def require_text(file: SourceFile, key: str) -> None:
    """Raise UserError if a file's ending says that it holds no text. Its bytes may look like text all the same."""
    if remedy := NOT_TEXT.get(file.endings[0]):
        raise UserError(f"{key}: {file.path} is not text; {remedy}.")


def _match(name: str, key: str, data: DataSection) -> list[str]:
    """Return the files that a path, a folder or a glob stands for, in an order that does not depend on the machine."""
    paths, is_glob = find_paths(name, key)
    if not is_glob:
        kinds = SHARDS if data.source == "shards" else KNOWN
        return _folder_files(paths[0], key, cache_folder(data), kinds) if os.path.isdir(paths[0]) else paths
    files = [path for path in paths if os.path.isfile(path)]
    if not files:
        raise UserError(f"{key}: {name!r} matches only folders; name one of them, such as {paths[0]!r}.")
    filled = [path for path in files if os.path.getsize(path)] or files  # an empty file is an error only if it is named
    skipped = {"empty": sorted({*files} - {*filled}), "not a file": sorted({*paths} - {*files})}
    log_skipped(key, name, len(filled), skipped)
    return filled


def _folder_files(folder: str, key: str, cache: Path, kinds: Iterable[str]) -> list[str]:
    """Return the files of some kinds in a folder and its subfolders, and log what is skipped.

    Runs and the token cache do not count: they change while a run starts. A folder that `save_to_disk` wrote stands for
    the Arrow files it lists, in its own order. Linked subfolders come last, without those that were read before.
    """
    used: list[str] = []
    reasons = ("hidden", "run or cache", "link to a folder above", "other kind", "empty", "not a file")
    skipped: dict[str, list[str]] = {reason: [] for reason in reasons}
    seen: set[str] = set()

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{key}: cannot read {error.filename} ({error.strerror}); make it readable.") from error

    roots = [folder]
    for parent, subfolders, names in itertools.chain.from_iterable(os.walk(root, onerror=refuse) for root in roots):
        real_path = os.path.realpath(parent)
        skipped["hidden"] += [os.path.join(parent, name) for name in [*subfolders, *names] if name.startswith(".")]
        visible = sorted(name for name in subfolders if not name.startswith("."))
        subfolders[:] = [name for name in visible if not os.path.islink(os.path.join(parent, name))]
        if real_path in seen or real_path == str(cache.resolve()) or set(names) >= _RUN_FILES:
            skipped["run or cache"] += [] if real_path in seen else [parent]
            subfolders.clear()
            continue
        seen.add(real_path)
        if "dataset_dict.json" in names:
            splits = join_words((os.path.join(parent, name) for name in visible), " or ")
            raise UserError(f"{key}: {parent} holds several splits of a dataset; name one of them: {splits}.")
        if {"state.json", "dataset_info.json"} <= set(names):
            used += _saved_tables(Path(parent), key)
            subfolders.clear()
            continue
        for link in (os.path.join(parent, name) for name in visible if name not in subfolders):
            is_above = Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(link))
            (skipped["link to a folder above"] if is_above else roots).append(link)
        for path in (os.path.join(parent, name) for name in sorted(names) if not name.startswith(".")):
            if not os.path.isfile(path):
                skipped["not a file"].append(path)
            elif SourceFile(path, Path(path)).endings[0] not in kinds:
                skipped["other kind"].append(path)
            else:
                (used if os.path.getsize(path) else skipped["empty"]).append(path)
    for path in skipped["other kind"] if not used and kinds is KNOWN else ():
        with suppress(OSError), open(path, "rb") as content:
            if problem := not_text(content.read(1 << 12), Path(path)):
                raise UserError(f"{key}: {folder} holds no text: {os.path.relpath(path, folder)} {problem}.")
    skipped = {reason: [os.path.relpath(path, folder) for path in paths] for reason, paths in skipped.items()}
    if not used:
        known = "known kind (docs/data.md lists them)" if kinds is KNOWN else f"kind {join_words(kinds, ' or ')}"
        raise UserError(f"{key}: {folder} holds no file of a {known}{_listed(skipped)}; name its files by a glob.")
    log_skipped(key, folder, len(used), skipped)
    return used


def _saved_tables(folder: Path, key: str) -> list[str]:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        paths = [str(folder / file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{key}: {folder / 'state.json'} is damaged ({first_line(error)}); save it again.") from error
    for path in paths:
        if not os.path.isfile(path):
            raise UserError(f"{key}: {path} is missing, which {folder / 'state.json'} lists; copy the folder again.")
    return paths


@cache  # once per process: text is identified several times
def log_once(message: str) -> None:
    """Log a line, but not again."""
    logger.info("%s", message)


def log_skipped(key: str, where: str, num_used: int, skipped: Mapping[str, Sequence[str]]) -> None:
    """Log which files of a folder, glob or archive are not read, by reason; once per process."""
    if listed := _listed(skipped):
        log_once(f"{key}: {where}: {count_of(num_used, 'file')} read{listed}")


def _listed(skipped: Mapping[str, Sequence[str]]) -> str:
    parts = [f"{len(paths)} {reason} ({join_words(paths, maximum=3)})" for reason, paths in skipped.items() if paths]
    return f"; skipped: {', '.join(parts)}" if parts else ""


def not_text(start: bytes, path: Path, encoding: str | None = None) -> str | None:
    """Return what a file that begins with these bytes is and what to do, as the end of a sentence; None for text.

    encoding: data.encoding.
    """
    if marked_encoding(start) or (b"\0" not in start and is_utf8(start[:4096])):
        return next((problem for pattern, problem in _SPELLED if re.match(pattern, start)), None)
    ending = path.suffix.lower()
    if start.startswith(b"PK") and ending in _OFFICE:
        return f"is {_OFFICE[ending]}, not text; convert it with `pandoc -t plain`, and name the .txt file"
    if start.startswith(b"PK") and ending in _SHEETS:
        return f"is {_SHEETS[ending]}, not text; save it as CSV"
    if start.startswith(b"PK") and ending in _SAVED:
        return f"is {_SAVED[ending]}, not text; save it as plain text"
    for pattern, problem in _FORMATS:
        if re.match(pattern, start):
            return problem
    if encoding is not None and codecs.lookup(encoding).name not in ("utf-16", "utf-32"):  # of no order without a mark
        is_wide = codecs.lookup(encoding).name.startswith("utf")
        is_readable = is_wide or b"\0" not in start or is_utf8(start)
        return None if is_readable else f"has a zero byte, so it is not text in {encoding}; remove it"
    if order := _utf16_order(start[: min(1000, len(start) // 2 * 2)]):
        return f"is UTF-16 without a byte order mark, not UTF-8; set data.encoding utf-16-{order}"
    return None


def _utf16_order(start: bytes) -> str | None:
    """Return the order of bytes, "le" or "be", in which they are text in UTF-16; None if in neither.

    Text in a narrower encoding has no control characters. The upper bytes are those of Chinese, Japanese or Korean, or
    small, as of all other letters: of Latin ones 0, of Cyrillic ones 4. If both halves are such, as of short words in
    kana, the upper bytes are those of fewer kinds.
    """
    found: dict[str, int] = {}
    has_control = sum(map(start.count, range(8))) > len(start) / 100
    if len(start) < 8 or not has_control:  # almost every file: the rest takes time
        return None
    for order, upper in (("le", start[1::2]), ("be", start[::2])):
        text = start.decode(f"utf-16-{order}", "replace")
        num_odd = sum(unicodedata.category(letter)[0] == "C" and not letter.isspace() for letter in text)
        is_letters = num_odd + text.count("\ufffd") <= len(text) / 50
        is_small = sum(byte < 0x20 for byte in upper) > 0.9 * len(upper)
        is_east_asian = sum(byte in _EAST_ASIAN for byte in upper) > 0.9 * len(upper) >= 45 and not is_utf8(start)
        if is_letters and (is_small or is_east_asian):
            found[order] = len({*upper})
    return min(found, key=lambda order: found[order], default=None)


def marked_encoding(start: bytes) -> str | None:
    """Return the encoding that a byte order mark at the start of a file states. Decoding by it removes the mark."""
    return next((encoding for mark, encoding in _MARKS if start.startswith(mark)), None)


def is_utf8(start: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # its last character may be cut
    except UnicodeDecodeError:
        return False
    return True
