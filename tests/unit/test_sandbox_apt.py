"""Reading what a machine's apt is set up for."""

from pathlib import Path

import pytest

from sandboxes.apt import Source, fetching, release_source
from sandboxes.errors import ImageBuildFailed

DEB822 = """\
# A comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: trixie trixie-updates
Components: main contrib
Signed-By: /usr/share/keyrings/example.gpg
"""
OTHER = "Types: deb\nURIs: https://other.example\nSuites: nodistro\nComponents: main\n"
EMBEDDED = """\
Types: deb
URIs: https://mirror.example/debian/
Suites: trixie
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc: def
 -----END PGP PUBLIC KEY BLOCK-----
"""


def etc(root: Path, suite: str = "trixie", **sources: str) -> Path:
    folder = root / "apt" / "sources.list.d"
    folder.mkdir(parents=True)
    (root / "os-release").write_text(f'NAME="A system"\nVERSION_CODENAME={suite}\n')
    for name, text in sources.items():
        path = root / "apt" / "sources.list" if name == "sources_list" else folder / name.replace("_", ".")
        path.write_text(text)
    return root


def test_deb822(tmp_path: Path) -> None:
    found = release_source(etc(tmp_path, a_sources=OTHER, b_sources=OTHER + "\n" + DEB822))
    assert found == Source("http://mirror.example/debian", "trixie", "/usr/share/keyrings/example.gpg")


def test_embedded_key_is_left_to_debootstrap(tmp_path: Path) -> None:
    assert release_source(etc(tmp_path, d_sources=EMBEDDED)) == Source("https://mirror.example/debian/", "trixie")


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("deb http://m.example/ubuntu noble main universe", Source("http://m.example/ubuntu", "noble")),
        ("deb [arch=amd64 signed-by=/k.gpg] https://m noble main # c", Source("https://m", "noble", "/k.gpg")),
        ("deb [ trusted=yes ] file:/srv/mirror noble main", Source("file:/srv/mirror", "noble", "", True)),
    ],
)
def test_one_line_format(tmp_path: Path, line: str, source: Source) -> None:
    text = f"# deb http://old noble main\ndeb-src http://src noble main\ndeb http://x other main\n{line}\n"
    assert release_source(etc(tmp_path, "noble", sources_list=text)) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        DEB822 + "Enabled: no\n",
        DEB822.replace("deb deb-src", "deb-src"),
        DEB822.replace("main", "contrib"),
        DEB822.replace("http://mirror", "mirror+http://mirror"),
    ],
)
def test_without_a_fitting_source(tmp_path: Path, text: str) -> None:
    with pytest.raises(ImageBuildFailed, match="'trixie'"):
        release_source(etc(tmp_path, a_sources=text, c_save=DEB822))


def test_other_systems_are_named(tmp_path: Path) -> None:
    with pytest.raises(ImageBuildFailed, match="os-release"):
        release_source(tmp_path)
    (tmp_path / "os-release").write_text("ID=other\n")
    with pytest.raises(ImageBuildFailed, match="VERSION_CODENAME"):
        release_source(tmp_path)


DUMP = """\
APT "";
Acquire::http "";
Acquire::http::Proxy "http://proxy.example:3128/";
Acquire::https::Proxy "DIRECT";
Acquire::https::CAInfo "/etc/ssl/own.pem";
Acquire::https::Verify-Peer "false";
"""


def test_proxy_and_authorities_of_apt_are_passed_on() -> None:
    how = fetching(DUMP, {})
    assert how.environment == {"http_proxy": "http://proxy.example:3128/"}
    assert how.options == ["--ca-certificate=/etc/ssl/own.pem", "--no-check-certificate"]
    assert fetching(DUMP, {"http_proxy": "http://mine"}).environment == {}
    assert fetching('APT "";\n', {}) == fetching("", {})
    assert fetching("", {}).options == []
