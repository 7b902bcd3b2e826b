"""Finds files of packages the way pip on this machine would: its index URLs, local folders, certificate and proxy."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from kilat.base.errors import SourceError

DEFAULT_INDEX: Final = "https://pypi.org/simple"
CONNECT_TIMEOUT_S: Final = 15.0
READ_TIMEOUT_S: Final = 30.0
PIP_TIMEOUT_S: Final = 60.0
MAX_PAGE_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """What pip is configured with: index URLs in order, local folders of wheels, CA file and proxy (None: the defaults)."""

    urls: tuple[str, ...] = (DEFAULT_INDEX,)
    folders: tuple[Path, ...] = ()
    cert: str | None = None
    proxy: str | None = None


def pip_settings() -> IndexSettings:
    """Settings from pip's config files and environment, or PyPI's where pip is not installed."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return IndexSettings()
    return parse_settings(ran.stdout) if ran.returncode == 0 else IndexSettings()


def parse_settings(listing: str) -> IndexSettings:
    """Settings from the output of ``pip config list``: lines of ``section.option='value'``."""
    sections: dict[str, dict[str, str]] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if value[:1] in ("'", '"'):
            sections.setdefault(section, {})[option] = str(ast.literal_eval(value))
    options: dict[str, str] = {}
    for section in ("global", "install", "download", ":env:"):  # the later wins, as in pip
        options |= sections.get(section, {})
    urls = [options.get("index-url", DEFAULT_INDEX), *options.get("extra-index-url", "").split()]
    if options.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
        urls = []
    places = [_local_path(place) for place in options.get("find-links", "").split()]
    folders = tuple(folder for folder in places if folder is not None)
    return IndexSettings(tuple(urls), folders, options.get("cert"), options.get("proxy"))


def open_client(settings: IndexSettings) -> httpx.Client:
    """An HTTP client that trusts what this machine trusts; proxies of the environment are honoured."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    if settings.cert:
        context.load_verify_locations(settings.cert)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(
        verify=context,
        proxy=settings.proxy,
        timeout=timeout,
        follow_redirects=True,
        headers={"User-Agent": "kilat"},
    )


def find_file(client: httpx.Client, settings: IndexSettings, package: str, file_name: str) -> str:
    """URL (``https:``, ``http:`` or ``file:``) of one file of a package; raises SourceError when no index has it."""
    for folder in settings.folders:
        if (folder / file_name).is_file():
            return (folder / file_name).resolve().as_uri()
    problems: list[str] = []
    for base in settings.urls:
        local = _local_path(base)
        if local is not None:
            if (local / package / file_name).is_file():
                return (local / package / file_name).resolve().as_uri()
            continue
        try:
            links = _try_twice(client, f"{base.rstrip('/')}/{package}/")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problems.append(f"{urlsplit(base).hostname}: {type(error).__name__} {error}")
            continue
        if file_name in links:
            return _with_login(links[file_name], base)
        problems.append(f"{urlsplit(base).hostname}: no such file")
    raise SourceError(
        f"{file_name} was not found on a package index ({'; '.join(problems) or 'pip has no index'}): check the network and pip's "
        "index-url, or give a model directory or .gguf file"
    )


def _try_twice(client: httpx.Client, page: str) -> Mapping[str, str]:
    try:
        return _links(client, page)
    except httpx.TransportError:
        return _links(client, page)


def _links(client: httpx.Client, page: str) -> Mapping[str, str]:
    """File name -> URL of a package's page (PEP 691 JSON, or PEP 503 HTML); empty when the index has no such package."""
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
    with client.stream("GET", page, headers={"Accept": accept}) as response:
        if response.status_code == 404:
            return {}
        if response.status_code != 200:  # raise_for_status would show the URL, which may hold a password
            raise httpx.RemoteProtocolError(f"HTTP status {response.status_code}")
        raw = bytearray()
        for chunk in response.iter_bytes():
            raw += chunk
            if len(raw) > MAX_PAGE_BYTES:
                raise SourceError(f"package page of {urlsplit(page).hostname} is over {MAX_PAGE_BYTES} bytes")
        response_url = str(response.url)
        is_json = "json" in response.headers.get("content-type", "")
    if not is_json:
        anchors = _Anchors()
        anchors.feed(raw.decode("utf-8", "replace"))
        found = [(unquote(urlsplit(href).path).rpartition("/")[2], href) for href in anchors.hrefs]
        return {name: urljoin(response_url, href) for name, href in found}
    try:
        files = httpx.Response(200, content=bytes(raw)).json()["files"]
        return {file["filename"]: urljoin(response_url, file["url"]) for file in files}
    except (ValueError, KeyError, TypeError) as error:
        raise httpx.DecodingError(f"the package page is not understood ({error})") from error


class _Anchors(HTMLParser):
    """Collects the targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hrefs += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _with_login(url: str, base: str) -> str:
    """``url`` with the user and password of the index ``base`` when both are on the same host, as pip does."""
    login, sep, host = urlsplit(base).netloc.rpartition("@")
    parts = urlsplit(url)
    if sep and parts.netloc == host:
        return parts._replace(netloc=f"{login}@{host}").geturl()
    return url


def _local_path(place: str) -> Path | None:
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(place).expanduser() if parts.scheme == "" else None
