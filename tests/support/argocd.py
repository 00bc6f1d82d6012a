"""Scripts for Argo CD, run with the libraries, conversions and time limit of Argo CD."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lupa.lua51 import LuaRuntime

SECONDS = 1.0
"""Time limit of a script."""
_LIBRARIES = """
local seconds, now = ...
local libraries = {}
for name in ([[
  _G _VERSION assert collectgarbage dofile error getfenv getmetatable ipairs load loadfile
  loadstring module newproxy next package pairs pcall print rawequal rawget rawset require select
  setfenv setmetatable table tonumber tostring type unpack xpcall
]]):gmatch("%S+") do
  libraries[name] = true
end
table.foreach, table.foreachi = nil, nil
-- Without the library of strings, a string has no methods.
debug.setmetatable("", nil)
local sethook, error = debug.sethook, error
local deadline = now() + seconds
sethook(function()
  if now() > deadline then error("context deadline exceeded", 0) end
end, "", 1000)
local safe_os = {time = os.time, date = os.date}
for name in pairs(package.loaded) do
  if not libraries[name] then package.loaded[name] = nil end
end
package.loaded.os = safe_os
for name in pairs(_G) do
  if not libraries[name] then _G[name] = nil end
end
"""
Body = dict[str, Any]


def run(script: str, obj: Mapping[str, Any], seconds: float = SECONDS) -> Any:  # noqa: ANN401  any value of Lua
    """Return the result of *script* for *obj*, as Argo CD decodes it.

    Raises:
        LuaError: the script failed, or ran for longer than *seconds*.
    """
    lua = LuaRuntime(register_eval=False, register_builtins=False, unpack_returned_tuples=True)
    lua.compile(_LIBRARIES)(seconds, time.monotonic)
    lua.globals().obj = _to_lua(lua, obj)
    return _from_lua(lua.compile(script)())


def health(script: str, obj: Mapping[str, Any]) -> Body:
    """Return the status and message of an object."""
    result: Body = run(script, obj)
    assert result["status"] in {"Progressing", "Suspended", "Healthy", "Degraded"}
    return result


def discover(script: str, obj: Mapping[str, Any]) -> list[Body]:
    """Return the actions of an object."""
    actions: Body = run(script, obj)
    return [{"name": name, **action} for name, action in sorted(actions.items())]


def act(script: str, obj: Mapping[str, Any]) -> tuple[str, Body]:
    """Return the operation of an action, `create` or `patch`, and its object."""
    result = run(script, obj)
    if isinstance(result, list):
        [impacted] = result
        return impacted["operation"], impacted["resource"]
    return "patch", _with_maps_of(result, obj)


def merge_patch(old: Any, new: Any) -> Any:  # noqa: ANN401  JSON
    """Return the JSON merge patch from *old* to *new*, by which Argo CD writes a `patch`."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    patch = {name: merge_patch(old.get(name), value) for name, value in changed.items()}
    return patch | {name: None for name in old if name not in new}


def _to_lua(lua: LuaRuntime, value: Any) -> Any:  # noqa: ANN401  JSON
    if isinstance(value, Mapping):
        return lua.table_from({name: _to_lua(lua, inner) for name, inner in value.items()})
    if isinstance(value, list):
        return lua.table_from([_to_lua(lua, inner) for inner in value])
    return value


def _from_lua(value: Any) -> Any:  # noqa: ANN401  any value of Lua
    """Convert a table: one without entries, or with the key 1, is a list."""
    if not hasattr(value, "items"):
        return value
    items = dict(value.items())
    if not items or 1 in items:
        assert list(items) == list(range(1, len(items) + 1))
        return [_from_lua(inner) for inner in items.values()]
    return {name: _from_lua(inner) for name, inner in items.items()}


def _with_maps_of(new: Any, old: Any) -> Any:  # noqa: ANN401  JSON
    """Restore maps of *old* that Lua returns as empty lists."""
    if isinstance(old, Mapping) and new == []:
        return old
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {
            name: _with_maps_of(value, old[name]) if name in old else value
            for name, value in new.items()
        }
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(new, old, strict=False)
        return [_with_maps_of(*pair) for pair in pairs] + new[len(old) :]
    return new
