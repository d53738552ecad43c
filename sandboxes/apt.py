"""What this machine's apt is set up for: where its packages come from and how they are fetched."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxes.errors import ImageBuildFailed

_SCHEMES = ("http://", "https://", "file:/", "copy:/")


@dataclass(frozen=True, slots=True)
class Source:
    """A package archive, for example `Source("http://mirror.example/debian", "bookworm")`."""

    mirror: str
    """URI of the archive."""
    suite: str
    """Code name of the release."""
    keyring: str = ""
    """File with the keys that sign it; empty for the default of debootstrap."""
    trusted: bool = False
    """Whether apt is told to trust it without a signature."""


def release_source(etc: Path = Path("/etc")) -> Source:
    """The archive of the machine's own release. Raises `ImageBuildFailed` when apt has none."""
    suite = _code_name(etc / "os-release")
    for kind, options, uris, suites, components in _entries(etc / "apt"):
        if kind != "deb" or suite not in suites or "main" not in components:
            continue
        for uri in uris:
            if uri.startswith(_SCHEMES):
                keyring = options.get("signed-by", "")
                trusted = options.get("trusted", "no").lower() in ("yes", "true")
                return Source(uri, suite, keyring if keyring.startswith("/") else "", trusted)
    raise ImageBuildFailed(f"{etc}/apt has no source with the suite {suite!r} and the component 'main': add one")


def _code_name(os_release: Path) -> str:
    try:
        text = os_release.read_text()
    except OSError as error:
        raise ImageBuildFailed(f"cannot read {os_release}: {error.strerror}") from error
    values = dict(line.split("=", 1) for line in shlex.split(text, comments=True) if "=" in line)
    if not values.get("VERSION_CODENAME"):
        raise ImageBuildFailed(f"{os_release} names no VERSION_CODENAME: this is not a release of Debian or Ubuntu")
    return values["VERSION_CODENAME"]


Entry = tuple[str, dict[str, str], list[str], list[str], list[str]]
"""Type, options, URIs, suites and components."""


def _entries(apt: Path) -> Iterator[Entry]:
    folder = apt / "sources.list.d"
    for path in [apt / "sources.list", *(sorted(folder.iterdir()) if folder.is_dir() else [])]:
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".list":
            yield from _one_line_entries(text)
        elif path.suffix == ".sources":
            yield from _deb822_entries(text)


def _one_line_entries(text: str) -> Iterator[Entry]:
    """Lines such as `deb [signed-by=/a.gpg] http://mirror/debian bookworm main`."""
    for line in text.splitlines():
        words = line.partition("#")[0].replace("[", " [ ").replace("]", " ] ").split()
        options: dict[str, str] = {}
        if "[" in words and "]" in words:
            start, end = words.index("["), words.index("]")
            options = {k.lower(): v for k, _, v in (word.partition("=") for word in words[start + 1 : end])}
            words = words[:start] + words[end + 1 :]
        if len(words) >= 3:
            yield words[0], options, [words[1]], [words[2]], words[3:]


def _deb822_entries(text: str) -> Iterator[Entry]:
    """Stanzas of `Key: value` lines, continued by lines that begin with a space."""
    for stanza in text.replace("\n \n", "\n .\n").split("\n\n"):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[key] = fields.get(key, "") + "\n" + line.strip()
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false"):
            continue
        uris, suites, components = (fields.get(name, "").split() for name in ("uris", "suites", "components"))
        for kind in fields.get("types", "").split():
            yield kind, fields, uris, suites, components


@dataclass(frozen=True, slots=True)
class Fetching:
    """How apt fetches, in the terms of wget and debootstrap."""

    environment: dict[str, str]
    """Proxy variables to add."""
    options: list[str]
    """Options of debootstrap."""


def fetching(dump: str, environment: Mapping[str, str]) -> Fetching:
    """Read the output of `apt-config dump`. A proxy in the environment wins over apt's, as it does for apt itself."""
    settings: dict[str, str] = {}
    for line in dump.splitlines():
        name, _, value = line.rstrip(";").partition(" ")
        settings[name.lower()] = value.strip('"')
    added = {}
    for scheme in ("http", "https"):
        variable, proxy = f"{scheme}_proxy", settings.get(f"acquire::{scheme}::proxy", "")
        if proxy and proxy != "DIRECT" and not environment.get(variable):
            added[variable] = proxy
    options = []
    if authorities := settings.get("acquire::https::cainfo"):
        options.append(f"--ca-certificate={authorities}")
    if settings.get("acquire::https::verify-peer", "true") in ("false", "0", "no"):
        options.append("--no-check-certificate")
    return Fetching(added, options)
