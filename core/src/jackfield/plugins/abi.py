"""Whether a plugin that was built for one version of a contract can work with this host's (gate 1)."""

from __future__ import annotations

from jackfield.abc import ABI_VERSIONS
from jackfield.errors import AbiError

__all__ = ["check_abi", "parse_version"]


def parse_version(text: str) -> tuple[int, int]:
    """``"1.2"`` as ``(1, 2)``."""
    major, minor = text.split(".")
    return int(major), int(minor)


def check_abi(kind: str, abi: str, where: str, host: str | None = None) -> None:
    """Accept a plugin of the host's major version and of no newer minor version.

    Args:
        kind: of plugin; each kind has versions of its own.
        abi: the version that the plugin was built for.
        where: the plugin, for messages.
        host: the host's version; default: this Jackfield's.

    Raises:
        AbiError: ``plugin.abi-newer`` or ``plugin.abi-major``.
    """
    host = host or ABI_VERSIONS[kind]
    (major, minor), (host_major, host_minor) = parse_version(abi), parse_version(host)
    if major == host_major and minor <= host_minor:
        return
    if major == host_major:
        raise AbiError(
            f"the plugin needs a newer minor version of the {kind} contract",
            code="plugin.abi-newer",
            where=where,
            expected=f"{kind} ABI {host_major}.0 to {host}",
            found=abi,
            fix=f"upgrade jackfield to a release with {kind} ABI {abi} or later: pip install --upgrade jackfield",
        )
    older = "the plugin" if major < host_major else "jackfield"
    raise AbiError(
        f"the plugin implements another major version of the {kind} contract",
        where=where,
        expected=f"{kind} ABI {host_major}.0 to {host}",
        found=abi,
        fix=f"upgrade {older} to a release for the same {kind} ABI, or install an older one of the other",
    )
