"""The plugin system: manifests, discovery, checks of structure, the registry and hooks.

:func:`discover` reads the manifests of the installed plugins and imports nothing; :func:`load_plugin` imports the one
plugin that is asked for. Lifecycle events and small parts go through :func:`hook_manager`.
"""

from __future__ import annotations

from jackfield.plugins.hooks import HookManager, hook_manager, hookimpl
from jackfield.plugins.manifest import Manifest, require_capability
from jackfield.plugins.registry import GROUPS, LoadedPlugin, PluginRecord, Registry, discover, installed, load_plugin

__all__ = [
    "GROUPS",
    "HookManager",
    "LoadedPlugin",
    "Manifest",
    "PluginRecord",
    "Registry",
    "discover",
    "hook_manager",
    "hookimpl",
    "installed",
    "load_plugin",
    "require_capability",
]
