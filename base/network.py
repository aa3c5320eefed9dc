"""What the Hub's client takes from the environment, looked at before it fails in words of its own."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from .errors import UsageError

_PROXIES = ("all_proxy", "https_proxy", "http_proxy")


def check_network(token: str | None = None) -> None:
    """Refuses a proxy, an address of the Hub or a token with which no request could even be made.

    Args:
        token: Hub token; by default the stored one.

    Raises:
        UsageError: naming the setting, never its value where that may be a secret.
    """
    import httpx
    from huggingface_hub import constants, get_token

    address = urlsplit(constants.ENDPOINT)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise UsageError(
            f"HF_ENDPOINT: is {constants.ENDPOINT!r}, expected an address with its scheme such as "
            "https://huggingface.co; correct it, or unset it"
        )
    where = "the given token" if token else "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the stored token"
    try:
        token = token or get_token() or ""
    except OSError as error:
        raise UsageError(
            f"{error.filename}: the stored Hub token cannot be read there ({error.strerror}); correct HF_HOME, or the "
            "permissions"
        ) from error
    odd = next((place for place, sign in enumerate(token, 1) if not "!" <= sign <= "~"), None)
    if odd is not None:
        raise UsageError(
            f"{where}: character {odd} of it is in no Hub token, expected hf_ with letters and digits; copy it again"
        )
    try:
        httpx.Client().close()
    except ImportError as error:
        raise UsageError(
            f"{_named()}: is a SOCKS proxy, which needs the package socksio, and that is not installed; install "
            "httpx[socks], or unset it"
        ) from error
    except (ValueError, httpx.InvalidURL) as error:
        raise UsageError(
            f"{_named()}: is no address of a proxy, expected one such as http://host:port; correct it, or unset it"
        ) from error


def _named() -> str:
    return ", ".join(name for name in os.environ if name.lower() in _PROXIES) or "the proxy of this system"
