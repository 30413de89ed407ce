"""The plugin system: manifests, discovery, checks of structure, the registry and hooks.

:func:`discover` reads the manifests of the installed plugins without importing them; :func:`load_plugin` imports one
plugin. :class:`HookManager` handles lifecycle events and the registration of small parts.
"""

from __future__ import annotations

from jackfield.plugins.hooks import HookManager, hookimpl
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.registry import PluginRecord, Registry, discover, installed, load_plugin

__all__ = ["HookManager", "Manifest", "PluginRecord", "Registry", "discover", "hookimpl", "installed", "load_plugin"]
